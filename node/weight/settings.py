"""Words and settings of the weight stage: how much a step takes, and how groups are treated.

The configuration builds the settings. Not for the objectives that treatments name (`node/train/settings.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

__all__ = ["Treatment", "WeightSettings"]


class Treatment(StrEnum):
    """Names the objective that a group is trained on with."""

    OWN = "own"
    """The own groups' objective, with the behaviour log-probability of each token; for followers' groups,
    too, and when forced for others' of the same tokenizer."""
    COMPAT = "compat"
    """Another policy's group, by the ratio of whole completions."""
    HACPO = "hacpo"
    """Another policy's group on a prompt that this node answered too."""
    GRAFT = "graft"
    """Another policy's mixed group on a prompt where all own rollouts failed."""


@dataclass(frozen=True)
class WeightSettings:
    """What a step takes, and how it weighs it."""

    local_groups: int = 4
    """Own groups in a step (I)."""
    external_groups: int = 4
    """Peers' groups in a step, at most (J)."""
    external_wait_s: float = 2.0
    """How long a step waits for peers' groups."""
    external_weight: float = 1.0
    """Weight of a peer's group against an own one (1): lambda of a peer is this times its groups per own
    group, at most 1."""
    advantage: Literal["dr_grpo", "gapo", "grpo", "mad", "max_rl", "mc_grpo", "rloo"] = "grpo"
    """Advantage inside one group."""
    force: Treatment | None = None
    """One treatment for all external groups, or None to choose by prompt and outcome."""
    failure_reward: float = 0.0
    """An own group has failed if no reward is above this."""
    max_completion_tokens: int = 256
    """Longer completions, in this policy's tokens, are refused."""
