"""Which objective copes with which lag: the runs and what is made of them.

First every preset's learning rate: runs with seeds of their own at `tuning_lags`; the rate with the largest
area, mean over lags and seeds, is used at every lag. Then each preset at each lag with the same seeds. A run
makes at least three times as many steps as its largest lag, the first of them on rollouts of version 0. At
lag 0 a run is as long as the longest other one, so that each lag is compared with lag 0 over the same steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from protocol.errors import ConfigError
from swarm_cli.bench.staleness.analysis import (
    Interval,
    area,
    collapsed,
    difference,
    final,
    mean,
    mean_curve,
    ratio_of_means,
)
from swarm_cli.bench.staleness.lagged import LAGGED, Lagged, RunResult
from swarm_cli.bench.staleness.ledger import Ledger
from swarm_cli.bench.staleness.mismatch import Mismatch
from swarm_cli.bench.staleness.objective import DEFAULT
from swarm_cli.bench.staleness.workers import Crew

__all__ = ["BASELINE", "Lag", "LagSize", "Lags", "parse_lag"]

Lag = tuple[int, ...]
"""One lag, or several of which each group draws its own."""

BASELINE = "uncorrected"
BARRED = 64
"""Larger lags are reported without a bar."""
BAR = 0.95
FIRST_TUNING_SEED = 1000
FRESH: Lag = (0,)


@dataclass(frozen=True)
class LagSize:
    """What is measured."""

    presets: tuple[str, ...]
    lags: tuple[Lag, ...]
    seeds: int
    steps: int
    """At least; three times the lag where that is more."""
    learning_rates: tuple[float, ...]
    """One, or several to choose from."""
    tuning_lags: tuple[Lag, ...]
    tuning_seeds: int
    mismatch: Mismatch = Mismatch.NONE
    policy: str = "wren"


def parse_lag(spelled: str) -> Lag:
    """`64`, or `0+16+64` for a mixture. Raises ConfigError."""
    try:
        lag = tuple(int(each) for each in spelled.split("+"))
    except ValueError:
        lag = (-1,)
    if min(lag) < 0:
        raise ConfigError(f"lag {spelled!r} is not a number of versions like 64, or a mixture like 0+16+64")
    return lag


class Lags:
    """The experiment."""

    def __init__(self, size: LagSize, ledger: Ledger[Lagged, RunResult]) -> None:
        self._size = size
        self._ledger = ledger
        self._longest = max(self._steps(lag) for lag in size.lags)
        self._tuned: dict[str, dict[float, float]] = {}
        """Of each preset, the area that each learning rate gave; empty where there is no choice."""

    # --- what runs -----------------------------------------------------------------------------------------

    def run(self, crew: Crew) -> None:
        """Make all runs that the ledger lacks. Raises OurFault."""
        if len(self._size.learning_rates) > 1:
            self._tune(crew)
        cases = [self._runs(preset, lag) for preset, lag in self._cases()]
        crew.finish("lags", LAGGED, _by_turns(cases), self._ledger)

    def _tune(self, crew: Crew) -> None:
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self._size.tuning_seeds)
        cases = {
            (preset, rate): [
                self._lagged(preset, lag, seed, rate, self._steps(lag))
                for seed, lag in itertools.product(seeds, self._size.tuning_lags)
            ]
            for preset, rate in itertools.product(self._size.presets, self._size.learning_rates)
        }
        crew.finish("learning rates", LAGGED, _by_turns(cases.values()), self._ledger)
        for (preset, rate), runs in cases.items():
            areas = [area(result.curve) for result in map(self._ledger.get, runs) if result is not None]
            if len(areas) == len(runs):
                self._tuned.setdefault(preset, {})[rate] = fmean(areas)

    def _cases(self) -> Iterable[tuple[str, Lag]]:
        return itertools.product(self._size.presets, self._size.lags)

    def _runs(self, preset: str, lag: Lag) -> list[Lagged]:
        """Of one preset at one lag, by seed."""
        steps = self._longest if lag == FRESH else self._steps(lag)
        rate = self._rate(preset)
        return [self._lagged(preset, lag, seed, rate, steps) for seed in range(self._size.seeds)]

    def _lagged(self, preset: str, lag: Lag, seed: int, rate: float, steps: int) -> Lagged:
        return Lagged(
            preset=preset,
            lags=lag,
            seed=seed,
            learning_rate=rate,
            steps=steps,
            mismatch=self._size.mismatch,
            policy=self._size.policy,
        )

    def _steps(self, lag: Lag) -> int:
        return max(self._size.steps, 3 * max(lag))

    def _rate(self, preset: str) -> float:
        tuned = self._tuned.get(preset)
        return max(tuned, key=tuned.__getitem__) if tuned else self._size.learning_rates[0]

    # --- what is reported ----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """See `bench.py`."""
        size = self._size
        return {
            "policy": size.policy,
            "mismatch": str(size.mismatch),
            "seeds": size.seeds,
            "steps": {_spelled(lag): self._steps(lag) for lag in size.lags},
            "baseline": BASELINE if BASELINE in size.presets else None,
            "default": DEFAULT if DEFAULT in size.presets else None,
            "presets": [
                {
                    "preset": preset,
                    "learning_rate": self._rate(preset),
                    "tuning": {f"{rate:g}": value for rate, value in self._tuned.get(preset, {}).items()},
                    "lags": [self._case(preset, lag) for lag in size.lags],
                }
                for preset in size.presets
            ],
            "verdict": self._verdict(),
            "cost": self._cost(),
        }

    def _case(self, preset: str, lag: Lag) -> dict[str, Any]:
        results = self._results(preset, lag)
        if results is None:
            return {"lag": _spelled(lag), "area": None}
        steps = self._steps(lag)
        curves = [[point for point in result.curve if point[0] <= steps] for result in results]
        areas = [area(curve) for curve in curves]
        fresh = self._areas(preset, FRESH, steps)
        return {
            "lag": _spelled(lag),
            "area": asdict(mean(areas)),
            "final": asdict(mean([final(curve) for curve in curves])),
            "collapsed": sum(map(collapsed, curves)),
            "skipped": sum(result.skipped for result in results),
            "retained": _compared(ratio_of_means, areas, fresh),
            "against_fresh": _compared(difference, areas, fresh),
            "against_baseline": _compared(difference, areas, self._areas(BASELINE, lag, steps)),
            "kept": fmean(result.kept for result in results),
            "ess": fmean(result.ess for result in results),
            "gap": fmean(result.gap for result in results),
            "curve": mean_curve(curves),
        }

    def _results(self, preset: str, lag: Lag) -> list[RunResult] | None:
        """By seed; None unless all runs are there."""
        if preset not in self._size.presets or lag not in self._size.lags:
            return None
        results = [self._ledger.get(run) for run in self._runs(preset, lag)]
        return [each for each in results if each is not None] if None not in results else None

    def _areas(self, preset: str, lag: Lag, steps: int) -> list[float] | None:
        results = self._results(preset, lag)
        return None if results is None else [area(result.curve, steps) for result in results]

    def _verdict(self) -> dict[str, Any] | None:
        """The default against the baseline at the largest single lag that has a bar."""
        barred = [lag for lag in self._size.lags if len(lag) == 1 and 0 < lag[0] <= BARRED]
        if not barred:
            return None
        lag = max(barred)
        steps = self._steps(lag)
        ours, fresh = self._areas(DEFAULT, lag, steps), self._areas(DEFAULT, FRESH, steps)
        theirs, theirs_fresh = self._areas(BASELINE, lag, steps), self._areas(BASELINE, FRESH, steps)
        if ours is None or fresh is None or theirs is None or theirs_fresh is None:
            return None
        retained, gain = ratio_of_means(ours, fresh), difference(ours, theirs)
        return {
            "lag": _spelled(lag),
            "default_retained": asdict(retained),
            "baseline_retained": asdict(ratio_of_means(theirs, theirs_fresh)),
            "default_over_baseline": asdict(gain),
            "holds": retained.value >= BAR and gain.low > 0,
        }

    def _cost(self) -> dict[str, Any] | None:
        """What the reported runs took when they were made, learning rates apart."""
        runs = [run for preset, lag in self._cases() for run in self._runs(preset, lag)]
        done = [(run, result) for run in runs if (result := self._ledger.get(run)) is not None]
        if not done:
            return None
        steps = sum(run.steps for run, _ in done)
        return {
            "runs": len(done),
            "other_code": sum(self._ledger.made_by_other_code(run) for run, _ in done),
            "run_s": fmean(sum(result.seconds.values()) for _, result in done),
            "run_cpu_s": fmean(result.cpu_s for _, result in done),
            "step_ms": {
                work: 1000 * sum(result.seconds[work] for _, result in done) / steps
                for work in done[0][1].seconds
            },
        }


def _compared(
    statistic: Callable[[Sequence[float], Sequence[float]], Interval],
    ours: Sequence[float],
    theirs: Sequence[float] | None,
) -> dict[str, float] | None:
    return None if theirs is None else asdict(statistic(ours, theirs))


def _by_turns(cases: Iterable[Sequence[Lagged]]) -> list[Lagged]:
    """Seed by seed, so that a lab which is stopped has something of everything."""
    return [run for runs in zip(*cases, strict=True) for run in runs]


def _spelled(lag: Lag) -> str:
    return "+".join(map(str, lag))
