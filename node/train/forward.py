"""From rows of tokens to log-probabilities of the chosen ones: one pass of a model, and how rows share it.

For: the trainer's passes, with and without gradient. The logits of the positions that can predict a
completion's token are kept once, in the model's own type; log-probabilities, entropies and, on the way back,
gradients are made of them some tokens at a time, so that no second tensor of their size is kept, and none in
float32 where the model is not. Padding costs nothing here. Long rows come together (`packed`), so that little
is padded. Not for engines. Letters: B rollouts, L prompt + completion (right-padded), T completion, K
positions that predict, N tokens of completions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["completion_logprobs", "packed"]

CHUNK_VALUES = 2**23
"""Float32 values in work at once: 32 MiB, a few hundred tokens of a large vocabulary."""


def completion_logprobs(
    model: torch.nn.Module, tokens_BL: Tensor, starts_B: Tensor, mask_BT: Tensor, temperature_B: Tensor
) -> tuple[Tensor, Tensor]:
    """log pi of each token of the completions, and the entropy, in nats and without gradient, of what it was
    chosen from; both 0 where masked.

    Right padding needs no attention mask: a causal model cannot look at what comes later. Nothing here is
    given a name that need not live: the logits are the largest tensor of a step.
    """
    shortest = int(starts_B.min())
    rows_N, places_N = mask_BT.nonzero(as_tuple=True)
    targets_N = tokens_BL[rows_N, starts_B[rows_N] + places_N]
    logprobs_N, entropy_N = _Chosen.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        model(input_ids=tokens_BL, use_cache=False, logits_to_keep=tokens_BL.shape[1] - shortest + 1).logits,
        rows_N,
        starts_B[rows_N] - shortest + places_N,
        targets_N,
        temperature_B[rows_N],
    )
    zeros_BT = torch.zeros(mask_BT.shape, dtype=logprobs_N.dtype, device=mask_BT.device)
    return (
        zeros_BT.index_put((rows_N, places_N), logprobs_N),
        zeros_BT.index_put((rows_N, places_N), entropy_N),
    )


class _Chosen(torch.autograd.Function):
    """log p of chosen tokens under softmax(logits / temperature), and its entropy.

    d log p_target / d logits = (onehot - p) / temperature. In float32, or float64 for such logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_BKV: Tensor,
        rows_N: Tensor,
        places_N: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(logits_BKV.dtype, torch.float32)
        norm_N, logprobs_N, entropy_N = (
            torch.empty(len(rows_N), dtype=precise, device=logits_BKV.device) for _ in range(3)
        )
        for part in _chunks(len(rows_N), logits_BKV.shape[-1]):
            logprobs_CV = _scaled(logits_BKV, rows_N[part], places_N[part], temperature_N[part])
            norm_N[part] = logprobs_CV.logsumexp(-1)
            logprobs_CV.sub_(norm_N[part, None])
            logprobs_N[part] = logprobs_CV.gather(-1, targets_N[part, None])[:, 0]
            entropy_N[part] = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)
        ctx.save_for_backward(logits_BKV, rows_N, places_N, targets_N, temperature_N, norm_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits_BKV, rows_N, places_N, targets_N, temperature_N, norm_N = ctx.saved_tensors
        gradient_BKV = torch.zeros_like(logits_BKV)
        for part in _chunks(len(rows_N), logits_BKV.shape[-1]):
            logits_CV = _scaled(logits_BKV, rows_N[part], places_N[part], temperature_N[part])
            per_logit_C = gradient_N[part] / temperature_N[part]
            gradient_CV = logits_CV.sub_(norm_N[part, None]).exp_().mul_(-per_logit_C[:, None])
            gradient_CV.scatter_add_(-1, targets_N[part, None], per_logit_C[:, None])
            # Each position predicts one token, so nothing is written twice.
            gradient_BKV[rows_N[part], places_N[part]] = gradient_CV.to(gradient_BKV.dtype)
        return gradient_BKV, None, None, None, None


def _scaled(logits_BKV: Tensor, rows_C: Tensor, places_C: Tensor, temperature_C: Tensor) -> Tensor:
    """A copy of some tokens' logits over the temperature, in at least float32."""
    logits_CV = logits_BKV[rows_C, places_C]
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature_C[:, None])


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    """Some tokens at a time."""
    size = max(1, CHUNK_VALUES // vocabulary)
    for first in range(0, count, size):
        yield slice(first, first + size)


def packed(lengths: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Row indexes, long rows together, with at most `budget_tokens` padded tokens (at least one row)."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        if rows and (len(rows) + 1) * lengths[rows[0]] > budget_tokens:
            yield sorted(rows)
            rows = []
        rows.append(row)
    if rows:
        yield sorted(rows)
