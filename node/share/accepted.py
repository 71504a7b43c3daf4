"""A group that this node may learn from: verified and re-scored here, its own or a peer's.

    rollout (own) ---+
    verify (peers) --+--> Accepted --> pool --> weight

The one record between the stages that make groups and the one that weighs them. Nothing in it is parsed,
hashed or scored again on the way. Not for what is only claimed (`node/share/gossip.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import Digest, RolloutGroup
from protocol.rollouts import TokenArrays

__all__ = ["Accepted"]


@dataclass(frozen=True, eq=False, slots=True)
class Accepted:
    """One group, with the rewards of this node."""

    digest: Digest
    """SHA-256 of the encoded group; names it."""
    group: RolloutGroup
    tokens: tuple[TokenArrays, ...] = field(repr=False)
    """Tokens, log-probabilities and versions of each rollout, parsed once."""
    rewards: tuple[float, ...]
    """One for each rollout, computed here (with verification off: the claimed ones)."""
    arrived_at: int
    """Swarm time, ms: when its announcement was heard, or when it was generated here."""
    generate_s: float = 0.0
    """Own groups: their share of the time spent on generation."""
    own: bool = False
    """Generated on this node."""
