"""Slow-fast updates (SFPO): look ahead on a batch, go back a part of the way, then step from there.

    theta_0 --K passes--> theta_K --> theta_0 + a (theta_K - theta_0) --one more pass--> the new weights

Each pass is an optimiser step over the whole batch. Later ones must measure their ratios against theta_0,
which the caller sees to. Moments are not repositioned. A rising entropy ends it: once the newest entropy lies
`THRESHOLD` standard deviations above the mean of the last `WINDOW` steps (itself among them), every later
step is a plain one, for good, also after a resume (`state`). An entropy that merely fluctuates does so in one
step of six, hence this is for the first steps of a run. Source: arXiv 2510.04072, `Urheen/SFPO` (README,
entropy rule in its `Code` tree). Evidence: EXACT: K = 3, a = 0.8, 30 steps, 1.0 deviations of the population.

Costs K + 1 passes a step, and one more copy of what learns (theta_0) while a step runs, where the reference
keeps two. The optimiser counts K + 1 updates, so a warm-up is over in fewer steps. All passes together are
one version: nobody may see the weights in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, pstdev
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

__all__ = ["Pass", "SlowFast", "SlowFastState"]


class Pass(Protocol):
    """What one optimiser step reports."""

    @property
    def skipped(self) -> bool:
        """Whether it left the weights as they were."""
        ...


Report = TypeVar("Report", bound=Pass)


PASSES = 3
"""K: passes before the weights go back."""
STEP = 0.8
"""a: how much of the way they keep."""
THRESHOLD = 1.0
WINDOW = 30


class SlowFastState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint has to hold, and a step that is taken back gives back."""

    on: bool = True
    entropies: tuple[float, ...] = ()
    """Of the last steps, oldest first, nats."""


class SlowFast:
    """Makes a step of passes, while it is on. `state` may be replaced by an earlier one."""

    def __init__(self) -> None:
        self.state = SlowFastState()

    def step(self, learning: Mapping[str, Tensor], once: Callable[[], Report]) -> list[Report]:
        """Reports of all passes, one when it is off. `once()` makes an optimiser step that changes
        `learning`, the tensors that learn, in place. A pass that is skipped is the last one; what was gained
        before it is kept as far as a step would keep it. With the first one skipped nothing has changed."""
        if not self.state.on:
            return [once()]
        start = {name: tensor.clone() for name, tensor in learning.items()}
        reports: list[Report] = []
        while len(reports) < PASSES and not (reports and reports[-1].skipped):
            reports.append(once())
        if reports[0].skipped:
            return reports
        with torch.no_grad():
            for name, tensor in learning.items():
                tensor.lerp_(start[name], 1.0 - STEP)
        if not reports[-1].skipped:
            reports.append(once())
        return reports

    def observe(self, entropy: float) -> bool:
        """Take note of the entropy (nats) that the last pass of a step met. True when that has ended it."""
        entropies = (*self.state.entropies, entropy)[-WINDOW:]
        on = self.state.on
        if on and len(entropies) == WINDOW:
            deviation = pstdev(entropies) + 1e-9
            on = (entropy - fmean(entropies)) / deviation < THRESHOLD
        ended = self.state.on and not on
        self.state = SlowFastState(on=on, entropies=entropies)
        return ended
