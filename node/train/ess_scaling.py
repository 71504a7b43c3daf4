"""A learning rate that shrinks with the effective sample size of a step's rollouts (VCPO's step scaling).

    log pi and log mu --sequence_log_weights--> log W --ess_share--> ess --factor--> x learning rate

W = exp(sum_t log pi - log mu) of a completion, nothing cut off; ess = (sum W)^2 / (B sum W^2), 1 when all
weigh alike and 1/B when one row carries the step. The learning rate is multiplied by sqrt(min(1, ess/base)),
as fits Adam, or by min(1, ess/base). It works on the step and not on the loss, so it goes with any objective.
Source: arXiv 2602.17616 and `mit-han-lab/vcpo`. Evidence: EXACT, but for one thing: a token's log ratio is
clamped to +-20, as everywhere here. The sum over a completion is not: the share does not change when all W
are multiplied by one number, so it is taken relative to the largest W and cannot overflow, while clamped sums
would make long rollouts look alike that are not. Not for rows of other policies: their W says how unlike the
models are and not how stale the data is. Letters: B rollouts, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from node.train.objectives.ratio import MAX_LOG_RATIO
from protocol.errors import ConfigError

__all__ = ["EssScaling", "ess_share", "sequence_log_weights"]


@dataclass(frozen=True)
class EssScaling:
    """Settings of the scaling. Raises ConfigError."""

    base: float = 1.0
    """Shares of at least this leave the learning rate as it is."""
    rule: Literal["sqrt", "linear"] = "sqrt"

    def __post_init__(self) -> None:
        if not 0.0 < self.base <= 1.0:
            raise ConfigError(
                f"the base of the ESS scaling is {self.base:g}; it is a share above 0 and at most 1"
            )
        if self.rule not in ("sqrt", "linear"):
            raise ConfigError(
                f"the rule of the ESS scaling is {self.rule!r}; choose 'sqrt' (for Adam) or 'linear'"
            )

    def factor(self, ess: float) -> float:
        """What the learning rate of a step with this share is multiplied by."""
        scale = min(1.0, ess / self.base)
        return math.sqrt(scale) if self.rule == "sqrt" else scale


@torch.no_grad()
def sequence_log_weights(logprobs_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log W of each row that has a token, in double precision; NaN where a number of the row is none. Masked
    places may hold anything."""
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - behaviour_BT, 0.0)
    sums_B = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double().sum(-1)
    return sums_B[mask_BT.any(-1)]


def ess_share(log_weights_B: Tensor) -> float:
    """(sum W)^2 / (B sum W^2) of the finite ones; 1 without any, for then nothing is out of balance."""
    kept_B = log_weights_B[log_weights_B.isfinite()].double()
    if not len(kept_B):
        return 1.0
    weights_B = (kept_B - kept_B.max()).exp()
    return float(weights_B.sum() ** 2 / (len(kept_B) * (weights_B**2).sum()))
