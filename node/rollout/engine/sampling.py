"""One token per row from logits: temperature, nucleus, inverse transform sampling.

For: `transformers.py`; pure tensors in and out, so that what a log-probability means stands in one place: the
natural logarithm of the probability with which the token was drawn, after temperature and top-p. A row's draw
is one uniform number, hence independent of which other rows are in the batch. Greedy rows report the
probability at their temperature. Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nucleus", "sample_tokens"]


def sample_tokens(
    logits_RV: Tensor,
    uniforms_R: Tensor,
    temperature_R: Tensor,
    top_p_R: Tensor | None,
    *,
    greedy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities. `uniforms_R` are float64 in [0, 1); `top_p_R` None means no cut.

    A row whose logits hold NaN or +inf gets a NaN log-probability; the caller refuses it.
    """
    logprobs_RV = torch.log_softmax(logits_RV.float() / temperature_R[:, None], dim=-1)
    if greedy:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        if top_p_R is not None:
            logprobs_RV = nucleus(logprobs_RV, top_p_R)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        thresholds_R = uniforms_R * cumulative_RV[:, -1]
        tokens_R = (cumulative_RV <= thresholds_R[:, None]).sum(-1).clamp_(max=logits_RV.shape[-1] - 1)
    logprobs_R = logprobs_RV.gather(-1, tokens_R[:, None]).squeeze(-1)
    return tokens_R, torch.where(logprobs_RV.amax(-1).isfinite(), logprobs_R, torch.nan)


def nucleus(logprobs_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Log-probabilities over the smallest set of likeliest tokens whose mass reaches top-p, renormalised."""
    sorted_RV, order_RV = logprobs_RV.sort(-1, descending=True)
    probs_RV = sorted_RV.exp()
    mass_before_RV = probs_RV.cumsum(-1) - probs_RV
    # Rounding may reach a mass of 1 before the last token: a row without a cut must not lose its tail.
    cut_RV = (mass_before_RV >= top_p_R[:, None]) & (top_p_R < 1)[:, None]
    cut_RV[:, 0] = False
    kept_RV = logprobs_RV.masked_fill(cut_RV.gather(-1, order_RV.argsort(-1)), -torch.inf)
    return torch.log_softmax(kept_RV, dim=-1)
