"""For rollouts of other models: how much of them, and against what.

    AgentProduct     HACPO's clip(s) sg(min(s, 1))^alpha A, a product without minimum
    Usual            GRAFT's compatibility: how usual the receiver finds the text
    LengthBand       ERILS: only completions about as long as the own ones
    SourceAdvantage  ERILS: advantages from the statistics of each source

None of them needs log mu of single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.base import Need, given
from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import ROUNDING, Level, Reference, logprobs, reduced

__all__ = ["AgentProduct", "LengthBand", "SourceAdvantage", "Usual"]

EPSILON = 1e-6


@dataclass(frozen=True)
class AgentProduct(Control):
    """No gradient for s above 1, nor below 1 - delta + uses x delta_step; `discard_below` takes the value of
    the latter, too."""

    alpha: float = 1.0
    delta: float = 0.8
    delta_step: float = 0.025
    discard_below: bool = False

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        ratio_BT = draft.ratio_BT.detach()
        lower_B = (1.0 - self.delta + draft.inputs.uses_B * self.delta_step).clamp(max=1.0)
        inside_BT = (ratio_BT >= lower_B[:, None]) & (draft.log_ratio_BT <= ROUNDING)
        sharpened_BT = ratio_BT.clamp(max=1.0) ** self.alpha
        if self.discard_below:
            sharpened_BT = torch.where(ratio_BT < lower_B[:, None], 0.0, sharpened_BT)
        bounded_BT = torch.maximum(ratio_BT, lower_B[:, None]).clamp(max=1.0)
        clipped_BT = torch.where(inside_BT, draft.ratio_BT, bounded_BT)
        return draft.shaped(clipped_BT * draft.advantages_BT, inside_BT).weighed(
            sharpened_BT, clipped_BT.detach() * sharpened_BT
        )


@dataclass(frozen=True)
class Usual(Control):
    """c = clip((l - lo) / (hi - lo), 0, 1): l is the mean log pi_old of a rollout's tokens, lo and hi are
    quantiles of the own rollouts' mean log-probabilities. Without own rollouts c = 0."""

    also_needs: ClassVar[frozenset[Need]] = frozenset({Need.OWN_ROLLOUTS})

    quantile_low: float = 0.05
    quantile_high: float = 0.5

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        own_N = draft.inputs.own_mean_logprobs_N
        if own_N.numel() == 0:
            zeros_BT = torch.zeros_like(draft.weight_BT)
            return draft.weighed(zeros_BT, zeros_BT)
        low, high = torch.quantile(own_N, self.quantile_low), torch.quantile(own_N, self.quantile_high)
        old_BT = logprobs(Reference.INGESTION, draft.inputs)
        usual_BT = reduced(Level.SEQUENCE_MEAN, old_BT, draft.mask_BT)
        weight_BT = ((usual_BT - low) / (high - low).clamp(min=1e-6)).clamp(0.0, 1.0)
        return draft.weighed(weight_BT, weight_BT)


@dataclass(frozen=True)
class LengthBand(Control):
    """|tokens - median of the own rollouts' tokens| <= tolerance; without own rollouts none passes."""

    also_needs: ClassVar[frozenset[Need]] = frozenset({Need.OWN_ROLLOUTS})

    tolerance: float

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        own_N, tokens_B = draft.inputs.own_tokens_N, draft.mask_BT.sum(-1)
        if own_N is None or own_N.numel() == 0:
            return draft.only(torch.zeros_like(draft.mask_BT))
        fits_B = (tokens_B - torch.quantile(own_N.double(), 0.5)).abs() <= self.tolerance
        return draft.only(fits_B[:, None])


@dataclass(frozen=True)
class SourceAdvantage(Control):
    """A = (R - mean) / (std + 1e-6) over the rollouts of the same source, R - baseline where its rewards are
    all alike."""

    whole_batch: ClassVar[bool] = True
    also_needs: ClassVar[frozenset[Need]] = frozenset({Need.REWARDS})

    baseline: float = 0.5

    def measure(self, draft: Draft) -> Tensor:
        """Mean and std of each source, S x 2; std 0 where its rewards are all alike, or it has one
        rollout."""
        rewards_B, sources_B = given(draft.inputs.rewards_B, Need.REWARDS), draft.inputs.sources()
        present_B = draft.mask_BT.any(-1)
        found_S2 = rewards_B.new_zeros((int(sources_B.max()) + 1 if len(sources_B) else 0, 2))
        for source in range(len(found_S2)):
            rewards_N = rewards_B[present_B & (sources_B == source)]
            if len(rewards_N) > 1 and rewards_N.std() > EPSILON:
                found_S2[source] = torch.stack((rewards_N.mean(), rewards_N.std()))
        return found_S2

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        rewards_B = given(draft.inputs.rewards_B, Need.REWARDS)
        mean_B, std_B = statistic[draft.inputs.sources()].unbind(-1)
        standard_B = torch.where(
            std_B > 0, (rewards_B - mean_B) / (std_B + EPSILON), rewards_B - self.baseline
        )
        advantages_BT = standard_B[:, None].expand_as(draft.ratio_BT)
        return replace(draft, advantages_BT=advantages_BT, surrogate_BT=draft.ratio_BT * advantages_BT)
