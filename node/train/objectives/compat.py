"""`compat`: a sequence-level weight for rollouts of other models; the default where no prompt is shared.

c = sg(min(1, s)), s = exp((log pi_old(y) - log mu(y)) / T), L_t = -c min(r A, clip(r, 1 - clip_low, 1 +
clip_high) A) with r = pi / pi_old, so that r = 1 at ingestion and the gradient is -c A grad log pi. Text the
receiver would hardly write counts little, and no foreign text counts more than once. Advantages are those of
the sender's own group. Source: ours, on HACPO's s (arXiv 2603.02604). Evidence: RECONSTRUCTED, measured in
small paired trials. Inputs: the author's log mu of the whole completion; no token-level mu. Defaults: clip
0.2 / 0.2, token mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.control import clipped_surrogate
from node.train.objectives.ratio import masked, sequence_log_ratio, token_log_ratio

__all__ = ["Compat"]


@dataclass(frozen=True)
class Compat:
    """Settings of the objective `compat`."""

    name: ClassVar[str] = "compat"
    needs_token_behaviour: ClassVar[bool] = False

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        with torch.no_grad():
            weights_B = (
                sequence_log_ratio(inputs.ingestion_BT, inputs.behaviour_sum_B, mask_BT).exp().clamp(max=1.0)
            )
            gap_B = sequence_log_ratio(inputs.logprobs_BT, inputs.behaviour_sum_B, mask_BT)
        ratio_BT = token_log_ratio(inputs.logprobs_BT, inputs.ingestion_BT, mask_BT).exp()
        surrogate_BT, kept_BT = clipped_surrogate(
            ratio_BT, inputs.advantages_B, self.clip_low, self.clip_high
        )
        return TokenLoss(
            loss_BT=-masked(weights_B[:, None] * surrogate_BT, mask_BT),
            kept_BT=kept_BT & mask_BT,
            weights_BT=masked(weights_B[:, None].expand_as(ratio_BT), mask_BT),
            log_ratio_BT=masked(gap_B[:, None].expand_as(ratio_BT), mask_BT),
        )
