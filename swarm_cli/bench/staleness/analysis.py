"""From curves to numbers: area, collapse, and bootstrap intervals over paired seeds.

Area is the mean height of the held-out curve over the steps (trapezoids), so runs of different length
compare. An interval is the middle 95 % of what the statistic is over all ways to draw as many seeds with
replacement: all of them where there are few (5 seeds: 3,125), else `RESAMPLES` seeded draws (percentile
bootstrap). With so few seeds such intervals are a little narrow; differences are of the same seeds, which is
what makes them useful. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Curve",
    "Interval",
    "area",
    "bootstrap",
    "collapsed",
    "difference",
    "final",
    "mean",
    "mean_curve",
    "ratio_of_means",
]

CONFIDENCE = 0.95
RESAMPLES = 10_000
_ALL_WAYS = 50_000
"""Up to so many ways to draw, all are taken."""
_LAST = 3
"""Points of the curve that make the final value."""

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Interval:
    """A statistic and its 95 % interval."""

    value: float
    low: float
    high: float


def area(curve: Curve, steps: int | None = None) -> float:
    """Mean height between the first point and `steps`, or the last point."""
    points = [(at, height) for at, height in curve if steps is None or at <= steps]
    if len(points) < 2:
        return points[0][1]
    under = sum(
        (right - left) * (low + high) / 2 for (left, low), (right, high) in itertools.pairwise(points)
    )
    return under / (points[-1][0] - points[0][0])


def final(curve: Curve) -> float:
    """Mean of the last points."""
    return fmean(height for _, height in curve[-_LAST:])


def collapsed(curve: Curve) -> bool:
    """Whether it ended below where it began, or below half of the best it had."""
    return final(curve) < curve[0][1] or final(curve) < max(height for _, height in curve) / 2


def mean(values: Sequence[float]) -> Interval:
    """Mean over seeds."""
    return bootstrap(lambda drawn: drawn[0].mean(-1), values)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of the paired differences."""
    return mean([our - their for our, their in zip(ours, theirs, strict=True)])


def ratio_of_means(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of ours over mean of theirs, seeds drawn in pairs."""
    return bootstrap(lambda drawn: drawn[0].mean(-1) / drawn[1].mean(-1), ours, theirs)


def bootstrap(
    statistic: Callable[[Sequence[NDArray[np.float64]]], NDArray[np.float64]], *samples: Sequence[float]
) -> Interval:
    """A statistic of paired samples. It is given one array per sample, resamples x seeds, and answers one
    number for each resample."""
    values = [np.asarray(sample, dtype=np.float64) for sample in samples]
    count = len(values[0])
    if count**count <= _ALL_WAYS:
        ways = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        ways = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    results = statistic([sample[ways] for sample in values])
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(results, [tail, 1.0 - tail])
    whole = statistic([sample[None, :] for sample in values])
    return Interval(float(whole[0]), float(low), float(high))


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Of curves with the same points."""
    return [(points[0][0], fmean(height for _, height in points)) for points in zip(*curves, strict=True)]
