"""Control: what bounds an update or drops a token.

clipped_surrogate: min(r A, clip(r, 1-lo, 1+hi) A), PPO (arXiv 1707.06347); gradient vanishes where the policy
has already moved beyond the bound in the direction of the advantage. total_variation_keep: a token stays
unless its probability has moved by more than delta from the behaviour policy in the direction of the
advantage, DPPO (arXiv 2602.04879). truncated: min(w, C), detached, TIS. Evidence: EXACT. Advantages are
broadcast from rows to tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clipped_surrogate", "total_variation_keep", "truncated"]


def clipped_surrogate(
    ratio_BT: Tensor, advantages_B: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate (to be maximised) and a mask of the tokens whose gradient it keeps."""
    advantages_BT = advantages_B[:, None].expand_as(ratio_BT)
    surrogate_BT = torch.minimum(
        ratio_BT * advantages_BT, ratio_BT.clamp(1.0 - low, 1.0 + high) * advantages_BT
    )
    with torch.no_grad():
        beyond_BT = ((advantages_BT > 0) & (ratio_BT > 1.0 + high)) | (
            (advantages_BT < 0) & (ratio_BT < 1.0 - low)
        )
    return surrogate_BT, ~beyond_BT


def total_variation_keep(
    probs_BT: Tensor, behaviour_probs_BT: Tensor, advantages_B: Tensor, delta_low: float, delta_high: float
) -> Tensor:
    """False where D = pi - mu is above delta_high with A > 0, or below -delta_low with A < 0."""
    with torch.no_grad():
        moved_BT = probs_BT - behaviour_probs_BT
        advantages_BT = advantages_B[:, None]
        dropped_BT = ((advantages_BT > 0) & (moved_BT > delta_high)) | (
            (advantages_BT < 0) & (moved_BT < -delta_low)
        )
    return ~dropped_BT


def truncated(weights_BT: Tensor, cap: float) -> Tensor:
    """min(w, C) without gradient."""
    return weights_BT.detach().clamp(max=cap)
