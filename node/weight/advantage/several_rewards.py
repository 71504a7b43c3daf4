"""`gdpo`: several rewards per rollout, each compared inside its group before they are added up.

For: a whole batch at once, since the sums are whitened over it. Not for: one reward per rollout, where this
is GRPO divided by a spread of the batch. Rewards by name, in; one advantage per rollout, by group, out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from node.weight.advantage.numbers import STD_EPSILON, checked, has_signal, mean_std

__all__ = ["gdpo"]

TRL_EPSILON = 1e-4
VERL_VARIANCE_EPSILON = 1e-8

Group = Mapping[str, Sequence[float]]


def gdpo(
    groups: Sequence[Group],
    *,
    whiten: Literal["samples", "tokens"],
    weights: Mapping[str, float] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """S = sum_n w_n (r_n - mean_n) / (std_n + eps), means and unbiased stds inside the group; A = S whitened
    over the batch.

    `whiten` has no default, for the two libraries differ as soon as rollouts differ in length. samples (TRL):
    eps 1e-4, A = (S - mean) / (std + 1e-4), every rollout counts once; as the group means of S are 0, this
    only divides. tokens (verl): eps 1e-6, A = (S - mean) / sqrt(var + 1e-8), every rollout counts as often as
    it has tokens; the mean is then not 0, and a group whose rewards are all alike gets -mean / std, not 0.

    Source: GDPO, arXiv 2601.05242, `NVlabs/GDPO`; verl's `gdpo`, TRL's `normalize_then_sum`. Evidence: EXACT;
    0 for a group of one is TRL's, where verl takes the bare reward. Inputs: of each group the rewards by
    name, the same names in all; `weights` by name, 1 each by default; `lengths`, tokens of each rollout, for
    `tokens`. Whatever cannot be whitened is all zeros: less than two samples or tokens, or S alike in the
    whole batch. Ours: S is alike if it is without eps, for where two rewards oppose each other the libraries
    blow up what eps has left of S. Names or counts that do not fit, and numbers that are not finite:
    ValueError.
    """
    names = _names(groups, weights)
    counts = _counts(groups, names, whiten, lengths)
    epsilon = TRL_EPSILON if whiten == "samples" else STD_EPSILON
    factors = {name: 1.0 if weights is None else weights[name] for name in names}
    checked(tuple(factors.values()), "weight")
    sums = [_weighted(group, factors, epsilon) for group in groups]
    if _whitening([_weighted(group, factors, 0.0) for group in groups], counts)[1] <= STD_EPSILON:
        return tuple((0.0,) * len(row) for row in sums)
    mean, std = _whitening(sums, counts)
    divisor = std + TRL_EPSILON if whiten == "samples" else math.sqrt(std**2 + VERL_VARIANCE_EPSILON)
    return tuple(tuple((value - mean) / divisor for value in row) for row in sums)


def _names(groups: Sequence[Group], weights: Mapping[str, float] | None) -> tuple[str, ...]:
    expected = set(weights if weights is not None else groups[0] if groups else ())
    for place, group in enumerate(groups):
        if set(group) != expected or not group:
            raise ValueError(f"group {place} has the rewards {sorted(group)}, not {sorted(expected)}")
    return tuple(sorted(expected))


def _counts(
    groups: Sequence[Group],
    names: tuple[str, ...],
    whiten: Literal["samples", "tokens"],
    lengths: Sequence[Sequence[int]] | None,
) -> list[Sequence[int]]:
    """How often each rollout counts."""
    if whiten == "tokens" and lengths is None:
        raise ValueError("whitening over tokens needs their numbers")
    if lengths is not None and len(lengths) != len(groups):
        raise ValueError(f"{len(groups)} groups, lengths of {len(lengths)}")
    counts: list[Sequence[int]] = []
    for place, group in enumerate(groups):
        sizes = {len(group[name]) for name in names}
        if lengths is not None:
            checked(lengths[place], "length", at_least=0)
            sizes.add(len(lengths[place]))
        if len(sizes) != 1:
            raise ValueError(f"group {place} has rewards, or lengths, of {sorted(sizes)} rollouts")
        counts.append(lengths[place] if whiten == "tokens" and lengths is not None else (1,) * sizes.pop())
    return counts


def _weighted(group: Group, factors: Mapping[str, float], epsilon: float) -> list[float]:
    scores = [(factor, _z_scores(group[name], epsilon)) for name, factor in factors.items()]
    return [math.fsum(factor * row[place] for factor, row in scores) for place in range(len(scores[0][1]))]


def _z_scores(rewards: Sequence[float], epsilon: float) -> tuple[float, ...]:
    checked(rewards)
    if not has_signal(rewards):  # also a group of one
        return (0.0,) * len(rewards)
    mean, std = mean_std(rewards)
    return tuple((reward - mean) / (std + epsilon) for reward in rewards)


def _whitening(sums: Sequence[Sequence[float]], often: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Mean and unbiased standard deviation of values that count so often; 0 and 0 of less than two."""
    values = [value for row in sums for value in row]
    counts = [count for row in often for count in row]
    total = sum(counts)
    if total < 2:
        return 0.0, 0.0
    mean = fmean(values, counts)
    variance = math.fsum(count * (value - mean) ** 2 for value, count in zip(values, counts, strict=True)) / (
        total - 1
    )
    return mean, math.sqrt(variance)
