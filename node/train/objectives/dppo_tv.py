"""DPPO with a total-variation mask, anchored at the behaviour policy: the default for own data.

rho = pi / mu, D = pi - mu in probability. A token is dropped if (A > 0 and D > delta_high) or (A < 0 and D <
-delta_low), else L_t = -sg(min(rho, cap)) A log pi. Dropped tokens stay in the denominator. Source: arXiv
2602.04879 and verl's `dppo_tv`. Evidence: EXACT. Inputs: log mu of each token. Defaults: 0.2 / 0.2, cap 20,
token mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.control import total_variation_keep, truncated
from node.train.objectives.ratio import masked, token_log_ratio

__all__ = ["DppoTv"]


@dataclass(frozen=True)
class DppoTv:
    """Settings of the objective `dppo_tv`."""

    name: ClassVar[str] = "dppo_tv"
    needs_token_behaviour: ClassVar[bool] = True

    delta_low: float = 0.2
    delta_high: float = 0.2
    cap: float = 20.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        logprobs_BT = masked(inputs.logprobs_BT, mask_BT)
        log_ratio_BT = token_log_ratio(inputs.logprobs_BT, inputs.behaviour_BT, mask_BT).detach()
        ratio_BT = log_ratio_BT.exp()
        kept_BT = mask_BT & total_variation_keep(
            logprobs_BT.detach().exp(),
            masked(inputs.behaviour_BT, mask_BT).exp(),
            inputs.advantages_B,
            self.delta_low,
            self.delta_high,
        )
        factor_BT = masked(truncated(ratio_BT, self.cap) * inputs.advantages_B[:, None], kept_BT)
        return TokenLoss(
            loss_BT=-factor_BT * logprobs_BT,
            kept_BT=kept_BT,
            weights_BT=masked(ratio_BT, mask_BT),
            log_ratio_BT=log_ratio_BT,
        )
