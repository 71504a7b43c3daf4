"""GRAFT: a peer's mixed group replaces the receiver's all-failed group on the same prompt.

L_t = -c A clip(r, clip_low, clip_high), r = pi / pi_old, A the *source* group's advantages (rewards are never
pooled across models). Compatibility c = clip((l - lo) / (hi - lo), 0, 1): l is the receiver's mean
log-probability per token of the text at ingestion, lo and hi are quantiles of the same number over its own
rollouts. Without own rollouts to compare with, c = 0. The gate (own failed, peer mixed) is
`node.train.groups.choose_treatment`.

Source: arXiv 2609.37868 from a short summary; no public code. Evidence: RECONSTRUCTED; quantiles are ours,
the token clip [0.2, 5] comes from a third party. Inputs: no mu. Defaults: quantiles 0.05 / 0.5, token mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.ratio import masked, masked_sum, sequence_log_ratio, token_log_ratio

__all__ = ["Graft"]


@dataclass(frozen=True)
class Graft:
    """Settings of the objective `graft`."""

    name: ClassVar[str] = "graft"
    needs_token_behaviour: ClassVar[bool] = False

    clip_low: float = 0.2
    clip_high: float = 5.0
    quantile_low: float = 0.05
    quantile_high: float = 0.5
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        weights_B = self.compatibility(inputs.ingestion_BT, inputs.own_mean_logprobs_N, mask_BT)
        ratio_BT = token_log_ratio(inputs.logprobs_BT, inputs.ingestion_BT, mask_BT).exp()
        clipped_BT = ratio_BT.clamp(self.clip_low, self.clip_high)
        kept_BT = (
            mask_BT & (ratio_BT >= self.clip_low) & (ratio_BT <= self.clip_high) & (weights_B > 0)[:, None]
        )
        gap_B = sequence_log_ratio(inputs.logprobs_BT.detach(), inputs.behaviour_sum_B, mask_BT)
        return TokenLoss(
            loss_BT=-masked((weights_B * inputs.advantages_B)[:, None] * clipped_BT, mask_BT),
            kept_BT=kept_BT,
            weights_BT=masked(weights_B[:, None].expand_as(ratio_BT), mask_BT),
            log_ratio_BT=masked(gap_B[:, None].expand_as(ratio_BT), mask_BT),
        )

    @torch.no_grad()
    def compatibility(self, ingestion_BT: Tensor, own_mean_logprobs_N: Tensor, mask_BT: Tensor) -> Tensor:
        """c of each row, without gradient."""
        likely_B = masked_sum(ingestion_BT, mask_BT) / mask_BT.sum(-1).clamp(min=1)
        if own_mean_logprobs_N.numel() == 0:
            return torch.zeros_like(likely_B)
        low = torch.quantile(own_mean_logprobs_N, self.quantile_low)
        high = torch.quantile(own_mean_logprobs_N, self.quantile_high)
        return ((likely_B - low) / (high - low).clamp(min=1e-6)).clamp(0.0, 1.0)
