"""Clips: no gradient where the policy has already moved beyond a bound in the direction of the advantage.

    Clip              min(r A, clip(r, 1 - low, 1 + high) A), PPO (1707.06347); dual: A < 0 not below dual A
    SecondMomentClip  M2PO's repository: bounds exp(-+tau) that keep the second moment within a budget
    AdaptiveRegion    SAT: bounds that close in on tokens whose ratio is unusually far from one
    Clamp             clip(r, low, high) A without the minimum, GRAFT

A clipped token keeps its value and its place in the denominator, and has no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import ROUNDING

__all__ = ["AdaptiveRegion", "Clamp", "Clip", "SecondMomentClip"]


@dataclass(frozen=True)
class Clip(Control):
    """PPO's clip, with a dual bound for negative advantages if one is given."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        return _clipped(draft, 1.0 - self.low, 1.0 + self.high, self.dual)


@dataclass(frozen=True)
class SecondMomentClip(Control):
    """tau is where the mean of min(log(r)^2, tau^2) over all harmful tokens is the budget. Bounds are
    [exp(-tau), exp(tau)], but never closer to one than the floors; with a mean of log(r)^2 within the budget
    there are none."""

    whole_batch: ClassVar[bool] = True

    budget: float = 0.04
    floor_low: float = 0.3
    floor_high: float = 0.5

    def measure(self, draft: Draft) -> Tensor:
        squares_N = (draft.log_ratio_BT[draft.harmful()] ** 2).sort().values
        count = len(squares_N)
        if count == 0 or float(squares_N.mean()) <= self.budget:
            return draft.log_ratio_BT.new_full((), math.inf)
        # With the k smallest below tau^2: their sum + (count - k) tau^2 = budget x count. The mean is concave
        # in tau^2, so the largest of these solutions is the one.
        smaller_N = squares_N.cumsum(0) - squares_N
        capped_N = torch.arange(count, 0, -1, device=squares_N.device)
        return ((self.budget * count - smaller_N) / capped_N).amax().sqrt()

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        low = (-statistic).exp().clamp(max=1.0 - self.floor_low)
        high = statistic.exp().clamp(min=1.0 + self.floor_high)
        return _clipped(draft, low, high)


@dataclass(frozen=True)
class AdaptiveRegion(Control):
    """x = |log r|, q its quantile: up to q PPO's clip, beyond it the width shrinks by q^2 / (q^2 + x^2) on
    the side where the ratio lies; `continuous` doubles that factor, so that it is one at q."""

    whole_batch: ClassVar[bool] = True

    low: float = 0.2
    high: float = 0.2
    quantile: float = 0.9
    continuous: bool = False

    def measure(self, draft: Draft) -> Tensor:
        distances_N = draft.log_ratio_BT[draft.mask_BT].abs()
        if distances_N.numel() == 0:
            return draft.log_ratio_BT.new_zeros(())
        return torch.quantile(distances_N, self.quantile)

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        distance_BT = draft.log_ratio_BT.abs()
        hill_BT = statistic**2 / (statistic**2 + distance_BT**2).clamp(min=1e-30)
        if self.continuous:
            hill_BT = 2.0 * hill_BT
        beyond_BT = (distance_BT > statistic + ROUNDING) & (statistic > 0)
        up_BT, down_BT = beyond_BT & (draft.log_ratio_BT > 0), beyond_BT & (draft.log_ratio_BT < 0)
        return _clipped(
            draft,
            1.0 - self.low * torch.where(down_BT, hill_BT, 1.0),
            1.0 + self.high * torch.where(up_BT, hill_BT, 1.0),
        )


@dataclass(frozen=True)
class Clamp(Control):
    """No gradient outside the bounds, whatever the sign of the advantage."""

    low: float
    high: float

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        inside_BT = (draft.ratio_BT >= self.low) & (draft.ratio_BT <= self.high)
        return draft.shaped(draft.ratio_BT.clamp(self.low, self.high) * draft.advantages_BT, inside_BT)


def _clipped(draft: Draft, low: Tensor | float, high: Tensor | float, dual: float | None = None) -> Draft:
    ratio_BT, advantages_BT = draft.ratio_BT, draft.advantages_BT
    low, high = (torch.as_tensor(each, dtype=ratio_BT.dtype, device=ratio_BT.device) for each in (low, high))
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(low, high) * advantages_BT)
    beyond_BT = ((advantages_BT > 0) & (ratio_BT > high)) | ((advantages_BT < 0) & (ratio_BT < low))
    if dual is not None:
        negative_BT = advantages_BT < 0
        surrogate_BT = torch.where(
            negative_BT, torch.maximum(surrogate_BT, dual * advantages_BT), surrogate_BT
        )
        beyond_BT = beyond_BT | (negative_BT & (ratio_BT > dual))
    return draft.shaped(surrogate_BT, ~beyond_BT)
