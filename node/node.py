"""A node: its services in the order of the flow, and their life. `roles.py` connects them.

                prompts(window, peer)                                announcements of peers
                        |                                                      |
    ROLLOUT  admission -> engine -> score           SHARE.collect  offers -> choose by need -> fetch
             waits: trainer (staleness bound),                     waits: announcements, need, verify queue
             next version (token budget), next                                 | fetched (bounded queue)
             window, engine (asleep), own queue                                |
                        |                                          VERIFY      cheap -> dear, hard / soft
                        |                                                      waits: fetched bodies
          +-------------+-------------+                                        | accepted only
          | own (bounded queue)       |                            SHARE.pool  bounded in groups, uses, age
          |                           v                                        |
          |                   SHARE.publish  announce every slot,              |
          |                                  serve mixed groups                |
          v                                                                    v
    WEIGHT   own lag            trust x treatment (graft | hacpo | compat)     draw: peer first, then group
             waits: peers' groups, at most `external_wait_s` and only while peers are active
                        |
    TRAIN    batch (old log-probabilities) -> L_own + sum lambda_src L_src -> step -> policy_version + 1
                     ^                                                         |
                     +-- weights as before, as a version of their own <-- bad? +   (`train/supervisor.py`)
             waits: own groups (unblocked by ROLLOUT); with one device for both the engine sleeps meanwhile
                        |
    BROADCAST  new weights -> engine, in place -> probe (D7); the end of a step unblocks ROLLOUT's admission
                        |
               the newest proven version -> delta on the chain -> chunks to followers (`weights/publish.py`)
               waits: a new version; beside the training, which never waits for it
                        |
    MERGE      every few windows, if enabled: anchors of trainers of this base model -> one set of weights,
               taken between two steps, judged on held-out prompts, adopted or not (`weights/merge/adopt.py`)
               waits: the next round, partners' sets, their blobs

A node without a network has no SHARE, VERIFY and MERGE, and publishes nothing. A follower has no TRAIN: its
engine's versions are those of an owner (`weights/follow/follower.py`), and each gives room to as many groups
as admission allows, then waits for the next; so a follower whose owner stops soon stops generating, too.

Backpressure: ROLLOUT runs at most `max_staleness` versions ahead of TRAIN (`rollout/admission.py`; a step
gives its groups' room back, whether it made a version or not); everything else is a bounded queue, pool or
book. An author whose bodies do not come rests, so that stalling peers do not stop SHARE.collect. Losing the
network is never fatal: SHARE waits, the rest goes on. An engine that fails its probe for good ends sharing in
both directions (`weights/engine_sync.py`), not the run. A service that raises ends the node with that error:
peers' errors were caught and counted at their boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.events import NodeStarted, NodeStopped
from node.membership import Membership
from node.open.parts import Parts
from node.open.stores import Stores
from node.roles import Common, FollowerRole, TrainerRole, open_follower, open_trainer
from node.runtime import Runtime
from node.status import Status
from node.supervise import ProcessMeter, run_stages
from node.transport.base import Transport
from protocol.errors import OurFault

__all__ = ["Node", "open_node"]


async def open_node(
    parts: Parts,
    runtime: Runtime,
    membership: Membership,
    stores: Stores,
    transport: Transport | None,
    meter: Callable[[], tuple[int, int]] | None = None,
) -> Node:
    """A node of the configured role, not running yet: the one way for a real start and for a simulation.
    `transport` is started, and closed by the node; without one it trains alone. `meter` tells resident bytes
    and descriptors of this process, where it is not to be asked. Raises ConfigError for a follower without a
    network."""
    common = Common(parts, runtime, membership, stores, transport)
    meter = meter or ProcessMeter()
    if parts.learner is not None:
        return Node(common, await open_trainer(common, parts.learner), meter)
    return Node(common, open_follower(common), meter)


class Node:
    """Services and their life. `run` returns when the steps are done (or `stop` was called) and all is
    closed."""

    def __init__(
        self, common: Common, role: TrainerRole | FollowerRole, meter: Callable[[], tuple[int, int]]
    ) -> None:
        self.config = common.parts.config
        self.peers = common.peers
        self.role = role
        """The services that others than this class have a use for, by name."""
        self._common = common
        self._services = (*role.services, *common.network_services())
        self._status = Status(common.runtime, self._services, role.rollout, meter, role.finished)
        self._stop = asyncio.Event()
        self._reason = "steps done"

    @property
    def finished(self) -> asyncio.Event:
        """Set once all steps are done and evaluated; never for a follower."""
        return self.role.finished

    def stop(self, reason: str) -> None:
        """End the run; `run` then closes everything and returns."""
        self._reason = reason
        self._stop.set()

    async def run(self) -> None:
        """Start, work, stop. Raises what a service raised."""
        runtime = self._common.runtime
        began_s = runtime.monotonic_s()
        runtime.emit(self._started())
        try:
            async with self._common.closing:
                for service in self._services:
                    await service.start()
                loops = {service.name: service.whole_run() for service in self._services}
                await run_stages(
                    {**loops, "status": self._status.run(), "end": self._end()}, until=self._stop
                )
                await self._stop_services()
        except BaseException as error:
            self._reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._status.tell_last()
            wall_s, steps = runtime.monotonic_s() - began_s, self.role.steps()
            runtime.emit(NodeStopped(at=runtime.now_ms(), reason=self._reason, steps=steps, wall_s=wall_s))

    async def _stop_services(self) -> None:
        """All of them, whatever one raises; then the first such fault."""
        faults: list[OurFault] = []
        for service in self._services:
            try:
                await service.stop()
            except OurFault as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    async def _end(self) -> None:
        await self.finished.wait()
        if not self.config.linger:
            self._stop.set()

    def _started(self) -> NodeStarted:
        common, config = self._common, self.config
        return NodeStarted(
            at=common.runtime.now_ms(),
            name=config.name,
            peer_id=common.membership.peer_id,
            role=config.role,
            swarm=common.membership.charter.name,
            swarm_id=common.membership.swarm_id,
            addresses=common.transport.addresses() if common.transport is not None else (),
            model=str(common.parts.policy.path),
            params=common.parts.policy.params,
            engine=common.parts.engine.name,
            sandbox=common.parts.host.walls,
            run_dir=str(common.run_dir.root),
        )
