"""Weights: detached factors that correct for who sampled a token, or trust stale text less.

Truncate        clamp(w, low, high), TIS and every other capped correction; for A < 0 only: TOPR
Normalise       mean weight 1 over the batch (verl, slime)
Gamma           W^k exp(lambda (1 - W)), VESPO
AdaptiveMixing  1 + lambda (w - 1), lambda from reliability, severity and variance of w, AIS
Freshness       exp(-a mean|log pi - log mu| - b lag), f-OPD
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.base import MAX_CLAIM_FACTOR, Need, given
from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import Level, Ratio, reduced

__all__ = ["AdaptiveMixing", "Freshness", "Gamma", "Normalise", "Truncate"]


@dataclass(frozen=True)
class Truncate(Control):
    """The weight w is the value of `of`; what is reported is w before truncation, or after it if it is no
    correction but a judgement (`report_raw` off)."""

    of: Ratio
    low: float = 0.0
    high: float = math.inf
    negative_only: bool = False
    """Rollouts with A >= 0 weigh 1."""
    report_raw: bool = True

    @property
    def believes_claims(self) -> bool:
        """The ratio of a whole completion is bounded by this cap alone."""
        return self.of.level is Level.SEQUENCE and self.of.claimed and self.high > MAX_CLAIM_FACTOR

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        raw_BT = self.of.value(draft.inputs)
        if self.negative_only:
            raw_BT = torch.where(draft.advantages_BT < 0, raw_BT, 1.0)
        weight_BT = raw_BT.clamp(self.low, self.high)
        return draft.weighed(weight_BT, raw_BT if self.report_raw else weight_BT)


@dataclass(frozen=True)
class Normalise(Control):
    """Divides all weights by their mean over the batch's tokens that were not dropped."""

    whole_batch: ClassVar[bool] = True

    @property
    def believes_claims(self) -> bool:
        """What some rows claim moves the mean, and so all others."""
        return True

    def measure(self, draft: Draft) -> Tensor:
        weights_N = draft.weight_BT[draft.mask_BT & (draft.weight_BT > 0)]
        return weights_N.mean() if len(weights_N) else draft.weight_BT.new_ones(())

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        return draft.weighed(1.0 / statistic.expand_as(draft.weight_BT))


@dataclass(frozen=True)
class Gamma(Control):
    """1 at W = 1, and falling to 0 on both sides; other k and lambda for A < 0."""

    of: Ratio
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        log_BT = self.of.log(draft.inputs)
        ratio_BT = log_BT.exp()
        k_BT = draft.by_sign(self.k_positive, self.k_negative)
        lambda_BT = draft.by_sign(self.lambda_positive, self.lambda_negative)
        return draft.weighed((k_BT * log_BT + lambda_BT * (1.0 - ratio_BT)).exp(), ratio_BT)


@dataclass(frozen=True)
class AdaptiveMixing(Control):
    """lambda = clip(ess (1 - exp(-k3 / kappa)) / max(1, Var(w A) / Var(A)), 0, 1) over the tokens of the
    batch; k3 is the mean of w - 1 - log w."""

    whole_batch: ClassVar[bool] = True

    of: Ratio
    kappa: float = 0.01

    def measure(self, draft: Draft) -> Tensor:
        log_N = self.of.log(draft.inputs)[draft.mask_BT]
        weights_N, advantages_N = log_N.exp(), draft.advantages_BT[draft.mask_BT]
        if len(log_N) < 2:
            return weights_N.new_zeros(())
        ess = weights_N.sum() ** 2 / (len(weights_N) * (weights_N**2).sum()).clamp(min=1e-30)
        severity = 1.0 - (-(weights_N - 1.0 - log_N).mean() / self.kappa).exp()
        plain = advantages_N.var()
        inflation = (weights_N * advantages_N).var() / plain if plain > 0 else plain.new_ones(())
        return (ess * severity / inflation.clamp(min=1.0)).clamp(0.0, 1.0)

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        weights_BT = self.of.value(draft.inputs)
        return draft.weighed(1.0 + statistic * (weights_BT - 1.0), weights_BT)


@dataclass(frozen=True)
class Freshness(Control):
    """One factor for a rollout, from its mean distance and its mean lag."""

    also_needs: ClassVar[frozenset[Need]] = frozenset({Need.VERSIONS})

    of: Ratio
    decay: float = 1.0
    lag_decay: float = 0.1

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        lags_BT = given(draft.inputs.lags_BT, Need.VERSIONS)
        age_BT = self.decay * self.of.log(draft.inputs).abs() + self.lag_decay * lags_BT
        fresh_BT = (-reduced(Level.SEQUENCE_MEAN, age_BT, draft.mask_BT)).exp()
        return draft.weighed(fresh_BT, fresh_BT)
