"""The verify stage: fetched bodies in, accepted groups into the pool, everything else counted.

One loop over a bounded queue. What a judgement means for pool, book and screen is decided here; the judging
itself, beside the event loop, is `pipeline.py`.
"""

from __future__ import annotations

import asyncio

from node.compute import Lane
from node.events import GroupJudged, inert
from node.peers.book import PeerBook
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.share.heard import Candidate, Heard
from node.share.pool import ReplayPool
from node.supervise import StageGauge
from node.verify.base import Judgement
from node.verify.pipeline import Verifier

__all__ = ["VerifyStage"]

SHOWN_COMPLETION_CHARS = 500


class VerifyStage:
    """Judges one candidate of `queue` at a time."""

    def __init__(
        self,
        runtime: Runtime,
        peers: PeerBook,
        queue: asyncio.Queue[Candidate],
        verifier: Verifier,
        pool: ReplayPool,
    ) -> None:
        self._runtime = runtime
        self._peers = peers
        self._queue = queue
        self._verifier = verifier
        self._pool = pool
        self.gauge = StageGauge("verify", runtime.clock, "fetched bodies", queue.maxsize, queue.qsize)

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            with self.gauge.waiting("fetched bodies"):
                candidate = await self._queue.get()
            with self.gauge.working():
                judgement = await self._runtime.run(Lane.VERIFY, self._verifier.judge, candidate)
            self._settle(candidate.heard, judgement)
            self._runtime.emit(self._event(candidate.heard, judgement))

    def _settle(self, heard: Heard, judgement: Judgement) -> None:
        """What the judgement means for its author and for training."""
        author, item = heard.sender, judgement.item
        if not judgement.accepted or item is None:
            self._peers.rejected(author, judgement.reason, judgement.found)
            return
        group = item.group
        self._peers.accepted(author, group.policy_version, group.lineage, group.prompt.window)
        if judgement.found is not None:
            self._peers.judged(author, judgement.found)
        digest = heard.announcement.body.digest
        self._pool.add(Accepted(digest, group, item.tokens, judgement.rewards, heard.arrived_at))

    def _event(self, heard: Heard, judgement: Judgement) -> GroupJudged:
        announcement = heard.announcement
        group = judgement.item.group if judgement.item is not None else None
        return GroupJudged(
            at=self._runtime.now_ms(),
            author=heard.sender,
            own=False,
            accepted=judgement.accepted,
            reason=judgement.reason,
            group=announcement.body.digest[:12],
            environment=group.environment if group else "",
            window=announcement.prompt.window,
            slot=announcement.prompt.slot,
            policy_version=announcement.policy_version,
            question=inert(group.question) if group else "",
            completions=tuple(inert(r.text, SHOWN_COMPLETION_CHARS) for r in group.rollouts) if group else (),
            rewards=judgement.rewards or announcement.rewards,
            checks=judgement.checks,
        )
