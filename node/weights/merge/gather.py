"""The weights behind contributions: fetched from whoever has them, decoded from the common base, kept on the
disk until they are merged.

    contributions --Exchange.fetch, a few at a time--> blobs --apply_link, one at a time--> scratch files

Whose blob is not what its link says is left out, by everybody, since everybody finds the same. Whose blob
does not come stops this merge: others may have it, and would make other bytes. But nobody stops merging by
contributing what it does not serve: in the next `_PARDON` rounds such an author is left out where its blob
does not come. Not for who is heard (`exchange.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cachetools import FIFOCache

from node.compute import Lane
from node.events import NoticeLevel
from node.runtime import Runtime
from node.supervise import StageGauge
from node.weights.chain.apply import apply_link
from node.weights.chain.bf16 import U16
from node.weights.exchange.store import StoredBlob
from node.weights.merge.contributions import Contribution
from node.weights.merge.resolve import MergeRule
from node.weights.merge.scratch import MergeScratch
from node.weights.sharing import WeightsSharing
from protocol.constants import MAX_CONTRIBUTIONS
from protocol.errors import DeadlineError, LimitError, OurFault, RemoteProtocolError
from protocol.messages import Digest, PeerId

__all__ = ["MergeGather", "NoMergeError"]

AHEAD = 4
"""Blobs that are fetched at a time, as many as the exchange asks one peer for."""
_PARDON = 16
"""Rounds in which nobody waits for an author whose blob did not come."""
_REMEMBERED_BAD = 4 * MAX_CONTRIBUTIONS

Bits = dict[str, U16]


class NoMergeError(Exception):
    """Why this round makes no merge, though nothing failed on this machine."""


class MergeGather:
    """Fetches and decodes contributions on `base`, one of which is in memory at a time."""

    def __init__(
        self,
        runtime: Runtime,
        base: Mapping[str, U16],
        sharing: WeightsSharing,
        rule: MergeRule,
        scratch: MergeScratch,
        gauge: StageGauge,
    ) -> None:
        self._runtime = runtime
        self._base = base
        self._exchange = sharing.exchange
        self._peers = sharing.peers
        self._fetch_timeout_s = sharing.settings.fetch_timeout_s
        self._rule = rule
        self._scratch = scratch
        self._gauge = gauge
        self._bad: FIFOCache[Digest, None] = FIFOCache(_REMEMBERED_BAD)
        """Tags of contributions whose blobs are not what their links say."""
        self._pardoned: dict[PeerId, int] = {}
        """Authors whose blob did not come, and until which round nobody waits for them."""
        self._came: set[PeerId] = set()
        """Authors whose blobs came for the last merge."""
        self._round = 0

    def eligible(self, heard: Sequence[Contribution]) -> list[Contribution]:
        """What of it goes into a merge, as far as is known: not bad, and not too old against the newest."""
        sound = [each for each in heard if each.tag not in self._bad]
        ages = self._rule.ages(sound)
        return [each for each, age in zip(sound, ages, strict=True) if age <= self._rule.max_age_windows]

    async def gather(
        self, heard: Sequence[Contribution], round_number: int, until_s: float
    ) -> list[tuple[Contribution, Bits]]:
        """What is eligible and its weights, mapped from the scratch. Ends at `until_s` of the monotonic
        clock, decoding apart. Raises NoMergeError when there are too few, or a blob did not come
        that others may have, OurFault or OSError when the disk does not take them."""
        self._round = round_number
        self._pardoned = {author: last for author, last in self._pardoned.items() if last >= round_number}
        here: dict[Digest, Bits] = {}
        while True:  # again: without a newest one that is bad, older ones are young enough
            heard = [each for each in heard if each.tag not in self._bad]
            wanted = self.eligible(heard)
            missing = [each for each in wanted if each.tag not in here]
            usable = len(heard if missing else wanted)
            if usable < self._rule.min_contributions:
                raise NoMergeError(f"contributions: {usable}, needed: {self._rule.min_contributions}")
            if not missing:
                self._came = {each.author for each in wanted}
                return [(each, here[each.tag]) for each in wanted]
            await self._runtime.run(Lane.MERGE, self._scratch.require_room, len(missing), self._base)
            absent = await self._bring(missing, here, until_s)
            heard = [each for each in heard if each not in absent]

    async def _bring(
        self, missing: Sequence[Contribution], here: dict[Digest, Bits], until_s: float
    ) -> list[Contribution]:
        """Puts weights into `here`; what did not come in time is returned."""
        tried: list[Contribution] = []
        slots = asyncio.Semaphore(AHEAD)

        async def bring(contribution: Contribution) -> None:
            async with slots:
                timeout_s = min(self._fetch_timeout_s, until_s - self._runtime.monotonic_s())
                if timeout_s <= 0:
                    return
                tried.append(contribution)
                try:
                    here[contribution.tag] = await self._decoded(contribution, timeout_s)
                except DeadlineError:
                    pass
                except LimitError as error:  # larger than the store
                    raise OurFault(str(error)) from error
                except RemoteProtocolError as error:
                    self._refuse(contribution, error)

        tasks = [asyncio.create_task(bring(each)) for each in sorted(missing, key=self._turn)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        absent = [each for each in missing if each.tag not in here and each.tag not in self._bad]
        self._require_pardoned(absent, tried)
        return absent

    def _turn(self, contribution: Contribution) -> tuple[bool, bool, Digest]:
        """Last those that are not waited for, first those that came before."""
        author = contribution.author
        return author in self._pardoned, author not in self._came, contribution.tag

    async def _decoded(self, contribution: Contribution, timeout_s: float) -> Bits:
        with self._gauge.waiting("contributions"):
            stored = await self._exchange.fetch(contribution.link.blob, timeout_s)
        with stored.used(), self._gauge.working():
            return await self._runtime.run(Lane.MERGE, self._kept, contribution, stored)

    def _kept(self, contribution: Contribution, stored: StoredBlob) -> Bits:
        """Blocking. One at a time, since it runs on a lane of its own."""
        bits = apply_link(contribution.link, stored.data(), None, self._base)
        return self._scratch.keep(contribution.tag, bits)

    def _refuse(self, contribution: Contribution, error: RemoteProtocolError) -> None:
        """Its author signed a blob that is of no use."""
        self._peers.refused(contribution.author, error.reason)
        self._bad[contribution.tag] = None

    def _require_pardoned(self, absent: Sequence[Contribution], tried: Sequence[Contribution]) -> None:
        missed = sorted(each.author for each in absent if each.author not in self._pardoned)
        if not missed:
            return
        for each in absent:
            if each in tried and each.author not in self._pardoned:
                self._pardoned[each.author] = self._round + _PARDON
        why = f"what {missed[0]} contributed did not come"
        if len(missed) > 1:
            why = f"what {missed[0]} and {len(missed) - 1} more contributed did not come"
        self._runtime.notice(NoticeLevel.WARNING, f"no merge this time: {why}")
        raise NoMergeError(why)
