"""The staleness lab as a whole: its sizes and its report.

`lags` (see `lags.py`), of each preset and lag: `area` under the held-out curve (the headline), `final`,
`collapsed` (runs that ended below their start or below half of their best), `retained` (area over that at lag
0), `against_fresh` and `against_baseline` (paired differences), `kept`, `ess` and `gap` (means over steps).
`verdict`: the product's default against no correction at the largest lag that has a bar. `swarm` (see
`mixtures.py`), of each variant: `area`, `final`, `foreign_groups` per step, and the paired differences from
both baselines. Intervals are 95 % over seeds (`analysis.py`). `other_code`: runs that other sources made.

Finished runs are kept (`ledger.py`); another cut of presets, lags or seeds makes only what is missing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_cli.bench.measure import Say, envelope
from swarm_cli.bench.staleness.lagged import LAGGED
from swarm_cli.bench.staleness.lags import Lags, LagSize
from swarm_cli.bench.staleness.ledger import Ledger
from swarm_cli.bench.staleness.mixtures import Mixtures, MixtureSize
from swarm_cli.bench.staleness.objective import open_method
from swarm_cli.bench.staleness.swarm import SWARM, VARIANTS
from swarm_cli.bench.staleness.workers import Crew
from swarm_cli.demo.processes import signals_interrupt

__all__ = ["FULL", "QUICK", "Size", "bench_staleness"]


@dataclass(frozen=True)
class Size:
    """What is measured. None: not."""

    lags: LagSize | None
    swarm: MixtureSize | None


FULL = Size(
    LagSize(
        presets=(
            "topr",
            "uncorrected",
            "grpo",
            "dppo_tv",
            "tis",
            "a3po",
            "cispo",
            "ais",
            "vcpo+ess",
            "icepop",
            "m2po_mask",
            "vespo",
        ),
        lags=((0,), (1,), (16,), (64,), (256,)),
        seeds=5,
        steps=256,
        learning_rates=(1e-4, 2e-4, 4e-4),
        tuning_lags=((0,), (64,)),
        tuning_seeds=2,
    ),
    MixtureSize(variants=tuple(VARIANTS), seeds=5, steps=256, learning_rate=1e-4),
)
QUICK = Size(
    LagSize(
        presets=("topr", "uncorrected"),
        lags=((0,), (16,)),
        seeds=2,
        steps=48,
        learning_rates=(1e-4,),
        tuning_lags=(),
        tuning_seeds=0,
    ),
    MixtureSize(variants=("solo_4", "compat"), seeds=2, steps=24, learning_rate=1e-4),
)
"""Shows that all of it runs; its numbers mean little."""


def bench_staleness(size: Size, ledger_path: Path, say: Say) -> dict[str, Any]:
    """The report. Raises ConfigError for an unknown preset, OurFault when a process dies."""
    for preset in size.lags.presets if size.lags else ():
        open_method(preset)
    began_s = time.monotonic()
    results: dict[str, Any] = {"lags": None, "swarm": None}
    with signals_interrupt(), Crew(len(os.sched_getaffinity(0)), (LAGGED, SWARM), say) as crew:
        if size.lags is not None:
            lags = Lags(size.lags, Ledger(ledger_path, LAGGED))
            lags.run(crew)
            results["lags"] = lags.report()
        if size.swarm is not None:
            mixtures = Mixtures(size.swarm, Ledger(ledger_path, SWARM))
            mixtures.run(crew)
            results["swarm"] = mixtures.report()
    results["made"], results["reused"] = crew.finished.made, crew.finished.reused
    results["failures"] = crew.finished.failures
    results["wall_s"] = time.monotonic() - began_s
    return envelope("staleness", results)
