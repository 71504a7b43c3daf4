"""The verify stage: fetched bodies in, accepted groups into the pool, everything else counted.

One loop over a bounded queue. What a judgement means for pool, trust and screen is decided here; the judging
itself is `pipeline.py`.
"""

from __future__ import annotations

import asyncio

from node.clock import Clock
from node.events import EventBus, GroupJudged, inert
from node.peers.book import PeerBook
from node.peers.trust import Hardness
from node.share.accepted import Accepted
from node.share.collect import Fetched
from node.share.pool import ReplayPool
from node.supervise import StageGauge
from node.verify.base import Candidate, Judgement
from node.verify.pipeline import Verifier
from protocol.messages import PeerId

__all__ = ["VerifyStage"]

SHOWN_COMPLETION_CHARS = 500
UNCERTAIN_REASONS = frozenset({"copied", "scorer_memory", "scorer_timeout"})
"""Refused, but an honest peer can get here: a late joiner may hear a copy before its original (seen in a run,
where the original's author was put into quarantine), and a slow machine may miss the scorer's deadline. A
soft failure."""


class VerifyStage:
    """Judges one candidate at a time; the dear checks run beside the event loop."""

    def __init__(
        self,
        verifier: Verifier,
        *,
        queue: asyncio.Queue[Fetched],
        pool: ReplayPool,
        peers: PeerBook,
        clock: Clock,
        bus: EventBus,
        gauge: StageGauge,
    ) -> None:
        self._verifier = verifier
        self._queue = queue
        self._pool = pool
        self._peers = peers
        self._clock = clock
        self._bus = bus
        self._gauge = gauge

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            with self._gauge.waiting("fetched bodies"):
                fetched = await self._queue.get()
            heard = fetched.heard
            with self._gauge.working():
                judgement = await self._verifier.judge(
                    Candidate(heard.sender, heard.announcement, fetched.body, heard.arrived_at)
                )
            self._book(heard.sender, judgement)
            if judgement.accepted and judgement.group is not None:
                self._pool.add(
                    Accepted(
                        heard.announcement.body.digest,
                        judgement.group,
                        judgement.tokens,
                        judgement.rewards,
                        heard.arrived_at,
                    )
                )
            self._bus.emit(self._event(fetched, judgement))

    def _book(self, author: PeerId, judgement: Judgement) -> None:
        """What the judgement means for its author."""
        group = judgement.group
        if judgement.accepted and group is not None:
            self._peers.accepted(author, group.policy_version, group.lineage, group.prompt.window)
            self._peers.judged(author, Hardness.SOFT if judgement.suspicions else Hardness.ACCEPTED)
            return
        self._peers.rejected(author, judgement.reason)
        if judgement.blames_author:
            found = Hardness.SOFT if judgement.reason in UNCERTAIN_REASONS else Hardness.HARD
            self._peers.judged(author, found)

    def _event(self, fetched: Fetched, judgement: Judgement) -> GroupJudged:
        announcement, group = fetched.heard.announcement, judgement.group
        return GroupJudged(
            at=self._clock.now_ms(),
            author=fetched.heard.sender,
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
