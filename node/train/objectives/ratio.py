"""Ratio: log-probability ratios of tokens and of whole completions.

token: l_t = log pi_t - log q_t. sequence: log s = (log pi(y) - log q(y)) / T, length-normalised with one T,
the receiver's, for both sides (HACPO eq. 11 for one tokenizer; with two, dividing each side by its own length
would bias s by the ratio of token counts). Log ratios are clamped to +-20, so that no exponential overflows.
Evidence: EXACT (verl clamps likewise). Masked places give 0 and no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked", "masked_sum", "sequence_log_ratio", "token_log_ratio"]

MAX_LOG_RATIO = 20.0


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`values_BT` with 0 where masked, whatever stood there."""
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each row."""
    return masked(values_BT, mask_BT).sum(-1)


def token_log_ratio(logprobs_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """l_t per token."""
    return masked(logprobs_BT - reference_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(logprobs_BT: Tensor, reference_sum_B: Tensor, mask_BT: Tensor) -> Tensor:
    """log s per row."""
    tokens_B = mask_BT.sum(-1).clamp(min=1)
    log_ratio_B = (masked_sum(logprobs_BT, mask_BT) - reference_sum_B) / tokens_B
    return log_ratio_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
