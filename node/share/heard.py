"""What was heard of others' groups: first the announcement alone, then with its body. Both unverified.

    gossip --Heard--> collect --Candidate--> verify

Not for groups that this node may learn from (`node/share/accepted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import Announcement, Digest, PeerId

__all__ = ["Candidate", "Heard"]


@dataclass(frozen=True)
class Heard:
    """An announcement that passed signature, freshness, replay, membership and schema."""

    sender: PeerId
    """Who signed the envelope."""
    announcement: Announcement
    arrived_at: int
    """Our clock, ms: which of two equal contributions came first is never decided by a claimed time."""
    envelope: Digest
    """SHA-256 of the envelope that carried it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What was heard, with the body as its author served it."""

    heard: Heard
    body: bytes = field(repr=False)
