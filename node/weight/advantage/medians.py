"""Estimators around a median, for small or skewed groups: `mc_grpo` and its `pivot`, `gapo`, `mad`.

For: one group's re-scored rewards, in; one advantage each, in the same order, out. They do not sum to zero:
whatever lies on the median has no advantage, so of binary rewards only the minority is trained on. No
rewards: no advantages. A group of one, and rewards that are all alike: zeros. A reward that is no finite
number: ValueError.

The tie rule: where the median absolute deviation is 0 (more than half of the rewards tie, with binary ones
and an odd group always) the standard deviation divides instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from node.weight.advantage.numbers import (
    STD_EPSILON,
    checked,
    clamp,
    has_signal,
    mean_std,
    median_deviation,
)

__all__ = ["MAX_ROBUST_ADVANTAGE", "gapo", "mad", "mc_grpo", "pivot"]

MAX_ROBUST_ADVANTAGE = 10.0
"""A MAD may be far smaller than the distance of an outlier; nothing else bounds their quotient."""
MAD_TO_STD = 1.4826
"""MAD times this is the standard deviation of normally distributed rewards."""
MC_GRPO_MAD_EPSILON = 1e-3
"""As in the authors' code."""
_WIDTH_TOLERANCE = 1e-9


def pivot(rewards: Sequence[float]) -> int:
    """Place of the rollout that MC-GRPO's group leaves out: of those that have the median reward, the first.

    Of an even group, the lower of the two middle rewards (as `torch.median`). No rewards: ValueError.
    """
    if not rewards:
        raise ValueError("no rewards: no pivot")
    checked(rewards)
    return rewards.index(sorted(rewards)[(len(rewards) - 1) // 2])


def mc_grpo(rewards: Sequence[float], scale: Literal["std", "mad", "none"] = "std") -> tuple[float, ...]:
    """A = (r - median) / (spread + eps) over the G+1 rollouts that were drawn; that of `pivot` is 0, and the
    caller drops it from the group, so that G rollouts count.

    Source: MC-GRPO, arXiv 2601.22582, `lotusroot-kim/MC-GRPO`. Evidence: CORE. For G of 2 to 8, where noise
    of the mean turns signs around. Draw an odd number; of an even one the median is the lower middle reward.
    scale: `std`, unbiased, around the mean, eps 1e-6; `mad`, plain, eps 1e-3, as in the authors' code, which
    so divides binary rewards by 1e-3 (A = +-1000): ours are the tie rule and the bound of +-10; `none`.
    Binary: (0, 0, 0, 0, 1) with std gives (0, 0, 0, 0, sqrt 5), and the first is the pivot.
    """
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    center = rewards[pivot(rewards)]
    if scale == "none":
        return tuple(reward - center for reward in rewards)
    if scale == "mad":
        return _scaled_by_mad(rewards, center, 1.0, MC_GRPO_MAD_EPSILON)
    return _scaled_by_std(rewards, center)


def mad(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - median) / (1.4826 MAD + 1e-6), MAD the median of |r - median|; where it is 0, (r - median) /
    (std + 1e-6).

    Source: the robust variant beside GAPO, arXiv 2510.21830. Evidence: CORE; ours are the tie rule and the
    bound of +-10. The median of an even group is the mean of the two middle rewards.
    """
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    return _scaled_by_mad(rewards, median(rewards), MAD_TO_STD, STD_EPSILON)


def gapo(
    rewards: Sequence[float], mass: float = 0.5, scale: Literal["std", "deviation"] = "std"
) -> tuple[float, ...]:
    """A = (r - Q) / (spread + 1e-6), Q the median of the narrowest interval that holds ceil(mass G) rewards.

    Source: GAPO, arXiv 2510.21830, `TsingZ0/verl-GAPO`. Evidence: CORE; mass 0.5 is the default of the
    authors' code. scale: `std`, unbiased, around the mean, as the paper writes it; `deviation`, sqrt(sum (r -
    Q)^2 / (G-1)), what the authors' code divides by. Of equally narrow intervals the lowest, as in that code:
    binary rewards of which exactly half succeeded have Q = 0, and groups of two have the lower reward. Ours:
    widths that differ by less than 1e-9 of the range are equal, or rounding would choose. `mass` beyond 0 to
    1: ValueError.
    """
    if not 0.0 < mass <= 1.0:
        raise ValueError(f"mass is {mass}; it must be above 0 and at most 1")
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    center = median(_densest(rewards, mass))
    if scale == "deviation":
        squares = sum((reward - center) ** 2 for reward in rewards)
        spread = math.sqrt(squares / (len(rewards) - 1))
        return tuple((reward - center) / (spread + STD_EPSILON) for reward in rewards)
    return _scaled_by_std(rewards, center)


def _densest(rewards: Sequence[float], mass: float) -> list[float]:
    ordered = sorted(rewards)
    inside = max(math.ceil(mass * len(ordered) - _WIDTH_TOLERANCE), 1)
    tolerance = _WIDTH_TOLERANCE * (ordered[-1] - ordered[0])
    best, narrowest = 0, math.inf
    for start in range(len(ordered) - inside + 1):
        width = ordered[start + inside - 1] - ordered[start]
        if width < narrowest - tolerance:
            best, narrowest = start, width
    return ordered[best : best + inside]


def _scaled_by_std(rewards: Sequence[float], center: float) -> tuple[float, ...]:
    _, std = mean_std(rewards)
    return tuple((reward - center) / (std + STD_EPSILON) for reward in rewards)


def _scaled_by_mad(
    rewards: Sequence[float], center: float, factor: float, epsilon: float
) -> tuple[float, ...]:
    deviation = factor * median_deviation(rewards, center)
    if deviation <= STD_EPSILON:
        return _scaled_by_std(rewards, center)
    return tuple(clamp((reward - center) / (deviation + epsilon), MAX_ROBUST_ADVANTAGE) for reward in rewards)
