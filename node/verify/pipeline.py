"""The verifier: what a node demands of a stranger's group before it learns from it, cheap questions first.

    announcement --observe--> schema, lineage, freshness, slot     (before it is fetched; enters the ledger)
    candidate    --judge----> schema, lineage, freshness, slot, duplicate, skips, copies
                                  | on the "verify" lane, beside the event loop
                                  prompt, tokens, consistency, reward, plausibility ----> Judgement

Envelope, signature and replay were checked by gossip. A hard failure ends the judging; a soft one is noted.
Bytes of a peer raise nothing here. State is bounded: ledger and copies evict, whoever floods. `enabled=False`
is for comparisons only, see `Verifier`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from node.clock import Clock
from node.compute import Compute, Lane
from node.environment.tasks import Prompt
from node.events import CheckCount, CheckOutcome
from node.peers.book import PeerBook
from node.share.accepted import Accepted
from node.verify.base import ACCEPT, Candidate, Check, Decision, Item, Judgement, Sighting, Verdict, reject
from node.verify.copies import Copies
from node.verify.freshness import Freshness
from node.verify.ledger import Ledger
from node.verify.lineage import LineageClaim, OwnLineage
from node.verify.plausibility import LocalEngine, LocalPolicy, Plausibility
from node.verify.provenance import Duplicate, PromptDerivation, SkipShare, SlotDerivation
from node.verify.reward import GroupScorer, Reward
from node.verify.schema import Schema
from node.verify.tokens import Decode, PrefixConsistency, Tokens
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import RemoteProtocolError
from protocol.messages import Announcement, Charter, Digest, PeerId

__all__ = ["Verifier", "run_checks"]


MAX_BELIEVED_REWARD = 1e3
"""With verification off. As in training; in Python the square of 1e200 raises instead of being infinite."""
INLINE_BODY_BYTES = 1024 * 1024
"""Larger bodies are decoded beside the event loop: 1 MB takes about 2 ms."""


def run_checks(checks: Sequence[Check], item: Item, outcomes: list[CheckOutcome]) -> Verdict:
    """Run `checks` in order up to the first hard failure, appending to `outcomes`. Blocking, needs no loop.

    The verdict is that failure, or accept with the rewards that a check has computed.
    """
    rewards: tuple[float, ...] | None = None
    for check in checks:
        started_s = time.perf_counter()
        verdict = check.check(item)
        outcomes.append(_outcome(check.name, verdict, started_s))
        if verdict.decision is Decision.REJECT:
            return verdict
        rewards = verdict.rewards if verdict.rewards is not None else rewards
    return replace(ACCEPT, rewards=rewards)


def _believed(claimed: tuple[float, ...]) -> Verdict:
    """Without verification claims count, but only those one can compute with."""
    if not all(abs(reward) <= MAX_BELIEVED_REWARD for reward in claimed):
        return reject("reward_range")
    return replace(ACCEPT, rewards=claimed)


def _outcome(name: str, verdict: Verdict, started_s: float) -> CheckOutcome:
    cost_s = time.perf_counter() - started_s
    return CheckOutcome(check=name, verdict=verdict.decision.value, reason=verdict.reason, cost_s=cost_s)


class Verifier:
    """Judges candidates against one charter.

    `item_at` gives the prompt of a universe index. `decoders` are the tokenizers this node has, by digest.
    Without `policy` and `engine` there is no plausibility check (an observer has none). `own` is the policy
    that this node trains, which followers generate for.

    WARNING: with `enabled=False` whatever decodes is accepted and its CLAIMED rewards are believed. Anybody
    who can reach such a node trains it. It exists so that a demonstration with verification has something to
    be compared with."""

    def __init__(
        self,
        charter: Charter,
        swarm_id: Digest,
        peers: PeerBook,
        *,
        clock: Clock,
        compute: Compute,
        item_at: Callable[[int], Prompt],
        scorer: GroupScorer,
        decoders: Mapping[Digest, Decode],
        policy: LocalPolicy | None = None,
        engine: LocalEngine | None = None,
        own: OwnLineage | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self._clock = clock
        self._compute = compute
        self._schema = Schema(charter)
        # Windows that can be fresh: the accepted ages, the current one, and those within the clock skew.
        ahead = MAX_CLOCK_SKEW_MS // charter.window_ms + 1
        self._ledger = Ledger(max_windows=charter.rules.max_age_windows + 1 + ahead)
        self._copies = Copies()
        self._lineage = LineageClaim(own)
        self._freshness = Freshness(charter, peers, own)
        self._slot = SlotDerivation(charter, swarm_id, self._ledger)
        self._cheap: tuple[Check, ...] = (
            self._lineage,
            self._freshness,
            self._slot,
            Duplicate(self._ledger),
            SkipShare(charter, self._ledger),
            self._copies,
        )
        dear: list[Check] = [
            PromptDerivation(item_at),
            Tokens(charter, decoders),
            PrefixConsistency(),
            Reward(item_at, scorer),
        ]
        if policy is not None and engine is not None:
            dear.append(Plausibility(charter.rules, charter.max_new_tokens, policy, engine))
        self._dear = tuple(dear)
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._costs_s: dict[str, float] = {}

    def observe(self, sender: PeerId, announcement: Announcement, arrived_at: int) -> Verdict:
        """What an announcement alone tells; a rejected one is not worth fetching.

        Call it once for every announcement heard: it keeps the receipts that equivocation, skipping and lag
        are judged by. Repeating is harmless."""
        try:
            self._schema.check_announcement(sender, announcement)
        except RemoteProtocolError as error:
            return reject(error.reason)
        if not self.enabled:
            return ACCEPT
        sighting = Sighting(sender, announcement, arrived_at, self._clock.now_ms())
        for check in (self._lineage, self._freshness, self._slot):
            verdict = check.check(sighting)
            if verdict.decision is Decision.REJECT:
                return verdict
        return ACCEPT

    def is_fresh(self, sender: PeerId, announcement: Announcement) -> bool:
        """Whether an observed announcement is still young enough to be fetched. Changes nothing."""
        sighting = Sighting(sender, announcement, 0, self._clock.now_ms())
        return self._freshness.check(sighting).decision is Decision.ACCEPT

    def observe_own(self, own: Accepted) -> None:
        """Remember a group of this node's own, so that nobody can send it back as theirs. Call it on
        publishing."""
        self._copies.remember(own.group, own.tokens, self._clock.now_ms())

    async def judge(self, candidate: Candidate) -> Judgement:
        """The judgement of one candidate. Raises nothing for what a peer sent."""
        outcomes: list[CheckOutcome] = []
        started_s = time.perf_counter()
        try:
            item = await self._open(candidate)
        except RemoteProtocolError as error:
            verdict = reject(error.reason)
            outcomes.append(_outcome(Schema.name, verdict, started_s))
            return self._judgement(None, outcomes, verdict)
        outcomes.append(_outcome(Schema.name, ACCEPT, started_s))
        if not self.enabled:
            return self._judgement(item, outcomes, _believed(item.announcement.rewards))
        verdict = run_checks(self._cheap, item, outcomes)
        if verdict.decision is Decision.ACCEPT:
            verdict = await self._judge_dear(item, outcomes)
        return self._judgement(item, outcomes, verdict)

    def counts(self) -> tuple[CheckCount, ...]:
        """What each check that ran has said and cost while judging candidates."""
        names = [Schema.name, *(check.name for check in (*self._cheap, *self._dear))]
        return tuple(
            CheckCount(
                check=name,
                accepted=self._verdicts[name, Decision.ACCEPT],
                rejected=self._verdicts[name, Decision.REJECT],
                suspected=self._verdicts[name, Decision.SUSPECT],
                cost_s=self._costs_s[name],
            )
            for name in names
            if name in self._costs_s
        )

    async def _open(self, candidate: Candidate) -> Item:
        now_ms = self._clock.now_ms()
        if len(candidate.body) <= INLINE_BODY_BYTES:
            return self._schema.open(candidate, now_ms)
        return await self._compute.run(Lane.VERIFY, self._schema.open, candidate, now_ms)

    async def _judge_dear(self, item: Item, outcomes: list[CheckOutcome]) -> Verdict:
        # Remembered before the first await, so that a copy judged meanwhile meets it; forgotten unless
        # accepted.
        self._copies.remember(item.group, item.tokens, item.arrived_at)
        accepted = judged = False
        try:
            verdict = await self._compute.run(Lane.VERIFY, run_checks, self._dear, item, outcomes)
            accepted = verdict.decision is Decision.ACCEPT
            judged = accepted or verdict.blames_author
            return verdict
        finally:
            if not accepted:
                self._copies.forget(item)
            if not judged:  # our sandbox failed, or we were cancelled: it may be judged again
                self._ledger.forget_judging(item.sender, item.announcement)

    def _judgement(self, item: Item | None, outcomes: Sequence[CheckOutcome], verdict: Verdict) -> Judgement:
        for outcome in outcomes:
            self._verdicts[outcome.check, outcome.verdict] += 1
            self._costs_s[outcome.check] = self._costs_s.get(outcome.check, 0.0) + outcome.cost_s
        accepted = verdict.decision is Decision.ACCEPT
        return Judgement(
            accepted=accepted,
            reason=verdict.reason,
            blames_author=not accepted and verdict.blames_author,
            checks=tuple(outcomes),
            suspicions=tuple(each.reason for each in outcomes if each.verdict == Decision.SUSPECT),
            group=item.group if item is not None else None,
            tokens=item.tokens if item is not None else (),
            rewards=verdict.rewards or (),
        )
