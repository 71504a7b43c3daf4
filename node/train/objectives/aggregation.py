"""Aggregation: what a source's sum of token losses is divided by.

token_mean: sum over all tokens / number of tokens (DAPO, arXiv 2503.14476). seq_mean_token_mean: mean inside
each rollout, then over rollouts (GRPO, GSPO). seq_mean_token_sum: sum inside each rollout, then mean (LUSPO).
seq_mean_token_sum_norm: sum / (rollouts x constant length) (Dr.GRPO, arXiv 2503.20783). Evidence: EXACT.
Denominators count every token and rollout of the *source* in the whole batch, dropped ones included, so they
are known before the first micro-batch and gradients add up exactly. Where a method says that dropped tokens
leave the denominator, too, `rescale` makes up for them, from statistics over the whole batch: what is left of
a source's rows of one treatment then weighs as much as all of them did.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["Aggregation", "rescale", "row_rescale", "row_scale"]


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"  # noqa: S105
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"  # noqa: S105
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"  # noqa: S105
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"  # noqa: S105


def row_scale(
    aggregation: Aggregation, *, row_tokens: int, source_tokens: int, source_rows: int, norm_tokens: int
) -> float:
    """Factor of each token loss of one rollout, so that the source's loss is the plain sum of scaled token
    losses."""
    if aggregation is Aggregation.TOKEN_MEAN:
        return 1.0 / source_tokens
    if aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return 1.0 / (source_rows * row_tokens)
    if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM:
        return 1.0 / source_rows
    return 1.0 / (source_rows * norm_tokens)


def rescale(aggregation: Aggregation, mask_BT: Tensor, dropped_BT: Tensor, source_B: Tensor) -> Tensor:
    """Factor of all losses of each source, S of them, that takes dropped tokens, and rollouts without any
    other, out of its denominator. Of all rows of the batch."""
    tokens_B, kept_B = mask_BT.sum(-1), (mask_BT & ~dropped_BT).sum(-1)
    if aggregation is not Aggregation.TOKEN_MEAN:
        tokens_B, kept_B = tokens_B.clamp(max=1), kept_B.clamp(max=1)
    sources = int(source_B.max()) + 1 if len(source_B) else 1
    sums = torch.zeros((2, sources), dtype=torch.float64, device=mask_BT.device)
    sums[0].index_add_(0, source_B, tokens_B.double())
    sums[1].index_add_(0, source_B, kept_B.double())
    return sums[0] / sums[1].clamp(min=1.0)


def row_rescale(aggregation: Aggregation, mask_BT: Tensor, dropped_BT: Tensor) -> Tensor:
    """Factor of the losses of each row for the same end: known from the row itself."""
    if aggregation is not Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return torch.ones(len(mask_BT), dtype=torch.float64, device=mask_BT.device)
    return mask_BT.sum(-1).double() / (mask_BT & ~dropped_BT).sum(-1).clamp(min=1)
