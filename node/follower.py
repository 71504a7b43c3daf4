"""A follower, wired: no trainer; it tracks another node's policy and generates for it.

        neighbours' records                                    owner, other followers
               |                                                        |
    FOLLOW  choose an owner by need and trust -----> TRACK  links -> blobs -> weights, all or nothing
            waits: an owner                                 waits: a new version (long poll)
            owner silent for `owner_timeout_s`: choose again            |
                                                                        v
    ROLLOUT  admission -> engine -> score            ENGINE  takes the version, frees admission
             waits: the first version, the next                         |
             version, the next window             <---------------------+
               |
    SHARE    announce every slot under the owner's lineage, serve mixed groups --> owner, everybody

Admission: at most `(max_staleness + 1) * local_groups` groups for one version, and each new version frees
them all. A follower does not hear what the owner trains on; but what it made for one version is used up or
too old once the next ones are there, and a version that does not end needs no more groups than that. So a
follower whose owner stops soon stops too. An owner that contradicts itself, or signs a version that is not
what its link says, goes into quarantine and is left. Losing the network is never fatal; an engine that fails
ends it, and one that computes with other weights than those tracked makes it share nothing any more.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec

from node.compute import Lane
from node.core import NodeCore, Stages
from node.events import Health, NoticeLevel
from node.membership import Membership
from node.network import Network
from node.open.parts import Parts
from node.open.policy import adapter_of
from node.open.stores import Stores
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.supervise import StageGauge, resident_bytes
from node.transport.base import Transport
from node.weights.chain.base import BaseWeights, base_bits
from node.weights.follow import follower
from node.weights.follow.probe import FollowerProbe
from node.weights.sharing import WeightsSharing
from protocol.errors import ConfigError
from protocol.messages import Lineage

__all__ = ["Follower"]


class Follower(NodeCore):
    """All stages of one follower. `run` returns when `stop` was called and all is closed. Raises ConfigError
    without a network."""

    def __init__(
        self,
        parts: Parts,
        runtime: Runtime,
        membership: Membership,
        stores: Stores,
        transport: Transport | None,
        rss_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        self._sharing: WeightsSharing | None = None
        super().__init__(parts, runtime, membership, stores, transport, rss_bytes)
        config = parts.config
        if self._network is None:
            raise ConfigError("role 'follower' has nobody to follow with network.transport 'none'")
        self._neighbours: Network = self._network
        self._rollout = self._open_rollout(None)
        self._gauge(
            self._rollout.gauge,
            StageGauge("broadcast", self._runtime.clock, "a new version"),
        )
        self._sharing = self._share_weights(self._network)
        adapter = adapter_of(config)
        self.following = follower.Follower(
            self._runtime,
            FollowerProbe(
                parts.engine,
                parts.policy,
                adapter,
                prompt=lambda number: self._universe.item(number).text,
                tolerance=config.rollout.parity_tolerance,
            ),
            BaseWeights(self._runtime, functools.partial(base_bits, parts.policy, adapter)),
            self._sharing,
            self,
            config.follow,
        )
        """Which owner's weights the engine has."""
        self._gauges["broadcast"] = self.following.gauge

    @property
    def lineage(self) -> Lineage | None:
        return self._sharing.lineage if self._sharing is not None else None

    @property
    def policy_version(self) -> int:
        """Version that this follower generates with, -1 before the first."""
        return self.following.policy_version

    def _stages(self) -> Stages:
        return {"follow": self.following.run(), "made": self._pass_on()}

    async def _end(self) -> None:
        try:
            await self._runtime.run(Lane.DISK, self._keep, self._peers.standings())
        except OSError as error:
            self._runtime.notice(NoticeLevel.WARNING, f"trust was not saved: {error}; make room on the disk")

    def _close(self) -> None:
        if self._sharing is not None:
            self._sharing.close()

    def _steps(self) -> int:
        return self.following.versions

    # --- generate and share -------------------------------------------------------------------------------

    async def generate(self, lineage: Lineage, ready: asyncio.Event) -> None:
        """Generate for this owner, once the engine has its weights."""
        with self._rollout.gauge.waiting("the first version"):
            await ready.wait()
        await self._rollout.run(self._generator(lineage))

    def version_reached(self) -> None:
        """Each version gets as many groups as the admission allows, and no more."""
        self._admission.used(self._admission.complete)

    async def _publish(self, own: Accepted, body: bytes) -> None:
        if not self.following.not_sharing:
            await self._neighbours.publisher.publish(own, body)

    async def _pass_on(self) -> None:
        """Own groups are published as they are made; nobody trains on them here."""
        while True:
            await self._made.get()

    # --- events -------------------------------------------------------------------------------------------

    def _emit_weights(self) -> None:
        self._runtime.emit(self.following.seen())

    def _health_now(self) -> Health:
        return msgspec.structs.replace(super()._health_now(), not_sharing=self.following.not_sharing)
