"""PPO's clip with group advantages: the plain GRPO objective, run asynchronously.

L_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / q. With `denominator` "behaviour", q = mu:
the engine's log-probabilities stand in for pi_old, so one ratio covers engine mismatch and lag. With
"ingestion", q = pi_old, which ignores both on first use. Source: PPO arXiv 1707.06347, GRPO arXiv 2402.03300;
the bypass pi_old := mu as in verl. Evidence: EXACT. Defaults: 0.2 / 0.2, token mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, TokenLoss
from node.train.objectives.control import clipped_surrogate
from node.train.objectives.ratio import masked, token_log_ratio

__all__ = ["PpoClip"]


@dataclass(frozen=True)
class PpoClip:
    """Settings of the objective `ppo_clip`."""

    name: ClassVar[str] = "ppo_clip"
    needs_token_behaviour: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    denominator: Literal["behaviour", "ingestion"] = "behaviour"
    aggregation: Aggregation = Aggregation.TOKEN_MEAN

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        mask_BT = inputs.mask_BT
        reference_BT = inputs.behaviour_BT if self.denominator == "behaviour" else inputs.ingestion_BT
        ratio_BT = token_log_ratio(inputs.logprobs_BT, reference_BT, mask_BT).exp()
        surrogate_BT, kept_BT = clipped_surrogate(
            ratio_BT, inputs.advantages_B, self.clip_low, self.clip_high
        )
        return TokenLoss(
            loss_BT=-masked(surrogate_BT, mask_BT),
            kept_BT=kept_BT & mask_BT,
            weights_BT=masked(ratio_BT.detach(), mask_BT),
            log_ratio_BT=token_log_ratio(inputs.logprobs_BT, inputs.behaviour_BT, mask_BT).detach(),
        )
