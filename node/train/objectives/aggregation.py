"""Aggregation: what a source's sum of token losses is divided by.

token_mean: sum over all tokens / number of tokens (DAPO, arXiv 2503.14476). seq_mean_token_mean: mean inside
each rollout, then over rollouts (GRPO, GSPO). seq_mean_token_sum_norm: sum / (rollouts x constant length)
(Dr.GRPO, arXiv 2503.20783). Evidence: EXACT. Denominators count every token and rollout of the *source* in
the whole batch, dropped ones included, so they are known before the first micro-batch and gradients add up
exactly.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Aggregation", "row_scale"]


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"  # noqa: S105
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"  # noqa: S105
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
    return 1.0 / (source_rows * norm_tokens)
