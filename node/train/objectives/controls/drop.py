"""Drops: tokens or rollouts that are left out altogether, value and gradient.

    Band              a ratio, or a divergence k2 or k3 of one, must lie within bounds: IcePop, MIS, DIS,
                      vetoes; for negative advantages only: OPSM, trust bands
    TotalVariation    DPPO: probability moved by more than delta in the direction of the advantage
    BinaryKl          DPPO: binary KL above delta in the direction of the advantage
    SecondMomentMask  M2PO as published: the largest log(r)^2 of harmful tokens, until the rest is in budget
    SuffixVeto        Mu-GRPO: for A < 0, what follows the first token with r < 1 - relax

Whether dropped tokens leave the denominator is the objective's choice (`Objective.kept_only`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import Level, Ratio, logprobs, reduced

__all__ = ["Band", "BinaryKl", "Metric", "SecondMomentMask", "SuffixVeto", "TotalVariation"]


class Metric(StrEnum):
    """What a band bounds, l being the log ratio of a token."""

    RATIO = "ratio"
    """The ratio at its level."""
    K2 = "k2"
    """l^2 / 2, reduced to the level."""
    K3 = "k3"
    """exp(l) - 1 - l, reduced to the level."""


@dataclass(frozen=True)
class Band(Control):
    """Keeps what lies within [low, high]."""

    of: Ratio
    low: float = 0.0
    high: float = math.inf
    metric: Metric = Metric.RATIO
    negative_only: bool = False
    """Rollouts with A >= 0 pass in any case."""

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        values_BT = self._values(draft)
        kept_BT = (values_BT >= self.low) & (values_BT <= self.high)
        return draft.only(kept_BT | (draft.advantages_BT >= 0) if self.negative_only else kept_BT)

    def _values(self, draft: Draft) -> Tensor:
        if self.metric is Metric.RATIO:
            return self.of.value(draft.inputs)
        log_BT = Ratio(self.of.over, self.of.of, Level.TOKEN).log(draft.inputs)
        k_BT = log_BT**2 / 2 if self.metric is Metric.K2 else log_BT.expm1() - log_BT
        return reduced(self.of.level, k_BT, draft.mask_BT)


@dataclass(frozen=True)
class TotalVariation(Control):
    """D = pi - q, q the denominator of `of`: dropped if A > 0 and D > high, or A < 0 and D < -low."""

    of: Ratio
    low: float = 0.2
    high: float = 0.2

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        now_BT, then_BT = _probabilities(draft, self.of)
        moved_BT = now_BT - then_BT
        return draft.only(~_ahead(draft, moved_BT > self.high, moved_BT < -self.low))


@dataclass(frozen=True)
class BinaryKl(Control):
    """D = q log(q / pi) + (1 - q) log((1 - q) / (1 - pi)): dropped if A > 0, pi > q and D > high, or A < 0,
    pi < q and D > low."""

    of: Ratio
    low: float = 0.05
    high: float = 0.05

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        now_BT, then_BT = (each.clamp(1e-7, 1.0 - 1e-7) for each in _probabilities(draft, self.of))
        divergence_BT = (
            then_BT * (then_BT / now_BT).log() + (1.0 - then_BT) * ((1.0 - then_BT) / (1.0 - now_BT)).log()
        )
        up_BT = (now_BT > then_BT) & (divergence_BT > self.high)
        down_BT = (now_BT < then_BT) & (divergence_BT > self.low)
        return draft.only(~_ahead(draft, up_BT, down_BT))


@dataclass(frozen=True)
class SecondMomentMask(Control):
    """The statistic lies midway between the largest log(r)^2 that stays and the smallest that goes; equal
    ones go together."""

    whole_batch: ClassVar[bool] = True

    budget: float = 0.04

    def measure(self, draft: Draft) -> Tensor:
        squares_N = (draft.log_ratio_BT[draft.harmful()] ** 2).sort().values
        counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
        over_N = squares_N[squares_N.cumsum(0) / counts_N > self.budget]
        if not len(over_N):
            return draft.log_ratio_BT.new_full((), math.inf)
        within_N = squares_N[squares_N < over_N[0]]
        return (over_N[0] + (within_N[-1] if len(within_N) else 0.0)) / 2

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        return draft.only(~(draft.harmful() & (draft.log_ratio_BT**2 > statistic)))


@dataclass(frozen=True)
class SuffixVeto(Control):
    """The trigger itself stays."""

    relax: float

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        triggers_BT = (draft.ratio_BT < 1.0 - self.relax) & draft.mask_BT & (draft.advantages_BT < 0)
        before_BT = triggers_BT.cumsum(-1) - triggers_BT.long()
        return draft.only(before_BT == 0)


def _probabilities(draft: Draft, of: Ratio) -> tuple[Tensor, Tensor]:
    """Of the two policies that `of` compares."""
    return logprobs(of.of, draft.inputs).exp(), logprobs(of.over, draft.inputs).exp()


def _ahead(draft: Draft, up_BT: Tensor, down_BT: Tensor) -> Tensor:
    """Up where the advantage is positive, down where it is negative."""
    return ((draft.advantages_BT > 0) & up_BT) | ((draft.advantages_BT < 0) & down_BT)
