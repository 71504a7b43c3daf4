"""What every node is, whatever its role: identity, network, rollouts of its own, life, and what it shows.

For: the parts that `node/node.py` (a trainer) and `node/follower.py` share, so that each of them says only
what its role adds. `NodeCore.run` starts, runs the stages that the role gives, and closes; events about the
node as a whole (stages, peers, health) are made here. Not for: training, or where weights come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from node.events import Health, NodeStarted, NodeStopped, PeersSeen, StagesSeen
from node.membership import Membership
from node.network import Network
from node.open.parts import Parts
from node.open.stores import Stores
from node.peers.book import PeerBook
from node.peers.trust import Standing, TrustSettings, save_standings
from node.rollout.admission import Admission
from node.rollout.generate import Generator
from node.rollout.prompts import PromptFeed, Universe
from node.rollout.scoring import OwnScorer
from node.rollout.stage import RolloutStage
from node.runtime import Runtime
from node.sandbox.strength import describe
from node.share.accepted import Accepted
from node.state.paths import Home
from node.supervise import LoopLag, StageGauge, resident_bytes, run_stages
from node.transport.base import Transport
from node.weights.sharing import WeightsSharing
from protocol.messages import Lineage

__all__ = ["NodeCore", "Stages"]

SNAPSHOT_S = 0.5
HEALTH_S = 1.0

Stages = dict[str, Coroutine[Any, Any, None]]


class NodeCore:
    """Base of the two roles. A role gives `_stages` and what is needed before and after them; `run` returns
    when `stop` was called and all is closed."""

    def __init__(
        self,
        parts: Parts,
        runtime: Runtime,
        membership: Membership,
        stores: Stores,
        transport: Transport | None,
        rss_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        """`transport` is started, and closed by the node; None trains alone. `rss_bytes` tells the resident
        memory of this process: a constant in simulations."""
        self.config = config = parts.config
        self._parts = parts
        self._runtime = runtime
        self._membership = membership
        self._stores = stores
        self._transport = transport
        self._rss_bytes = rss_bytes
        self._stop = asyncio.Event()
        self._reason = "steps done"
        self._lag = LoopLag()
        self._home = Home(config.home)
        self._run_dir = self._home.run(config.run)
        self._peers = PeerBook(
            self._runtime,
            self._membership,
            TrustSettings(
                newcomer=config.weight.newcomer_trust, quarantine_windows=config.weight.quarantine_windows
            ),
            stores.standings,
            refusals=transport.refusals if transport is not None else None,
        )
        rollout = config.rollout
        self._admission = Admission(rollout.max_staleness, config.train.local_groups, rollout.token_budget)
        self._made: asyncio.Queue[Accepted] = asyncio.Queue(2 * config.train.local_groups)
        """Own groups, scored."""
        self._rollout: RolloutStage
        self._gauges: dict[str, StageGauge] = {}
        charter, swarm_id = membership.charter, membership.swarm_id
        self._universe = Universe(swarm_id, charter, parts.environments)
        self._own_scorer = OwnScorer(parts.environments, parts.sandbox)
        self._network: Network | None = None
        if transport is not None:
            self._network = Network(
                self._runtime,
                self._membership,
                self._peers,
                transport,
                config,
                sequence=stores.sequence,
                replay=stores.replay,
            )
            self._network.presence.lineage = self.lineage

    # --- what a role says ---------------------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage | None:
        """Whose policy this node generates with; None while a follower has no owner."""
        raise NotImplementedError

    def _stages(self) -> Stages:
        """The role's loops. One that raises ends the node with that error."""
        raise NotImplementedError

    async def _begin(self) -> None:
        """Before any stage runs."""

    async def _end(self) -> None:
        """After the stages have ended in order."""

    def _close(self) -> None:
        """At the end in any case, when the network is closed."""

    def _steps(self) -> int:
        """Steps made, or versions reached, in this run."""
        raise NotImplementedError

    def _emit_weights(self) -> None:
        """Events on how weights travel, about twice a second."""

    # --- life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, work, stop. Raises what a stage raised."""
        began_s = self._runtime.monotonic_s()
        transport = self._transport
        self._runtime.emit(self._started())
        try:
            await self._begin()
            stages = {**self._stages(), "snapshots": self._snapshots(), "health": self._health()}
            stages["lag"] = self._lag.run()
            if self._network is not None:
                stages |= self._network.stages()
            await run_stages(stages, until=self._stop)
            await self._end()
        except BaseException as error:
            self._reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if transport is not None:
                await transport.close()
            self._close()
            wall_s = self._runtime.monotonic_s() - began_s
            self._emit_peers()
            self._runtime.emit(self._health_now())
            stopped_at = self._runtime.now_ms()
            self._runtime.emit(
                NodeStopped(at=stopped_at, reason=self._reason, steps=self._steps(), wall_s=wall_s)
            )

    def stop(self, reason: str) -> None:
        """End the run; `run` then closes everything and returns."""
        self._reason = reason
        self._stop.set()

    # --- rollouts -----------------------------------------------------------------------------------------

    def _open_rollout(self, awake: asyncio.Event | None) -> RolloutStage:
        return RolloutStage(
            self._runtime,
            PromptFeed(self._runtime, self._membership, self._universe, self._stores.windows),
            self._admission,
            self._made,
            self._publish,
            max_in_flight=self.config.rollout.max_in_flight,
            awake=awake,
        )

    def _generator(self, lineage: Lineage) -> Generator:
        """What generates for `lineage`, by this node."""
        parts = self._parts
        return Generator(self._membership, lineage, parts.policy, parts.engine, self._own_scorer, self.config)

    async def _publish(self, own: Accepted, body: bytes) -> None:
        """An own group to peers."""
        raise NotImplementedError

    # --- weights ------------------------------------------------------------------------------------------

    def _share_weights(self, network: Network) -> WeightsSharing:
        """This node's part in how the weights of `lineage` travel."""
        return WeightsSharing(
            self._runtime,
            self._membership,
            network,
            self._peers,
            self.config.broadcast,
            self._home,
        )

    # --- what stages call ---------------------------------------------------------------------------------

    def _gauge(self, *gauges: StageGauge) -> None:
        """Show these, in this order."""
        self._gauges = {gauge.stage: gauge for gauge in gauges}

    def _keep(self, standings: Sequence[Standing]) -> None:
        """What is remembered of peers' conduct, to disk. Blocking. Raises OSError."""
        save_standings(self._home.trust, self._membership.swarm_id, standings)

    # --- events -------------------------------------------------------------------------------------------

    def _started(self) -> NodeStarted:
        parts = self._parts
        return NodeStarted(
            at=self._runtime.now_ms(),
            name=self.config.name,
            peer_id=self._membership.peer_id,
            role=self.config.role,
            swarm=self._membership.charter.name,
            swarm_id=self._membership.swarm_id,
            addresses=self._transport.addresses() if self._transport is not None else (),
            model=str(parts.policy.path),
            params=parts.policy.params,
            engine=parts.engine.name,
            sandbox=describe(parts.sandbox.report),
            run_dir=str(self._run_dir.root),
        )

    async def _snapshots(self) -> None:
        while True:
            self._runtime.emit(
                StagesSeen(
                    at=self._runtime.now_ms(),
                    stages=tuple(gauge.status() for gauge in self._gauges.values()),
                    rollouts_in_flight=self._rollout.in_flight,
                    tokens_sampled=self._rollout.sampled,
                )
            )
            self._emit_peers()
            self._emit_weights()
            await asyncio.sleep(SNAPSHOT_S)

    def _emit_peers(self) -> None:
        if self._network is not None:
            table = self._peers.table(
                self._network.presence.connected,
                self._network.presence.known,
                self._parts.policy.tokenizer_digest,
            )
            self._runtime.emit(PeersSeen(at=self._runtime.now_ms(), peers=table))

    async def _health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            self._runtime.emit(self._health_now())

    def _health_now(self) -> Health:
        publisher = self._network.publisher if self._network is not None else None
        return Health(
            at=self._runtime.now_ms(),
            loop_lag_p99_s=self._lag.p99_s(),
            rss_bytes=self._rss_bytes(),
            transport_restarts=self._network.transport.restarts if self._network is not None else 0,
            sandbox_restarts=self._parts.sandbox.restarts,
            refused=self._peers.refusals(),
            announced=publisher.announced if publisher is not None else 0,
            bodies_fetched=0,
            bodies_served=publisher.bodies_served if publisher is not None else 0,
            unshared=self._rollout.unshared,
        )
