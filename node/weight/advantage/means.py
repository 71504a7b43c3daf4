"""Estimators around the group's mean: `grpo`, `rloo`, `dr_grpo`, `max_rl`.

For: one group's re-scored rewards, in; one advantage each, in the same order, out. They sum to zero over a
group of two or more (`max_rl`: of rewards of 0 or more). No rewards: no advantages. A reward that is no
finite number: ValueError. What happens to a group of one, and to rewards that are all alike, each says
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from node.weight.advantage.numbers import STD_EPSILON, checked, clamp, has_signal, mean_std

__all__ = ["dr_grpo", "grpo", "max_rl", "rloo"]


def grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - mean) / (std + 1e-6), unbiased std; a group of one has mean 0 and std 1. All alike: zeros.

    Source: GRPO, arXiv 2402.03300; the unbiased std as in verl. Evidence: EXACT.
    """
    checked(rewards)
    if not rewards:
        return ()
    mean, std = mean_std(rewards)
    return tuple((reward - mean) / (std + STD_EPSILON) for reward in rewards)


def rloo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean); a group of one has no baseline: 0. All alike:
    zeros.

    Source: RLOO, arXiv 2402.14740. Evidence: EXACT; 0 for a group of one is ours.
    """
    checked(rewards)
    count = len(rewards)
    if count < 2:
        return (0.0,) * count
    mean = fmean(rewards)
    return tuple(count / (count - 1) * (reward - mean) for reward in rewards)


def dr_grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = r - mean, without the division by std that favours very easy and very hard prompts. A group of one,
    and all alike: zeros.

    Source: Dr.GRPO, arXiv 2503.20783. Evidence: EXACT.
    """
    checked(rewards)
    if not rewards:
        return ()
    mean = fmean(rewards)
    return tuple(reward - mean for reward in rewards)


def max_rl(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - mean) / mean: a prompt that succeeds with probability p counts 1/p times, as in maximum
    likelihood; G decides how near one comes to it.

    Source: MaxRL, arXiv 2602.02710; prime-rl's `max_rl`. Evidence: EXACT. Meant for rewards of 0 and 1, or at
    least for none below 0. As in prime-rl, a mean of 0 or less gives zeros: nothing succeeded. Ours: also
    zeros for rewards that are alike, and +-(G-1) as a bound, which rewards of 0 or more never pass (one
    success in G has exactly G-1) but without which rewards of both signs could have any advantage. A group of
    one: 0.
    """
    checked(rewards)
    mean = fmean(rewards) if rewards else 0.0
    if mean <= 0.0 or not has_signal(rewards):
        return (0.0,) * len(rewards)
    bound = len(rewards) - 1
    return tuple(clamp((reward - mean) / mean, bound) for reward in rewards)
