"""`minimum_variance`: the baseline that makes an off-policy gradient vary least (OPOB, optimal off-policy
baseline).

For: one group whose sequence ratios and gradient norms are known, which takes a backward pass per rollout.
Not for: measuring them; nor for the ratio that multiplies the gradient, which the objective truncates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from node.weight.advantage.numbers import checked, has_signal

__all__ = ["minimum_variance", "minimum_variance_baseline"]

VCPO_STD_EPSILON = 1e-8


def minimum_variance_baseline(
    rewards: Sequence[float],
    ratios: Sequence[float],
    gradient_norms: Sequence[float],
    lengths: Sequence[int] | None = None,
) -> float:
    """b* = sum W^2 g^2 R / sum W^2 g^2, with g / L for g where `lengths` are given: what minimises sum W^2
    g^2 (R - b)^2.

    Source: VCPO, arXiv 2602.17616, `mit-han-lab/vcpo` (`staleness_utils.py`). Evidence: EXACT; ours is the
    mean reward where all weights are 0 (there 0, from an epsilon of 1e-8 that would also pull the baseline
    of small gradients to 0). Inputs: W = exp(sum(log pi - log mu)), not truncated; g, norms of the gradients
    of log pi before they are multiplied by W or an advantage; L in tokens, at least 1. No rewards: 0. Counts
    that differ, numbers that are not finite, negative ratios or norms: ValueError.
    """
    counts = {len(rewards), len(ratios), len(gradient_norms), len(rewards if lengths is None else lengths)}
    if len(counts) != 1:
        raise ValueError(f"rewards, ratios, norms and lengths of {sorted(counts)} rollouts")
    checked(rewards)
    checked(ratios, "ratio", at_least=0.0)
    checked(gradient_norms, "gradient norm", at_least=0.0)
    checked(lengths or (), "length", at_least=1)
    sizes = [
        ratio * norm / length
        for ratio, norm, length in zip(ratios, gradient_norms, lengths or (1,) * len(rewards), strict=True)
    ]
    largest = max(sizes, default=0.0)
    if largest == 0.0:
        return fmean(rewards) if rewards else 0.0
    # Divided by the largest first: squares of sequence ratios overflow easily.
    return fmean(rewards, [(size / largest) ** 2 for size in sizes])


def minimum_variance(
    rewards: Sequence[float],
    ratios: Sequence[float],
    gradient_norms: Sequence[float],
    *,
    lengths: Sequence[int] | None = None,
    scale: Literal["std", "none"] = "std",
) -> tuple[float, ...]:
    """A = (R - b*) / (std + 1e-8), the std with G and not G-1 in it, as in the source; `none`: A = R - b*.

    Source, evidence, inputs and errors: `minimum_variance_baseline`. VCPO has the same sum from two gradient
    buffers, sum (R/std) g - b* sum g/std, since it learns the norms on the way. A group of one, rewards that
    are alike: zeros.
    """
    baseline = minimum_variance_baseline(rewards, ratios, gradient_norms, lengths)
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    divisor = 1.0
    if scale == "std":
        mean = fmean(rewards)
        divisor = math.sqrt(fmean((reward - mean) ** 2 for reward in rewards)) + VCPO_STD_EPSILON
    return tuple((reward - baseline) / divisor for reward in rewards)
