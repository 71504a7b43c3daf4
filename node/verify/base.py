"""The words of verification: what comes in, what a check sees, what it answers, what comes out.

`Candidate` (what was heard, with its fetched body) goes in; `schema.py` turns it into an `Item`, the only
thing that checks see; every check answers with a `Verdict`; `pipeline.py` makes a `Judgement` of them. A hard
check's failure rejects, a soft one's only lowers trust. What a failure says about its author is decided here,
in `Verdict.found`; what that costs is `node/peers/trust.py`. Checks never raise for what a peer sent: an
exception in a check is our bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from node.events import CheckOutcome
from node.peers.trust import Hardness
from node.share.heard import Heard
from protocol.messages import RolloutGroup
from protocol.rollouts import TokenArrays

__all__ = [
    "ACCEPT",
    "BLAMELESS_REASONS",
    "UNCERTAIN_REASONS",
    "Check",
    "Decision",
    "Item",
    "Judgement",
    "Verdict",
    "reject",
    "same_values",
    "suspect",
]

BLAMELESS_REASONS = frozenset({"copied", "duplicate", "environment_mismatch", "future", "stale"})
"""Refusals that say nothing against the author: a slow network, a wrong clock or another version of a task
brings them about. `copied` is one: whose announcement came first is a race that an author may lose against
its own copier, so losing it costs the group and no trust. Failures of our own sandbox are blameless as well;
`Verdict.blames_author` covers both."""
UNCERTAIN_REASONS = frozenset({"scorer_memory", "scorer_timeout"})
"""Refused, but an honest peer can get here: a slow machine may miss the scorer's deadline. A soft failure."""


class Decision(StrEnum):
    """The three answers of a check."""

    ACCEPT = "accept"
    REJECT = "reject"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check's answer. `reason` is a short fixed word, "" for accept, and never contains a peer's bytes."""

    decision: Decision
    reason: str = ""
    rewards: tuple[float, ...] | None = None
    """Only from the reward check: what the completions are worth here."""
    blames_author: bool = True
    """False where a rejection is no fault of the author's."""

    @property
    def found(self) -> Hardness | None:
        """What it says about the author; None where it says nothing against it."""
        if self.decision is Decision.ACCEPT:
            return Hardness.ACCEPTED
        if not self.blames_author:
            return None
        soft = self.decision is Decision.SUSPECT or self.reason in UNCERTAIN_REASONS
        return Hardness.SOFT if soft else Hardness.HARD


ACCEPT = Verdict(Decision.ACCEPT)


def reject(reason: str, *, blames_author: bool = True) -> Verdict:
    """A hard failure: the group is refused."""
    return Verdict(Decision.REJECT, reason, blames_author=blames_author and reason not in BLAMELESS_REASONS)


def suspect(reason: str) -> Verdict:
    """A soft failure: the group is used, its author trusted less."""
    return Verdict(Decision.SUSPECT, reason)


@dataclass(frozen=True)
class Item(Heard):
    """What was heard, with a body that is well-formed and fits it."""

    group: RolloutGroup
    tokens: tuple[TokenArrays, ...] = field(repr=False)
    """One entry for each rollout."""


class Check(Protocol):
    """One question to an item."""

    name: str

    def check(self, item: Item) -> Verdict:
        """Blocking; callable without an event loop."""
        ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """What all checks together say of one candidate."""

    item: Item | None
    """None when the body could not be read."""
    verdict: Verdict
    """The first hard failure; else accept, with this node's own rewards (with verification off: the claimed
    ones)."""
    checks: tuple[CheckOutcome, ...]
    """Those that ran, in order."""

    @property
    def accepted(self) -> bool:
        """Whether this node may learn from the group."""
        return self.verdict.decision is Decision.ACCEPT

    @property
    def reason(self) -> str:
        """Why it was rejected, "" when it was accepted."""
        return self.verdict.reason

    @property
    def rewards(self) -> tuple[float, ...]:
        """What the completions are worth here; empty when it was rejected before scoring."""
        return self.verdict.rewards or ()

    @property
    def suspicions(self) -> tuple[str, ...]:
        """Reasons of the soft failures."""
        return tuple(each.reason for each in self.checks if each.verdict == Decision.SUSPECT)

    @property
    def found(self) -> Hardness | None:
        """What it says about the author; None where it says nothing against it."""
        return Hardness.SOFT if self.accepted and self.suspicions else self.verdict.found


def same_values(left: Sequence[float], right: Sequence[float], tolerance: float) -> bool:
    """Equal lengths and every pair within `tolerance`."""
    return len(left) == len(right) and all(abs(a - b) <= tolerance for a, b in zip(left, right, strict=True))
