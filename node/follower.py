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
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from node.compute import Lane
from node.core import NodeCore, Stages
from node.events import Health, NoticeLevel, VersionReached
from node.membership import Membership
from node.network import Network
from node.open.parts import Parts
from node.open.policy import adapter_of
from node.open.stores import Stores
from node.peers.trust import Hardness
from node.rollout.engine.base import BrokenWeightsError
from node.rollout.engine.parity import ParityError
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.supervise import StageGauge, resident_bytes, run_stages
from node.transport.base import Transport
from node.weights.chain.apply import THREADS
from node.weights.chain.base import base_bits
from node.weights.chain.bf16 import U16, to_tensors
from node.weights.chain.chains import MAX_WAIT_S
from node.weights.follow.choose import choose_owner
from node.weights.follow.probe import FollowerProbe
from node.weights.follow.tracker import Tracker
from protocol.delta import warm_up, weights_digest
from protocol.errors import ConfigError
from protocol.messages import Digest, Lineage, PeerId

__all__ = ["Follower"]

ROUND_S = 1.0
"""How often neighbours are looked through for an owner, and the owner for signs of life."""
GIVEN_UP = 64
"""Owners given up that are remembered."""


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
        self._followed: Lineage | None = None
        super().__init__(parts, runtime, membership, stores, transport, rss_bytes)
        config = parts.config
        if self._network is None:
            raise ConfigError("role 'follower' has nobody to follow with network.transport 'none'")
        self._neighbours: Network = self._network
        self._base: dict[str, U16] = {}
        self._base_digest: Digest = ""
        self._probe = FollowerProbe(
            parts.engine,
            parts.policy,
            adapter_of(config),
            prompt=lambda number: self._universe.item(number).text,
            tolerance=config.rollout.parity_tolerance,
        )
        self._misled = ""
        """How a version of the owner was not what its link says, once it is in quarantine for that."""
        self._bad: OrderedDict[Digest, None] = OrderedDict()
        """Blobs of no use, of any owner: none is held against it twice."""
        self._tracker: Tracker | None = None
        self._heard_s = 0.0
        """When the owner was heard last, on the clock's monotonic time."""
        self._given_up: OrderedDict[PeerId, None] = OrderedDict()
        self._reached = asyncio.Event()
        """Set once the engine has a version of the owner's."""
        self._versions = 0
        self._rollout = self._open_rollout(None)
        self._gauge(
            self._rollout.gauge,
            StageGauge("broadcast", self._runtime.clock, "a new version"),
        )
        self._sharing = self._share_weights(self._network)

    @property
    def lineage(self) -> Lineage | None:
        return self._followed

    @property
    def policy_version(self) -> int:
        """Version that this follower generates with, -1 before the first."""
        return self._parts.engine.policy_version if self._reached.is_set() else -1

    def _stages(self) -> Stages:
        return {"follow": self._follow(), "hear": self._hear(), "made": self._pass_on()}

    async def _begin(self) -> None:
        policy, adapter = self._parts.policy, adapter_of(self.config)
        await self._runtime.run(Lane.BROADCAST, warm_up)
        self._base = await self._runtime.run(Lane.BROADCAST, base_bits, policy, adapter)
        self._base_digest = await self._runtime.run(
            Lane.BROADCAST, weights_digest, self._base, threads=THREADS
        )

    async def _end(self) -> None:
        try:
            await self._runtime.run(Lane.DISK, self._keep, self._peers.standings())
        except OSError as error:
            self._runtime.notice(NoticeLevel.WARNING, f"trust was not saved: {error}; make room on the disk")

    def _close(self) -> None:
        self._sharing.close()

    def _steps(self) -> int:
        return self._versions

    # --- follow -------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """One owner after the other."""
        while True:
            lineage = await self._choose()
            self._runtime.notice(NoticeLevel.INFO, f"follows {lineage.owner}")
            self._followed = self._neighbours.presence.lineage = lineage
            self._heard_s = self._runtime.monotonic_s()
            await self._track(lineage)
            self._followed = self._neighbours.presence.lineage = None
            self._given_up[lineage.owner] = None
            self._given_up.move_to_end(lineage.owner)
            while len(self._given_up) > GIVEN_UP:
                self._given_up.popitem(last=False)
            self._runtime.notice(
                NoticeLevel.WARNING, f"{lineage.owner} {self._why_lost(lineage)}; looking for an owner"
            )

    def _why_lost(self, lineage: Lineage) -> str:
        """In words. Two signed versions that contradict each other are proof against who signed them."""
        stopped = self._tracker.stopped if self._tracker is not None else ""
        if stopped:
            self._peers.judged(lineage.owner, Hardness.HARD)
            return f"signed versions that contradict each other ({stopped})"
        if self._misled:
            return f"signed a version that is of no use ({self._misled})"
        return f"was silent for {self.config.follow.owner_timeout_s:g} s"

    def _distrust(self, owner: PeerId, reason: str, lost: asyncio.Event) -> None:
        """A blob has the hash that the owner signed, and does not do what it signed beside it, or leads to
        weights that nobody can compute with."""
        self._peers.judged(owner, Hardness.HARD)
        if self._peers.quarantined(owner):
            self._misled = reason
            lost.set()

    async def _choose(self) -> Lineage:
        """The owner to follow, when there is one."""
        policy, presence = self._parts.policy, self._neighbours.presence
        wanted, told = self.config.follow.owner, False
        with self._gauges["broadcast"].waiting("an owner"):
            while True:
                lineage = choose_owner(
                    {peer: presence.known[peer] for peer in presence.connected if peer in presence.known},
                    me=self._membership.peer_id,
                    base_model=policy.base_model,
                    tokenizer=policy.tokenizer_digest,
                    wanted=wanted,
                    trust=self._peers.trust,
                    avoided=self._given_up,
                )
                if lineage is not None:
                    return lineage
                if wanted:
                    presence.seek(wanted)
                    if not told and self._peers.quarantined(wanted):
                        text = f"waits: follow.owner {wanted} is in quarantine for what it signed"
                        self._runtime.notice(NoticeLevel.WARNING, f"{text}; name another owner, or none")
                        told = True
                await asyncio.sleep(ROUND_S)

    async def _track(self, lineage: Lineage) -> None:
        """Follow one owner until it is silent for too long, or has lost all trust."""
        self._misled = ""
        lost = asyncio.Event()
        self._tracker = Tracker(
            lineage,
            self._sharing.chains,
            self._sharing.exchange,
            self._sharing.store,
            self._base,
            self._base_digest,
            on_version=self._apply,
            providers=lambda: self._neighbours.members_of(lineage),
            failed=self._peers.refused,
            misled=lambda reason: self._distrust(lineage.owner, reason, lost),
            bad=self._bad,
            compute=self._runtime.compute,
            clock=self._runtime.clock,
            gauge=self._gauges["broadcast"],
            fetch_timeout_s=self.config.broadcast.fetch_timeout_s,
            notice=self._runtime.notice,
        )
        try:
            await run_stages(
                {
                    "track": self._tracker.run(),
                    "rollout": self._generate(lineage),
                    "watch": self._watch(self._tracker, lost),
                },
                until=lost,
            )
        except BrokenWeightsError as error:
            self._distrust(lineage.owner, str(error), lost)
        finally:
            self._reached.clear()

    async def _watch(self, tracker: Tracker, lost: asyncio.Event) -> None:
        """Set `lost` when the owner contradicted itself, or nothing of it came for too long: on its chain,
        or by gossip, which counts for as long as an answer about the chain may take."""
        while True:
            chain_s = tracker.signs_of_life_s
            heard_s = self._runtime.monotonic_s() - self._heard_s
            silent_s = min(chain_s, max(heard_s, chain_s - 2 * MAX_WAIT_S))
            if tracker.stopped or silent_s > self.config.follow.owner_timeout_s:
                lost.set()
            await asyncio.sleep(ROUND_S)

    async def _apply(self, policy_version: int, bits: dict[str, U16]) -> None:
        """The tracker has this version; from now on the engine has it too. Raises EngineError."""
        began_s = self._runtime.monotonic_s()
        with self._gauges["broadcast"].working():
            try:
                reloaded = await self._runtime.run(Lane.APPLY, self._update, bits, policy_version)
            except ParityError as error:
                reloaded = False
                self._runtime.notice(
                    NoticeLevel.ERROR, f"{error}, with all weights loaded anew; this node shares nothing more"
                )
        if reloaded:
            text = f"the engine failed its probe at version {policy_version} and passed it once loaded anew"
            self._runtime.notice(NoticeLevel.WARNING, text)
        self._versions += 1
        if not self._probe.failure:  # else there is no use for more groups
            self._admission.used(self._admission.complete)
        self._reached.set()
        self._runtime.emit(
            VersionReached(
                at=self._runtime.now_ms(),
                owner=self._followed.owner if self._followed is not None else "",
                policy_version=policy_version,
                digest=self._tracker.digest if self._tracker is not None else "",
                apply_s=self._runtime.monotonic_s() - began_s,
            )
        )

    def _update(self, bits: dict[str, U16], policy_version: int) -> bool:
        # An engine may keep what it is given, and the tracker makes the next version in place.
        weights = {name: tensor.clone() for name, tensor in to_tensors(bits).items()}
        return self._probe.update(weights, policy_version)

    # --- generate and share -------------------------------------------------------------------------------

    async def _generate(self, lineage: Lineage) -> None:
        with self._rollout.gauge.waiting("the first version"):
            await self._reached.wait()
        await self._rollout.run(self._generator(lineage))

    async def _publish(self, own: Accepted, body: bytes) -> None:
        if not self._probe.failure:
            await self._neighbours.publisher.publish(own, body)

    async def _pass_on(self) -> None:
        """Own groups are published as they are made; nobody trains on them here."""
        while True:
            await self._made.get()

    async def _hear(self) -> None:
        """Who announces is here: the owner lives, and others become neighbours to get weights from."""
        async for heard in self._neighbours.gossip.heard():
            self._neighbours.presence.seek(heard.sender)
            if self._followed is not None and heard.sender == self._followed.owner:
                self._heard_s = self._runtime.monotonic_s()

    # --- events -------------------------------------------------------------------------------------------

    def _emit_weights(self) -> None:
        owner = self._followed.owner if self._followed is not None else ""
        head = self.policy_version
        if self._tracker is not None and owner:
            head += self._tracker.lag
        others = [each for each in self._neighbours.members_of(self._followed) if each != owner]
        self._runtime.emit(self._sharing.seen(owner, self.policy_version, head, len(others) + bool(owner)))

    def _health_now(self) -> Health:
        return msgspec.structs.replace(super()._health_now(), not_sharing=self._probe.failure)
