"""`uniqueness_aware`: right answers by a strategy few others took count more.

For: advantages of any other estimator, reweighted. Not for: finding the clusters. They are computed on this
machine, by the caller, and never taken from a peer, who could so weigh its own rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import fmean

from node.weight.advantage.numbers import checked

__all__ = ["uniqueness_aware"]


def uniqueness_aware(
    advantages: Sequence[float],
    correct: Sequence[bool],
    clusters: Sequence[Hashable],
    *,
    exponent: float = 1.0,
) -> tuple[float, ...]:
    """A' = A w for right answers, A for wrong ones; w = f^-a divided by its mean over the right ones, f the
    number of answers of the group, wrong ones too, in the same cluster.

    Source: Uniqueness-aware RL, arXiv 2601.08763, whose repository has no code. Evidence: RECONSTRUCTED; ours
    are f^-a with a = 1 (`exponent`) and the mean weight of 1, which leaves the sum of binary rewards'
    advantages as it was. Inputs: one group's advantages, which answers were right, a cluster label each. No
    right answer, and none at all: unchanged. Sequences of unlike length, and numbers that are not finite:
    ValueError.
    """
    if not len(advantages) == len(correct) == len(clusters):
        raise ValueError(
            f"{len(advantages)} advantages, {len(correct)} verdicts, {len(clusters)} clusters of one group"
        )
    checked(advantages, "advantage")
    checked((exponent,), "exponent", at_least=0.0)
    if not any(correct):
        return tuple(advantages)
    sizes = Counter(clusters)
    right = {label for label, is_right in zip(clusters, correct, strict=True) if is_right}
    # Relative to the smallest cluster, so that no exponent makes all of them 0.
    smallest = min(sizes[label] for label in right)
    weights = {label: (smallest / sizes[label]) ** exponent for label in right}
    mean = fmean(weights[label] for label, is_right in zip(clusters, correct, strict=True) if is_right)
    return tuple(
        advantage * weights[label] / mean if is_right else advantage
        for advantage, label, is_right in zip(advantages, clusters, correct, strict=True)
    )
