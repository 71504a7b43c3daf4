"""What every node is, whatever its role: identity, network, rollouts of its own, life, and what it shows.

For: the parts that `node/node.py` (a trainer) and `node/follower.py` share, so that each of them says only
what its role adds. `NodeCore.run` starts, runs the stages that the role gives, and closes; events about the
node as a whole (stages, peers, health) are made here. Not for: training, or where weights come from.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.clock import Clock
from node.compute import Compute
from node.config import NodeConfig
from node.events import EventBus, Health, NodeStarted, NodeStopped, Notice, NoticeLevel, PeersSeen, StagesSeen
from node.membership import Membership
from node.network import Network
from node.peers.book import PeerBook
from node.peers.trust import Standing, TrustSettings, save_standings
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine
from node.rollout.environment import Environment
from node.rollout.generate import Generator
from node.rollout.policy import Policy
from node.rollout.prompts import PromptFeed, Universe, WindowLog
from node.rollout.scoring import OwnScorer
from node.rollout.stage import RolloutStage
from node.runtime import Runtime
from node.sandbox.scorer import Scorer
from node.sandbox.strength import describe
from node.share.accepted import Accepted
from node.state.paths import Home
from node.state.stores import ReplayGuard, SequenceSource
from node.supervise import LoopLag, StageGauge, run_stages
from node.transport.base import Transport
from node.weights.sharing import WeightsSharing
from protocol.charter import swarm_id
from protocol.identity import Identity
from protocol.messages import Charter, Digest, Lineage, PeerId
from protocol.prompts import window_of

__all__ = ["CoreParts", "NodeCore", "Stages"]

SNAPSHOT_S = 0.5
HEALTH_S = 1.0

Stages = dict[str, Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True)
class CoreParts:
    """What any node is made of; `node/main.py` makes real ones, the simulation seeded ones."""

    identity: Identity
    charter: Charter
    policy: Policy
    engine: Engine
    environments: Mapping[str, Environment]
    sandbox: Scorer
    transport: Transport | None
    """Started; the node closes it. None: train alone."""
    sequence: SequenceSource
    replay: ReplayGuard
    windows: WindowLog
    standings: Sequence[Standing]
    """What is remembered of peers' conduct."""
    clock: Clock
    compute: Compute
    bus: EventBus
    rss_bytes: Callable[[], int]
    """Resident memory of this process; a constant in simulations."""


class NodeCore:
    """Base of the two roles. A role gives `_stages` and what is needed before and after them; `run` returns
    when `stop` was called and all is closed."""

    def __init__(self, config: NodeConfig, parts: CoreParts) -> None:
        self.config = config
        self._core = parts
        self._charter = parts.charter
        self._swarm_id = swarm_id(parts.charter)
        self._peer_id = parts.identity.peer_id
        self._clock, self._bus, self._compute = parts.clock, parts.bus, parts.compute
        self._stop = asyncio.Event()
        self._reason = "steps done"
        self._lag = LoopLag()
        self._home = Home(config.home)
        self._run_dir = self._home.run(config.run)
        self._rng = random.Random(config.seed)
        self._runtime = Runtime(self._clock, self._compute, self._bus, self._rng)
        self._membership = Membership(parts.identity, parts.charter, parts.clock)
        self._peers = PeerBook(
            self._runtime,
            self._membership,
            TrustSettings(
                newcomer=config.weight.newcomer_trust, quarantine_windows=config.weight.quarantine_windows
            ),
            parts.standings,
            refusals=parts.transport.refusals if parts.transport is not None else None,
        )
        rollout = config.rollout
        self._admission = Admission(rollout.max_staleness, config.train.local_groups, rollout.token_budget)
        self._made: asyncio.Queue[Accepted] = asyncio.Queue(2 * config.train.local_groups)
        """Own groups, scored."""
        self._rollout: RolloutStage
        self._gauges: dict[str, StageGauge] = {}
        self._universe = Universe(self._swarm_id, self._charter, parts.environments)
        self._own_scorer = OwnScorer(parts.environments, parts.sandbox)
        self._network: Network | None = None
        if parts.transport is not None:
            self._network = Network(
                self._runtime,
                self._membership,
                self._peers,
                parts.transport,
                config,
                sequence=parts.sequence,
                replay=parts.replay,
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
        began_s = self._clock.monotonic_s()
        transport = self._core.transport
        self._bus.emit(self._started())
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
            wall_s = self._clock.monotonic_s() - began_s
            self._emit_peers()
            self._bus.emit(self._health_now())
            self._bus.emit(
                NodeStopped(at=self._clock.now_ms(), reason=self._reason, steps=self._steps(), wall_s=wall_s)
            )

    def stop(self, reason: str) -> None:
        """End the run; `run` then closes everything and returns."""
        self._reason = reason
        self._stop.set()

    # --- rollouts -----------------------------------------------------------------------------------------

    def _open_rollout(self, awake: asyncio.Event | None) -> RolloutStage:
        return RolloutStage(
            self._runtime,
            PromptFeed(self._runtime, self._membership, self._universe, self._core.windows),
            self._admission,
            self._made,
            self._publish,
            max_in_flight=self.config.rollout.max_in_flight,
            awake=awake,
        )

    def _generator(self, lineage: Lineage) -> Generator:
        """What generates for `lineage`, by this node."""
        core = self._core
        return Generator(self._membership, lineage, core.policy, core.engine, self._own_scorer, self.config)

    async def _publish(self, own: Accepted, body: bytes) -> None:
        """An own group to peers."""
        raise NotImplementedError

    # --- weights ------------------------------------------------------------------------------------------

    def _share_weights(self, network: Network) -> WeightsSharing:
        """This node's part in how the weights of `lineage` travel."""
        return WeightsSharing(
            self.config.broadcast,
            self._home,
            network.transport,
            self._swarm_id,
            providers=lambda root: [*network.members_of(self.lineage), *self._providers(root)],
            refused=self._peers.refused,
            clock=self._clock,
            compute=self._compute,
            rng=self._rng,
        )

    def _providers(self, root: Digest) -> Sequence[PeerId]:
        """Connected peers beyond the lineage's that may have a blob."""
        return ()

    # --- what stages call ---------------------------------------------------------------------------------

    def _gauge(self, *gauges: StageGauge) -> None:
        """Show these, in this order."""
        self._gauges = {gauge.stage: gauge for gauge in gauges}

    def _window(self) -> float:
        """Swarm time in windows, with the fraction of the current one."""
        now_ms = self._clock.now_ms()
        inside_ms = (now_ms - self._charter.created_at) % self._charter.window_ms
        return window_of(self._charter, now_ms) + inside_ms / self._charter.window_ms

    def _keep(self, standings: Sequence[Standing]) -> None:
        """What is remembered of peers' conduct, to disk. Blocking. Raises OSError."""
        save_standings(self._home.state / "trust.json", self._swarm_id, standings)

    def _notice(self, level: NoticeLevel, text: str) -> None:
        self._bus.emit(Notice(at=self._clock.now_ms(), level=level, text=text))

    # --- events -------------------------------------------------------------------------------------------

    def _started(self) -> NodeStarted:
        parts = self._core
        return NodeStarted(
            at=self._clock.now_ms(),
            name=self.config.name,
            peer_id=self._peer_id,
            role=self.config.role,
            swarm=self._charter.name,
            swarm_id=self._swarm_id,
            addresses=parts.transport.addresses() if parts.transport is not None else (),
            model=str(parts.policy.path),
            params=parts.policy.params,
            engine=parts.engine.name,
            sandbox=describe(parts.sandbox.report),
            run_dir=str(self._run_dir.root),
        )

    async def _snapshots(self) -> None:
        while True:
            self._bus.emit(
                StagesSeen(
                    at=self._clock.now_ms(),
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
                self._core.policy.tokenizer_digest,
            )
            self._bus.emit(PeersSeen(at=self._clock.now_ms(), peers=table))

    async def _health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            self._bus.emit(self._health_now())

    def _health_now(self) -> Health:
        publisher = self._network.publisher if self._network is not None else None
        return Health(
            at=self._clock.now_ms(),
            loop_lag_p99_s=self._lag.p99_s(),
            rss_bytes=self._core.rss_bytes(),
            transport_restarts=self._network.transport.restarts if self._network is not None else 0,
            sandbox_restarts=self._core.sandbox.restarts,
            refused=self._peers.refusals(),
            announced=publisher.announced if publisher is not None else 0,
            bodies_fetched=0,
            bodies_served=publisher.bodies_served if publisher is not None else 0,
            unshared=self._rollout.unshared,
        )
