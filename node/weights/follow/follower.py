"""Which owner's weights this node generates with: a follower's one question, in place of a trainer.

        neighbours' records                                    owner, other followers
               |                                                        |
    CHOOSE  an owner by need and trust ------------> TRACK  links -> blobs -> weights, all or nothing
            waits: an owner                                 waits: a new version (long poll)
            owner silent for `owner_timeout_s`: choose again            |
                                                                        v
    rollouts of this node, for that lineage <------- ENGINE  takes the version, is probed

An owner that contradicts itself, or signs a version that is not what its link says, goes into quarantine and
is left. Losing the network is never fatal. Not for generating (`rollouts.py`), nor for getting one version
(`tracker.py`).
"""

from __future__ import annotations

import asyncio

from cachetools import LRUCache

from node.compute import Lane
from node.config import FollowConfig
from node.events import NoticeLevel, VersionReached, WeightsSeen
from node.peers.trust import Hardness
from node.rollout.engine.base import BrokenWeightsError
from node.rollout.engine.parity import ParityError
from node.runtime import Runtime
from node.supervise import run_stages
from node.weights.chain.base import BaseWeights
from node.weights.chain.bf16 import U16, to_tensors
from node.weights.chain.chains import MAX_WAIT_S
from node.weights.follow.choose import choose_owner
from node.weights.follow.probe import FollowerProbe
from node.weights.follow.rollouts import FollowerRollouts
from node.weights.follow.tracker import Tracker, useless_blobs
from node.weights.sharing import WeightsSharing
from protocol.messages import Lineage, PeerId

__all__ = ["Follower"]

ROUND_S = 1.0
"""How often neighbours are looked through for an owner, and the owner for signs of life."""
GIVEN_UP = 64
"""Owners given up that are remembered."""


class Follower:
    """Follows one owner after the other, and gives the engine of `probe` their weights, which start from
    `base`."""

    def __init__(
        self,
        runtime: Runtime,
        probe: FollowerProbe,
        base: BaseWeights,
        sharing: WeightsSharing,
        rollouts: FollowerRollouts,
        settings: FollowConfig,
    ) -> None:
        self.gauge = sharing.gauge
        self.versions = 0
        """Versions that the engine was given."""
        self.tracker: Tracker | None = None
        """The one for the owner followed now, or last."""
        self._runtime = runtime
        self._probe = probe
        self._base = base
        self._sharing = sharing
        self._rollouts = rollouts
        self._settings = settings
        self._reached = asyncio.Event()
        """Set while the engine has a version of the owner's."""
        self._lost = asyncio.Event()
        """Set once the owner is not to be followed any more."""
        self._misled = ""
        """How the owner's weights were of no use to the engine."""
        self._heard_s = 0.0
        """When the owner was heard last by gossip, on the monotonic clock."""
        self._useless = useless_blobs()
        self._given_up: LRUCache[PeerId, None] = LRUCache(GIVEN_UP)

    @property
    def lineage(self) -> Lineage | None:
        """The lineage that is followed; None while there is no owner."""
        return self._sharing.lineage

    @property
    def policy_version(self) -> int:
        """Version that the engine generates with, -1 before the first."""
        return self._probe.engine.policy_version if self._reached.is_set() else -1

    @property
    def not_sharing(self) -> str:
        """Why this node must not share what it generates, "" while it may."""
        return self._probe.not_sharing

    def seen(self) -> WeightsSeen:
        """The snapshot for the screen."""
        owner = self.lineage.owner if self.lineage is not None else ""
        lag = self.tracker.lag if self.tracker is not None and owner else 0
        others = [each for each in self._sharing.members() if each != owner]
        version = self.policy_version
        return self._sharing.seen(owner, version, version + lag, len(others) + bool(owner))

    async def run(self) -> None:
        """Follow until cancelled. Raises EngineError when the engine cannot go on."""
        await self._base.get()
        await run_stages({"hear": self._hear(), "follow": self._follow()}, until=asyncio.Event())

    # --- owners -------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Who announces is here: the owner lives, and others become neighbours to get weights from."""
        network = self._sharing.network
        async for heard in network.gossip.heard():
            network.presence.seek(heard.sender)
            if self.lineage is not None and heard.sender == self.lineage.owner:
                self._heard_s = self._runtime.monotonic_s()

    async def _follow(self) -> None:
        while True:
            lineage = await self._choose()
            self._runtime.notice(NoticeLevel.INFO, f"follows {lineage.owner}")
            self._sharing.network.presence.lineage = lineage
            self._heard_s = self._runtime.monotonic_s()
            why = await self._track(lineage)
            self._sharing.network.presence.lineage = None
            self._given_up[lineage.owner] = None
            self._runtime.notice(NoticeLevel.WARNING, f"{lineage.owner} {why}; looking for an owner")

    async def _choose(self) -> Lineage:
        """The owner to follow, when there is one."""
        policy, peers, presence = self._probe.policy, self._sharing.peers, self._sharing.network.presence
        wanted, told = self._settings.owner, False
        with self.gauge.waiting("an owner"):
            while True:
                lineage = choose_owner(
                    {peer: presence.known[peer] for peer in presence.connected if peer in presence.known},
                    me=self._sharing.chains.peer_id,
                    base_model=policy.base_model,
                    tokenizer=policy.tokenizer_digest,
                    wanted=wanted,
                    trust=peers.trust,
                    avoided=self._given_up,
                )
                if lineage is not None:
                    return lineage
                if wanted:
                    presence.seek(wanted)
                    if not told and peers.quarantined(wanted):
                        text = f"waits: follow.owner {wanted} is in quarantine for what it signed"
                        self._runtime.notice(NoticeLevel.WARNING, f"{text}; name another owner, or none")
                        told = True
                await asyncio.sleep(ROUND_S)

    async def _track(self, lineage: Lineage) -> str:
        """Follow one owner until it is silent for too long, or has lost all trust: says which."""
        self._misled = ""
        self._lost.clear()
        tracker = self.tracker = Tracker(
            self._runtime, lineage, await self._base.get(), self._sharing, self._useless, self._apply
        )
        try:
            await run_stages(
                {
                    "track": tracker.run(),
                    "rollout": self._rollouts.generate(lineage, self._reached),
                    "watch": self._watch(tracker, lineage.owner),
                },
                until=self._lost,
            )
        except BrokenWeightsError as error:
            self._misled = str(error)
            self._sharing.peers.judged(lineage.owner, Hardness.HARD)
        finally:
            self._reached.clear()
        if tracker.stopped:  # two signed versions are proof against who signed them
            self._sharing.peers.judged(lineage.owner, Hardness.HARD)
            return f"signed versions that contradict each other ({tracker.stopped})"
        if self._misled or self._sharing.peers.quarantined(lineage.owner):
            return f"signed a version that is of no use ({self._misled or tracker.misled})"
        return f"was silent for {self._settings.owner_timeout_s:g} s"

    async def _watch(self, tracker: Tracker, owner: PeerId) -> None:
        """Set `_lost` when the owner contradicted itself, signed what is not so, or nothing of it came for
        too long: on its chain, or by gossip, which counts for as long as an answer about the chain may
        take."""
        while True:
            chain_s = tracker.signs_of_life_s
            heard_s = self._runtime.monotonic_s() - self._heard_s
            silent_s = min(chain_s, max(heard_s, chain_s - 2 * MAX_WAIT_S))
            distrusted = tracker.misled and self._sharing.peers.quarantined(owner)
            if tracker.stopped or distrusted or silent_s > self._settings.owner_timeout_s:
                self._lost.set()
            await asyncio.sleep(ROUND_S)

    # --- engine -------------------------------------------------------------------------------------------

    async def _apply(self, policy_version: int, bits: dict[str, U16]) -> None:
        """The tracker has this version; from now on the engine has it too. Raises EngineError."""
        began_s = self._runtime.monotonic_s()
        with self.gauge.working():
            try:
                reloaded = await self._runtime.run(Lane.APPLY, self._update, bits, policy_version)
            except ParityError as error:
                reloaded = False
                text = f"{error}, with all weights loaded anew; this node shares nothing more"
                self._runtime.notice(NoticeLevel.ERROR, text)
        if reloaded:
            text = f"the engine failed its probe at version {policy_version} and passed it once loaded anew"
            self._runtime.notice(NoticeLevel.WARNING, text)
        self.versions += 1
        if not self.not_sharing:  # else there is no use for more groups
            self._rollouts.version_reached()
        self._reached.set()
        self._runtime.emit(
            VersionReached(
                at=self._runtime.now_ms(),
                owner=self.lineage.owner if self.lineage is not None else "",
                policy_version=policy_version,
                digest=self.tracker.digest if self.tracker is not None else "",
                apply_s=self._runtime.monotonic_s() - began_s,
            )
        )

    def _update(self, bits: dict[str, U16], policy_version: int) -> bool:
        # An engine may keep what it is given, and the tracker makes the next version in place.
        weights = {name: tensor.clone() for name, tensor in to_tensors(bits).items()}
        return self._probe.update(weights, policy_version)
