"""The verifier: what a node demands of a stranger's group before it learns from it, cheap questions first.

    announcement --observe--> schema, lineage, freshness, slot     (before it is fetched; enters the ledger)
    candidate    --judge----> schema, lineage, freshness, slot, duplicate, skips, copies
                              prompt, tokens, consistency, reward, plausibility ----> Judgement

Envelope, signature and replay were checked by gossip. A hard failure ends the judging; a soft one is noted.
Bytes of a peer raise nothing here. Plain functions: `judge` blocks and may run on a thread of its own, one
candidate at a time, while the event loop calls the others. State is bounded: ledger and copies evict, whoever
floods. Not for what a judgement is followed by (`stage.py`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from node.environment.host import TaskHost
from node.environment.records import Prompt
from node.events import CheckCount, CheckOutcome
from node.membership import Membership
from node.peers.book import PeerBook
from node.share.accepted import Accepted
from node.share.heard import Candidate, Heard
from node.verify.base import ACCEPT, Check, Decision, Item, Judgement, Verdict, reject
from node.verify.copies import Copies
from node.verify.freshness import Freshness
from node.verify.ledger import Ledger
from node.verify.lineage import LineageClaim, OwnPolicy
from node.verify.plausibility import Plausibility
from node.verify.provenance import Duplicate, PromptDerivation, SameEnvironment, SkipShare, SlotDerivation
from node.verify.reward import Reward
from node.verify.schema import Schema
from node.verify.tokens import Decode, PrefixConsistency, Tokens
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import RemoteProtocolError
from protocol.messages import Digest

__all__ = ["Verifier", "run_checks"]


MAX_BELIEVED_REWARD = 1e3
"""With verification off. As in training; in Python the square of 1e200 raises instead of being infinite."""


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
    `own` is the policy that this node trains; without one (an observer) there is no plausibility check.

    WARNING: with `enabled=False` whatever decodes is accepted and its CLAIMED rewards are believed. Anybody
    who can reach such a node trains it. It exists so that a demonstration with verification has something to
    be compared with."""

    def __init__(
        self,
        membership: Membership,
        peers: PeerBook,
        item_at: Callable[[int], Prompt],
        host: TaskHost,
        decoders: Mapping[Digest, Decode],
        *,
        own: OwnPolicy | None = None,
        enabled: bool = True,
    ) -> None:
        charter = membership.charter
        self.enabled = enabled
        self._schema = Schema(charter)
        # Windows that can be fresh: the accepted ages, the current one, and those within the clock skew.
        ahead = MAX_CLOCK_SKEW_MS // charter.window_ms + 1
        self._ledger = Ledger(charter.rules.max_age_windows + 1 + ahead, peers.has_earned_trust)
        self._copies = Copies(peers.may_claim)
        self._freshness = Freshness(membership, peers, own)
        lineage, environment = LineageClaim(own), SameEnvironment(membership.pin)
        slot = SlotDerivation(charter, membership.swarm_id, self._ledger)
        self._announced: tuple[Callable[[Heard], Verdict], ...] = (
            lineage.check,
            environment.check,
            self._freshness.check,
            slot.check,
        )
        self._cheap: tuple[Check, ...] = (
            lineage,
            environment,
            self._freshness,
            slot,
            Duplicate(self._ledger),
            SkipShare(charter, self._ledger),
            self._copies,
        )
        self._dear: tuple[Check, ...] = (
            PromptDerivation(item_at),
            Tokens(charter, decoders),
            PrefixConsistency(),
            Reward(item_at, host),
        )
        if own is not None:
            plausibility = Plausibility(charter.rules, charter.max_new_tokens, own.policy, own.engine)
            self._dear = (*self._dear, plausibility)
        self._lock = threading.Lock()
        """Ledger and copies belong to whoever has it."""
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._costs_s: dict[str, float] = {}

    def observe(self, heard: Heard) -> Verdict:
        """What an announcement alone tells; a rejected one is not worth fetching.

        Call it once for every announcement heard: it keeps the receipts that equivocation and skipping are
        judged by. Repeating is harmless. Versions that lag is measured against are in the book about
        peers."""
        try:
            self._schema.check_announcement(heard.announcement)
        except RemoteProtocolError as error:
            return reject(error.reason)
        if not self.enabled:
            return ACCEPT
        with self._lock:
            verdicts = (check(heard) for check in self._announced)
            return next((each for each in verdicts if each.decision is Decision.REJECT), ACCEPT)

    def is_fresh(self, heard: Heard) -> bool:
        """Whether an observed announcement is still young enough to be fetched. Changes nothing."""
        return self._freshness.check(heard).decision is Decision.ACCEPT

    def observe_own(self, own: Accepted) -> None:
        """Remember a group of this node's own, so that nobody can send it back as theirs. Call it on
        publishing."""
        with self._lock:
            self._copies.remember(own.group, own.tokens, own.arrived_at)

    def judge(self, candidate: Candidate) -> Judgement:
        """The judgement of one candidate. Blocking: scoring may take seconds. Raises nothing for what a peer
        sent."""
        outcomes: list[CheckOutcome] = []
        item, verdict = self._judge(candidate, outcomes)
        for outcome in outcomes:
            self._verdicts[outcome.check, outcome.verdict] += 1
            self._costs_s[outcome.check] = self._costs_s.get(outcome.check, 0.0) + outcome.cost_s
        return Judgement(item, verdict, tuple(outcomes))

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

    @property
    def receipts(self) -> int:
        """Receipts of peers that are kept."""
        return len(self._ledger)

    def _judge(self, candidate: Candidate, outcomes: list[CheckOutcome]) -> tuple[Item | None, Verdict]:
        started_s = time.perf_counter()
        try:
            item = self._schema.open(candidate)
        except RemoteProtocolError as error:
            verdict = reject(error.reason)
            outcomes.append(_outcome(Schema.name, verdict, started_s))
            return None, verdict
        outcomes.append(_outcome(Schema.name, ACCEPT, started_s))
        if not self.enabled:
            return item, _believed(item.announcement.rewards)
        with self._lock:
            verdict = run_checks(self._cheap, item, outcomes)
        if verdict.decision is Decision.REJECT:
            return item, verdict
        verdict = run_checks(self._dear, item, outcomes)
        with self._lock:
            if verdict.decision is Decision.ACCEPT:  # a refused group accuses nobody of copying it
                self._copies.remember(item.group, item.tokens, item.arrived_at)
            elif not verdict.blames_author:  # our sandbox failed: it may be judged again
                self._ledger.forget_judging(item.sender, item.announcement)
        return item, verdict
