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

from node.weight.advantage.numbers import STD_EPSILON, checked, clamp, has_signal, mean_std

__all__ = ["MAX_ROBUST_ADVANTAGE", "gapo", "mad", "mc_grpo", "pivot"]

MAX_ROBUST_ADVANTAGE = 10.0
"""A MAD may be far smaller than the distance of an outlier; nothing else bounds their quotient."""
MAD_TO_STD = 1.4826
"""MAD times this is the standard deviation of normally distributed rewards."""
_WIDTH_TOLERANCE = 1e-9


def pivot(rewards: Sequence[float]) -> int:
    """Place of the rollout that MC-GRPO's group leaves out: of those that have the median reward, the first.

    Of an even group, the lower of the two middle rewards (as `torch.median`). No rewards: ValueError.
    """
    if not rewards:
        raise ValueError("no rewards: no pivot")
    checked(rewards)
    return rewards.index(sorted(rewards)[(len(rewards) - 1) // 2])


def mc_grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - median) / (std + 1e-6) over the G+1 rollouts that were drawn; that of `pivot` is 0, and the
    caller drops it from the group, so that G rollouts count. The std is unbiased, around the mean.

    Source: MC-GRPO, arXiv 2601.22582, `lotusroot-kim/MC-GRPO`. Evidence: CORE. For G of 2 to 8, where noise
    of the mean turns signs around. Draw an odd number; of an even one the median is the lower middle reward.
    Binary: (0, 0, 0, 0, 1) gives (0, 0, 0, 0, sqrt 5), and the first is the pivot.
    """
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    return _scaled_by_std(rewards, rewards[pivot(rewards)])


def mad(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - median) / (1.4826 MAD + 1e-6), MAD the median of |r - median|; where it is 0, (r - median) /
    (std + 1e-6).

    Source: the robust variant beside GAPO, arXiv 2510.21830. Evidence: CORE; ours are the tie rule and the
    bound of +-10. The median of an even group is the mean of the two middle rewards.
    """
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    center = median(rewards)
    deviation = MAD_TO_STD * median(abs(reward - center) for reward in rewards)
    if deviation <= STD_EPSILON:
        return _scaled_by_std(rewards, center)
    divisor = deviation + STD_EPSILON
    return tuple(clamp((reward - center) / divisor, MAX_ROBUST_ADVANTAGE) for reward in rewards)


def gapo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - Q) / (std + 1e-6), Q the median of the narrowest interval that holds half of the rewards,
    rounded up; the std is unbiased, around the mean.

    Source: GAPO, arXiv 2510.21830, `TsingZ0/verl-GAPO`. Evidence: CORE; the half is the default of the
    authors' code, the std the paper's. Of equally narrow intervals the lowest, as in that code: binary
    rewards of which exactly half succeeded have Q = 0, and groups of two have the lower reward. Ours: widths
    that differ by less than 1e-9 of the range are equal, or rounding would choose.
    """
    checked(rewards)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    return _scaled_by_std(rewards, median(_densest_half(rewards)))


def _densest_half(rewards: Sequence[float]) -> list[float]:
    ordered = sorted(rewards)
    inside = (len(ordered) + 1) // 2
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
