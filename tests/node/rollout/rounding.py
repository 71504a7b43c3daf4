"""How far two right ways to compute the same number may lie apart."""

from __future__ import annotations

import torch

__all__ = ["LOGPROB_NATS", "rounding"]


def rounding(summands: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative distance of two orders in which `summands` numbers of about 1 are added: every addition rounds
    by up to half an epsilon, errors add up like a random walk, and four times its spread never comes."""
    return float(4 * torch.finfo(dtype).eps * summands**0.5)


LOGPROB_NATS = rounding(2 * (32 + 16 + 128 + 128 + 32 + 32 + 64) + 32 + 46)
"""For a log-probability of the tiny policy: two layers (queries, scores, softmax, values, output, gate,
down), the output layer, and the vocabulary."""
