"""What all benches share: measurements of two sides by turns, medians, the machine, the envelope of a report.

For: numbers that survive a busy machine. Two things that are compared run in turn, each pair close in time,
with the order changing from pair to pair, and what is reported is the median of the pairs' ratios: a machine
that is slow for a minute slows both sides. Pure but for the clock and the load. Not for: what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Pairs", "Say", "envelope", "in_turn", "spread"]

Say = Callable[[str], None]
"""Hears a line of progress."""


@dataclass(frozen=True)
class Pairs:
    """The same quantity of two sides, measured by turns; higher is better."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over theirs, of each pair."""
        return tuple(our / their for our, their in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the pairs' ratios."""
        return median(self.ratios)


def in_turn(count: int, ours: Callable[[int], float], theirs: Callable[[int], float], say: Say) -> Pairs:
    """`count` pairs; each side is given the number of the pair. Even pairs begin with ours."""
    pairs: list[tuple[float, float]] = []
    for place in range(count):
        if place % 2 == 0:
            our = ours(place)
            their = theirs(place)
        else:
            their = theirs(place)
            our = ours(place)
        pairs.append((our, their))
        say(f"pair {place + 1} of {count}: {our:.1f} against {their:.1f} ({our / their:.2f})")
    return Pairs(*zip(*pairs, strict=True))


def spread(values: Sequence[float]) -> float:
    """Largest over smallest: how much the machine, or the measurement, wavered. 1 is perfect."""
    return max(values) / min(values)


def envelope(bench: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """A report as one JSON object: what ran, what came out (floats to four significant digits), and on what
    machine."""
    return {
        "bench": bench,
        **{name: _rounded(value) for name, value in results.items()},
        "cores": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value
