"""Truncated importance sampling: engine mismatch and lag as a capped weight beside PPO's clip.

L_t = -sg(min(w, cap)) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), w = pi_old / mu, r = pi / pi_old.
Source: Yao et al., as in verl, slime and TRL. Evidence: EXACT (token level: biased, low variance). Inputs:
log mu and log pi_old of each token; on first use pi_old is the detached pi, so r = 1. Defaults: cap 2, clip
0.2 / 0.2, token mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.control import clipped_surrogate, truncated
from node.train.objectives.ratio import masked, token_log_ratio

__all__ = ["Tis"]


@dataclass(frozen=True)
class Tis:
    """Settings of the objective `tis`."""

    name: ClassVar[str] = "tis"
    needs_token_behaviour: ClassVar[bool] = True

    cap: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        ratio_BT = token_log_ratio(inputs.logprobs_BT, inputs.ingestion_BT, mask_BT).exp()
        weights_BT = token_log_ratio(inputs.ingestion_BT, inputs.behaviour_BT, mask_BT).exp()
        surrogate_BT, kept_BT = clipped_surrogate(
            ratio_BT, inputs.advantages_B, self.clip_low, self.clip_high
        )
        return TokenLoss(
            loss_BT=-masked(truncated(weights_BT, self.cap) * surrogate_BT, mask_BT),
            kept_BT=kept_BT & mask_BT,
            weights_BT=masked(weights_BT.detach(), mask_BT),
            log_ratio_BT=token_log_ratio(inputs.logprobs_BT, inputs.behaviour_BT, mask_BT).detach(),
        )
