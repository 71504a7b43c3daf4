"""Merging with other trainers of the same base model: who contributes is heard, what they contribute is
fetched, and all who heard the same make the same weights of it (D9).

    round begins --contribute--> own anchor --+--> MergeExchange: sets of partners, until nothing new comes
                                              |
                           visible, admitted <+
                                 |
         Exchange.fetch, a few at a time --> decoded from the base, one in memory --> scratch file each
                                 |
                              resolve --> Merge, for the training loop to take, judge and adopt or not

A round is `every_windows` windows of the swarm's time, so it begins everywhere at once. All contributions
start from the base model, which everybody has: nothing is rebased on a merge. Not for judging a merge
(`node/train/gate.py`) nor for the rule by which contributions become weights (`resolve.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.compute import Lane
from node.config import MergeConfig
from node.events import NoticeLevel
from node.membership import Membership
from node.runtime import Runtime
from node.supervise import StageGauge
from node.weights.chain.apply import THREADS
from node.weights.chain.base import Base
from node.weights.chain.bf16 import U16
from node.weights.engine_sync import EngineSync
from node.weights.merge.contributions import Contribution, MergeSet, set_digest
from node.weights.merge.exchange import MergeExchange
from node.weights.merge.gather import MergeGather, NoMergeError
from node.weights.merge.resolve import Dropped, Merged, MergeRule, Used, resolve, warm_up
from node.weights.merge.scratch import MergeScratch
from node.weights.publish import VersionPublisher
from node.weights.sharing import WeightsSharing
from protocol.delta import max_delta_bytes, weights_digest
from protocol.errors import DeadlineError, LocalProtocolError, OurFault, RemoteProtocolError
from protocol.messages import Digest, PeerId, SignedLink

__all__ = ["Merge", "MergeStatus", "Merger"]

_NAP_S = 60.0
"""Longest sleep before the swarm's time is looked at again: clocks are set."""


@dataclass(frozen=True)
class Merge:
    """Merged weights, not yet judged."""

    bits: dict[str, U16]
    """Tied weights of the base are tied in it."""
    digest: Digest
    """`weights_digest` of them."""
    contributions: Digest
    """Names the contributions that went in: `MergeSet.digest` of them."""
    used: tuple[Used, ...]
    dropped: tuple[Dropped, ...]


@dataclass(frozen=True, slots=True)
class MergeStatus:
    """How merging goes. `why`: why the last round made no merge, "" when it made one or none has ended."""

    contributions: int
    rounds: int
    merges: int
    why: str


class Merger:
    """Merges what `publisher` publishes, this node's own lineage, with others on `base`, the base model's
    weights; nothing any more once the engine that `sync` keeps has failed for good. Files go to a folder of
    its own, which is removed after each round."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        base: Base,
        publisher: VersionPublisher,
        sync: EngineSync,
        sharing: WeightsSharing,
        settings: MergeConfig,
    ) -> None:
        self.gauge = StageGauge("merge", runtime.clock, "the next round")
        self._runtime = runtime
        self._window = membership.window
        self._base = base.bits
        self._publisher = publisher
        self._sync = sync
        self._every = settings.every_windows
        self._settle_s = settings.settle_s
        self._rule = rule = MergeRule.of(settings, membership.charter.window_ms)
        self._scratch = MergeScratch(sharing.home.merge)
        self.exchange = MergeExchange(
            runtime,
            membership,
            MergeSet(membership.swarm_id, publisher.lineage.base_model, base.digest),
            sharing,
            rule,
            max_delta_bytes(base.bits),
        )
        self._gather = MergeGather(runtime, base.bits, sharing, rule, self._scratch, self.gauge)
        self._ready: Merge | None = None
        self._last_named: Digest = ""
        """Names what went into the last merge."""
        self._last_digest: Digest = ""
        """Hash of the weights of the last merge that was made."""
        self._rounds = self._merges = 0
        self._why = ""
        sharing.ask_also(self.providers)

    @property
    def status(self) -> MergeStatus:
        return MergeStatus(len(self.exchange.set.visible()), self._rounds, self._merges, self._why)

    def take(self) -> Merge | None:
        """The newest merge that was made, once."""
        merge, self._ready = self._ready, None
        return merge

    def providers(self, root: Digest) -> Sequence[PeerId]:
        """Who may have the blob of a contribution: its author, and the partners, who fetch it too."""
        authors = [each.author for each in self.exchange.set.visible() if each.link.blob.root == root]
        return tuple(dict.fromkeys((*authors, *self.exchange.partners()))) if authors else ()

    # --- rounds -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Merge once a round, until cancelled."""
        await self._runtime.run(Lane.MERGE, self._begin)
        while True:
            number = await self._next_round()
            if self._window() < (number + 0.25) * self._every:  # else the machine slept, or its clock was set
                await self._round(number)

    def _begin(self) -> None:
        """Blocking."""
        self._scratch.clear()
        warm_up()

    async def _next_round(self) -> int:
        """The number of the next round, once it has begun."""
        number = self._number() + 1
        while (left_s := self._seconds_to(number * self._every)) > 0:
            await asyncio.sleep(min(max(left_s, 0.01), _NAP_S))
            number = min(number, self._number() + 1)  # a clock may be set back
        return number

    def _number(self) -> int:
        """Number of the round that runs now."""
        return math.floor(self._window() / self._every)

    def _seconds_to(self, window: float) -> float:
        return (window - self._window()) * self._rule.window_ms / 1000

    async def _round(self, number: int) -> None:
        self._rounds += 1
        if not self.exchange.partners():
            self._why = "no other trainer of the base model is connected"
            return  # nothing is made for nobody
        now_s, begin = self._runtime.monotonic_s(), number * self._every
        half_s = now_s + self._seconds_to(begin + self._every / 2)
        end_s = now_s + self._seconds_to(begin + 0.9 * self._every)  # the rest is for merging
        async with asyncio.TaskGroup() as group:
            with self.gauge.waiting("partners' sets"):
                own = group.create_task(self._contribute_own(half_s))
                await self.exchange.settle(self._settle_s, half_s, own)
        try:
            self._ready = await self._merge(number, end_s)
        except NoMergeError as error:
            self._why = str(error)
        except (OurFault, OSError) as error:
            self._why = str(error)
            self._runtime.notice(NoticeLevel.WARNING, f"no merge this time: {error}")
        else:
            self._merges += 1
            self._why = ""
        finally:
            await self._runtime.run(Lane.MERGE, self._scratch.clear)

    async def _contribute_own(self, until_s: float) -> None:
        if self._sync.not_sharing:
            self.exchange.withdraw()  # what was contributed before counts no more, either
            return
        left_s = max(0.0, until_s - self._runtime.monotonic_s())
        try:
            with self.gauge.waiting("own contribution"):
                async with asyncio.timeout(left_s):
                    signed = await self._publisher.contribute()
        except TimeoutError:
            self._runtime.notice(
                NoticeLevel.WARNING, str(DeadlineError("this node's contribution to the merge", left_s))
            )
        else:
            if signed is not None:
                self._add_own(signed)

    def _add_own(self, signed: SignedLink) -> None:
        try:
            self.exchange.contribute(signed)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"this node's own contribution does not fit: {error}") from error

    # --- one merge ----------------------------------------------------------------------------------------

    async def _merge(self, number: int, until_s: float) -> Merge:
        """What the set as it is now makes. Raises NoMergeError, or OurFault or OSError when this machine
        fails."""
        heard = [each for each in self.exchange.set.visible() if self.exchange.admits(each.author)]
        if self._named(self._gather.eligible(heard)) == self._last_named:
            raise NoMergeError("nobody contributed anything new")
        gathered = await self._gather.gather(heard, number, until_s)
        with self.gauge.working():
            merged, digest = await self._runtime.run(Lane.MERGE, self._resolved, gathered)
        if merged.bits is None:
            raise NoMergeError(f"{len(merged.dropped)} of {len(gathered)} contributions cannot be merged")
        self._last_named = self._named([contribution for contribution, _ in gathered])
        if digest == self._last_digest:
            raise NoMergeError("it would be the weights of the last merge")
        self._last_digest = digest
        return Merge(merged.bits, digest, self._last_named, merged.used, merged.dropped)

    def _named(self, contributions: Sequence[Contribution]) -> Digest:
        return set_digest(self.exchange.set.base, contributions)

    def _resolved(self, gathered: Sequence[tuple[Contribution, Mapping[str, U16]]]) -> tuple[Merged, Digest]:
        """Blocking."""
        merged = resolve(self._base, gathered, self._rule)
        return merged, weights_digest(merged.bits, threads=THREADS) if merged.bits is not None else ""
