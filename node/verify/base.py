"""The words of verification: what comes in, what a check sees, what it answers, what comes out.

`Candidate` (an announcement with its fetched body) goes in; `schema.py` turns it into an `Item`, the only
thing that checks see; every check answers with a `Verdict`; `pipeline.py` makes a `Judgement` of them. A hard
check's failure rejects, a soft one's only lowers trust. Checks never raise for what a peer sent: an exception
in a check is our bug. Not for: deciding what a failure costs its author (`node/peers/trust.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from node.events import CheckOutcome
from protocol.messages import Announcement, PeerId, RolloutGroup
from protocol.rollouts import TokenArrays

__all__ = [
    "ACCEPT",
    "BLAMELESS_REASONS",
    "Candidate",
    "Check",
    "Decision",
    "Item",
    "Judgement",
    "Sighting",
    "Verdict",
    "reject",
    "same_values",
    "suspect",
]

BLAMELESS_REASONS = frozenset({"duplicate", "future", "stale"})
"""Refusals that say nothing against the author: a slow network or a wrong clock brings them about. Failures
of our own sandbox are blameless as well; `Judgement.blames_author` covers both."""


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


ACCEPT = Verdict(Decision.ACCEPT)


def reject(reason: str, *, blames_author: bool = True) -> Verdict:
    """A hard failure: the group is refused."""
    return Verdict(Decision.REJECT, reason, blames_author=blames_author and reason not in BLAMELESS_REASONS)


def suspect(reason: str) -> Verdict:
    """A soft failure: the group is used, its author trusted less."""
    return Verdict(Decision.SUSPECT, reason)


@dataclass(frozen=True, slots=True)
class Candidate:
    """share.collect -> verify. `sender` is the envelope's signer; `arrived_at` is when the announcement came
    in."""

    sender: PeerId
    announcement: Announcement
    body: bytes
    arrived_at: int


@dataclass(frozen=True)
class Sighting:
    """What is known about a slot's answer before its body is here."""

    sender: PeerId
    announcement: Announcement
    arrived_at: int
    now_ms: int


@dataclass(frozen=True)
class Item(Sighting):
    """A candidate whose bytes are well-formed and fit its announcement. `tokens` has one entry per
    rollout."""

    group: RolloutGroup
    tokens: tuple[TokenArrays, ...] = field(repr=False)


class Check(Protocol):
    """One question to an item. `hard`: a failure rejects; otherwise it only lowers trust."""

    name: str
    hard: bool

    def check(self, item: Item) -> Verdict:
        """Blocking; callable without an event loop."""
        ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """verify -> pool, trust, events. `rewards` are this node's own (with verification off: the claimed
    ones)."""

    accepted: bool
    reason: str
    """The first hard failure's reason, "" when accepted."""
    blames_author: bool
    """The refusal should cost the author trust: not so for stale, duplicate, and failures of our own
    sandbox."""
    checks: tuple[CheckOutcome, ...]
    suspicions: tuple[str, ...]
    """Reasons of the soft failures, in order of the checks."""
    group: RolloutGroup | None
    """None when the body could not be read."""
    tokens: tuple[TokenArrays, ...]
    """Of each rollout, parsed; empty when the body could not be read."""
    rewards: tuple[float, ...]
    """Empty when refused before scoring."""

    @property
    def hard(self) -> bool:
        """Refused by a hard check."""
        return not self.accepted

    @property
    def question(self) -> str:
        """The group's question, peer text until accepted; "" when the body could not be read."""
        return self.group.question if self.group is not None else ""


def same_values(left: Sequence[float], right: Sequence[float], tolerance: float) -> bool:
    """Equal lengths and every pair within `tolerance`."""
    return len(left) == len(right) and all(abs(a - b) <= tolerance for a, b in zip(left, right, strict=True))
