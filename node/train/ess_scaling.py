"""A learning rate that shrinks with the effective sample size of a step's rollouts (VCPO's step scaling).

    log pi and log mu --sequence_log_weights--> log W --ess_share--> ess --rate_factor--> x learning rate

W = exp(sum_t log pi - log mu) of a completion, nothing cut off; ess = (sum W)^2 / (B sum W^2), 1 when all
weigh alike and 1/B when one row carries the step. The learning rate is multiplied by sqrt(ess), as fits Adam.
It works on the step and not on the loss, so it goes with any objective.
Source: arXiv 2602.17616 and `mit-han-lab/vcpo`. Evidence: EXACT, but for one thing: a token's log ratio is
clamped to +-20, as everywhere here. The sum over a completion is not: the share does not change when all W
are multiplied by one number, so it is taken relative to the largest W and cannot overflow, while clamped sums
would make long rollouts look alike that are not. Not for rows of other policies: their W says how unlike the
models are and not how stale the data is. Letters: B rollouts, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from node.train.objectives.ratio import MAX_LOG_RATIO

__all__ = ["ess_share", "rate_factor", "sequence_log_weights"]


def rate_factor(ess: float) -> float:
    """What the learning rate of a step with this share is multiplied by."""
    return math.sqrt(min(1.0, ess))


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
