"""What the estimators share: refusing bad numbers, whether a group has a signal, spreads.

For: rewards of one group as plain floats. Not for: advantages themselves. Numbers that are no numbers, or too
large to be squared, are a bug of ours (rewards are re-scored here and checked there): ValueError.
`has_signal` is the one function that answers False instead, so that whoever asks it first never meets the
error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

__all__ = ["MAX_MAGNITUDE", "STD_EPSILON", "checked", "clamp", "has_signal", "mean_std"]

STD_EPSILON = 1e-6
"""Added to each divisor; rewards, and spreads, that differ by less are alike."""
MAX_MAGNITUDE = 1e100
"""Squares and their sums stay finite below it."""


def checked(values: Sequence[float], what: str = "reward", at_least: float = -MAX_MAGNITUDE) -> None:
    """Raise ValueError, naming place and value, unless all are finite, at least that and at most 1e100."""
    for place, value in enumerate(values):
        if not at_least <= value <= MAX_MAGNITUDE:  # also NaN
            raise ValueError(f"{what} {place} is {value}, not from {at_least:g} to {MAX_MAGNITUDE:g}")


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards are finite (and at most 1e100) and differ, so that a policy gradient exists."""
    if not rewards or not all(abs(reward) <= MAX_MAGNITUDE for reward in rewards):
        return False
    return max(rewards) - min(rewards) > STD_EPSILON


def mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased standard deviation; 0 and 1 for a group of one, as verl has it."""
    if len(rewards) == 1:
        return 0.0, 1.0
    mean = fmean(rewards)
    return mean, math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def clamp(value: float, bound: float) -> float:
    """`value` held between -bound and bound."""
    return min(max(value, -bound), bound)
