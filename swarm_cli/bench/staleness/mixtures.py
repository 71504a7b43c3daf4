"""Whether unlike policies gain from each other's rollouts: the runs and what is made of them.

Every variant of `swarm.py` with the same seeds, at one learning rate; a variant is compared with both
baselines, seed by seed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from swarm_cli.bench.staleness.analysis import area, difference, final, mean, mean_curve
from swarm_cli.bench.staleness.ledger import Ledger
from swarm_cli.bench.staleness.objective import DEFAULT
from swarm_cli.bench.staleness.swarm import BASELINES, SWARM, Swarm, SwarmResult
from swarm_cli.bench.staleness.workers import Crew

__all__ = ["MixtureSize", "Mixtures"]


@dataclass(frozen=True)
class MixtureSize:
    """What is measured."""

    variants: tuple[str, ...]
    seeds: int
    steps: int
    learning_rate: float
    objective: str = DEFAULT
    """Preset of the own groups."""
    policies: tuple[str, ...] = ("wren", "starling")


class Mixtures:
    """The experiment."""

    def __init__(self, size: MixtureSize, ledger: Ledger[Swarm, SwarmResult]) -> None:
        self._size = size
        self._ledger = ledger

    def run(self, crew: Crew) -> None:
        """Make all runs that the ledger lacks. Raises OurFault."""
        runs = [
            self._swarm(variant, seed) for seed in range(self._size.seeds) for variant in self._size.variants
        ]
        crew.finish("swarm", SWARM, runs, self._ledger)

    def report(self) -> dict[str, Any]:
        """See `bench.py`."""
        variants = [self._variant(variant) for variant in self._size.variants]
        sharing = [each for each in variants if each["area"] and each["variant"] not in BASELINES]
        return {
            "policies": list(self._size.policies),
            "seeds": self._size.seeds,
            "steps": self._size.steps,
            "learning_rate": self._size.learning_rate,
            "objective": self._size.objective,
            "best": max(sharing, key=lambda each: each["area"]["value"])["variant"] if sharing else None,
            "variants": variants,
        }

    def _variant(self, variant: str) -> dict[str, Any]:
        results = self._results(variant)
        if results is None:
            return {"variant": variant, "area": None}
        areas = [area(result.curve) for result in results]
        report: dict[str, Any] = {
            "variant": variant,
            "area": asdict(mean(areas)),
            "final": asdict(mean([final(result.curve) for result in results])),
            "foreign_groups": fmean(result.foreign_groups for result in results),
            "kept": fmean(result.kept for result in results),
            "curve": mean_curve([result.curve for result in results]),
        }
        for baseline in BASELINES:
            theirs = self._results(baseline)
            report[f"against_{baseline}"] = (
                None if theirs is None else asdict(difference(areas, [area(each.curve) for each in theirs]))
            )
        return report

    def _results(self, variant: str) -> list[SwarmResult] | None:
        """By seed; None unless all runs are there."""
        if variant not in self._size.variants:
            return None
        results = [self._ledger.get(self._swarm(variant, seed)) for seed in range(self._size.seeds)]
        return [each for each in results if each is not None] if None not in results else None

    def _swarm(self, variant: str, seed: int) -> Swarm:
        return Swarm(
            variant=variant,
            seed=seed,
            learning_rate=self._size.learning_rate,
            steps=self._size.steps,
            objective=self._size.objective,
            policies=self._size.policies,
        )
