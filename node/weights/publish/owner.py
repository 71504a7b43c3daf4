"""The owner's side of broadcast: every proven version is published on this node's chain, beside the training.

    EngineBroadcast --offer(version, weights)--> newest waiting one --run--> WeightsPublisher --> followers
    Merger --contribute()--> anchor of the newest version published ------------^

Coding and publishing a version may take longer than a step: then the versions in between are left out, and
the newest is published. The trainer never waits. A version that cannot be published (a full disk) is told,
and the next one is tried. Not for the local engine (`engine.py`), nor for how blobs travel (`exchange.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from torch import Tensor

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import EventBus, NoticeLevel, VersionPublished, WeightsSeen
from node.rollout.adapter import AdapterSpec
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.weights.chain.base import base_bits, travelling
from node.weights.chain.bf16 import U16, to_tensors
from node.weights.publish.publish import WeightsPublisher
from node.weights.sharing import WeightsSharing
from protocol.delta import warm_up
from protocol.errors import LocalProtocolError, OurFault
from protocol.identity import Identity
from protocol.messages import Digest, Lineage, SignedLink

__all__ = ["OwnerBroadcast"]


class OwnerBroadcast:
    """Publishes one lineage, this node's own. `followers()` says how many are connected; `notice(level,
    text)` tells the operator."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: Digest,
        lineage: Lineage,
        policy: Policy,
        adapter: AdapterSpec | None,
        sharing: WeightsSharing,
        *,
        anchor_every: int,
        compute: Compute,
        clock: Clock,
        bus: EventBus,
        gauge: StageGauge,
        notice: Callable[[NoticeLevel, str], None],
        followers: Callable[[], int],
    ) -> None:
        self._identity = identity
        self._swarm_id = swarm_id
        self._lineage = lineage
        self._policy = policy
        self._adapter = adapter
        self._sharing = sharing
        self._anchor_every = anchor_every
        self._compute = compute
        self._clock = clock
        self._bus = bus
        self._gauge = gauge
        self._notice = notice
        self._followers = followers
        self._base: dict[str, U16] = {}
        self._publisher: WeightsPublisher | None = None
        self._base_digest: Digest = ""
        self._waiting: tuple[int, Mapping[str, Tensor], bool] | None = None
        self._offered = asyncio.Event()
        self.published = -1
        """Newest version that can be fetched."""

    async def open(self) -> tuple[int, dict[str, Tensor] | None] | None:
        """Load what anchors start from, and the chain that an earlier run left: the version of its head and
        the weights, if they can be rebuilt. None without a chain. Call it once, before `run`. A chain that
        must not be gone on with is told, and then nothing is published."""
        await self._compute.run(Lane.BROADCAST, warm_up)
        self._base = await self._compute.run(Lane.BROADCAST, base_bits, self._policy, self._adapter)
        publisher = WeightsPublisher(
            self._identity,
            self._swarm_id,
            self._lineage,
            self._base,
            self._sharing.store,
            self._sharing.chains,
            self._sharing.exchange,
            anchor_every=self._anchor_every,
            compute=self._compute,
            clock=self._clock,
            notice=self._notice,
        )
        try:
            restored = await self._compute.run(Lane.BROADCAST, publisher.restore)
        except OurFault as error:
            self._notice(NoticeLevel.ERROR, f"{error}; until then nobody can follow this node")
            return None
        finally:
            self._base_digest = publisher.base_digest
        self._publisher = publisher
        chain = self._sharing.chains.of(self._lineage.owner, self._lineage.base_model)
        if chain is None or chain.head is None:
            return None
        self.published = chain.head.policy_version
        return self.published, to_tensors(restored[1]) if restored is not None else None

    @property
    def base(self) -> tuple[dict[str, U16], Digest]:
        """The weights that anchors start from, not to be changed, and their hash; once `open` has
        returned."""
        return self._base, self._base_digest

    def offer(self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool = False) -> None:
        """Publish this version soon, with `anchor` as an anchor only. A newer one that is offered first takes
        its place, and is then a delta from the version that was published last, if a large one. Nobody may
        change `state`."""
        self._waiting = (policy_version, state, anchor)
        self._offered.set()

    async def contribute(self) -> SignedLink | None:
        """What this node gives to a merge: the anchor of the newest version published. None without one; a
        disk that does not take it is told."""
        if self._publisher is None:
            return None
        try:
            return await self._publisher.contribute()
        except (OSError, OurFault) as error:
            self._notice(
                NoticeLevel.WARNING, f"version {self.published} cannot be contributed to a merge: {error}"
            )
            return None

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            waiting, self._waiting = self._waiting, None
            if waiting is not None and self._publisher is not None:
                with self._gauge.working():
                    await self._publish(self._publisher, *waiting)

    async def _publish(
        self, publisher: WeightsPublisher, policy_version: int, state: Mapping[str, Tensor], anchor: bool
    ) -> None:
        began_s = self._clock.monotonic_s()
        weights = travelling(state, self._base)
        try:
            link = await publisher.publish(policy_version, weights, anchor=anchor)
        except (OSError, OurFault, LocalProtocolError) as error:
            self._notice(NoticeLevel.WARNING, f"version {policy_version} was not published: {error}")
            return
        self.published = link.policy_version
        self._bus.emit(
            VersionPublished(
                at=self._clock.now_ms(),
                policy_version=link.policy_version,
                kind=link.kind.value,
                digest=link.result,
                blob_bytes=link.blob.size,
                full_bytes=2 * sum(array.size for array in {id(a): a for a in self._base.values()}.values()),
                publish_s=self._clock.monotonic_s() - began_s,
            )
        )

    def seen(self) -> WeightsSeen:
        """The snapshot for the screen."""
        return self._sharing.seen(self._lineage.owner, self.published, self.published, self._followers())
