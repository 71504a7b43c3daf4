"""HACPO's cross-agent term: what one agent learns from another's rollouts on the same prompt.

s = exp((log pi(y) - log mu(y)) / T); J = clip(s, 1 - delta + u delta_step, 1) sg(min(s, 1))^alpha A, a plain
product without min(), L = -J, one value per rollout. u = optimiser updates already made with this rollout.
The upper bound is exactly 1: foreign rollouts are only ever weighted down, and those with s > 1, as those
below the lower bound, carry no gradient (`kept`). A includes omega(j, k), see
`node.weight.advantage.capability_aware`.

Source: arXiv 2603.02604, `zzx-peter/hacrl`. Evidence: EXACT; the paper is inconsistent about delta (0.8 in
the appendix, 0.2 with discarding in section 3.4): `discard_below` chooses between clipping and discarding,
which differ in the reported loss only. Defaults: alpha 1, delta 0.8, delta_step 0.025, mean over rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.ratio import masked, sequence_log_ratio

__all__ = ["Hacpo"]

ROUNDING = 1e-4
"""Nats per token by which two computations of the same log-probability may differ: s = 1 then, not above it.
"""


@dataclass(frozen=True)
class Hacpo:
    """Settings of the objective `hacpo`."""

    name: ClassVar[str] = "hacpo"
    needs_token_behaviour: ClassVar[bool] = False

    alpha: float = 1.0
    delta: float = 0.8
    delta_step: float = 0.025
    discard_below: bool = False
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        log_ratio_B = sequence_log_ratio(inputs.logprobs_BT, inputs.behaviour_sum_B, mask_BT)
        ratio_B = log_ratio_B.exp()
        lower_B = (1.0 - self.delta + inputs.uses_B * self.delta_step).clamp(max=1.0)
        with torch.no_grad():
            kept_B = (ratio_B >= lower_B) & (log_ratio_B <= ROUNDING)
            sharpened_B = ratio_B.clamp(max=1.0) ** self.alpha
            if self.discard_below:
                sharpened_B = torch.where(ratio_B < lower_B, 0.0, sharpened_B)
        clipped_B = torch.minimum(torch.maximum(ratio_B, lower_B), torch.ones_like(ratio_B))
        clipped_B = torch.where(kept_B, ratio_B, clipped_B.detach())
        value_BT = (clipped_B * sharpened_B * inputs.advantages_B)[:, None].expand_as(mask_BT)
        weights_B = (clipped_B * sharpened_B).detach()
        return TokenLoss(
            loss_BT=-masked(value_BT, mask_BT),
            kept_BT=kept_B[:, None] & mask_BT,
            weights_BT=masked(weights_B[:, None].expand_as(inputs.logprobs_BT), mask_BT),
            log_ratio_BT=masked(log_ratio_B.detach()[:, None].expand_as(inputs.logprobs_BT), mask_BT),
        )
