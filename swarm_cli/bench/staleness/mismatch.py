"""An engine that does not compute what the trainer computes: how its weights or its reports are off.

`bf16` and `int8` generate with rounded weights; int8 as weight-only quantisation does it, symmetric, one
scale for each row of a matrix, vectors left alone. `noise` generates exactly and reports log mu with an error
of `NOISE` nats on every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["NOISE", "Mismatch", "engine_weights", "reported"]

NOISE = 0.1
"""Standard deviation, nats."""


class Mismatch(StrEnum):
    """How the engine differs from the trainer."""

    NONE = "none"
    BF16 = "bf16"
    INT8 = "int8"
    NOISE = "noise"


def engine_weights(weights: Mapping[str, Tensor], mismatch: Mismatch) -> Mapping[str, Tensor]:
    """What the engine makes of the trainer's weights."""
    if mismatch is Mismatch.BF16:
        return {name: tensor.detach().bfloat16().float() for name, tensor in weights.items()}
    if mismatch is Mismatch.INT8:
        return {name: _eight_bits(tensor.detach()) for name, tensor in weights.items()}
    return weights


def reported(logprobs: NDArray[np.float32], mismatch: Mismatch, seed: tuple[int, ...]) -> NDArray[np.float32]:
    """The log-probabilities that the engine reports of its tokens; never above 0."""
    if mismatch is not Mismatch.NOISE:
        return logprobs
    noise = NOISE * np.random.default_rng(seed).standard_normal(logprobs.shape, dtype=np.float32)
    return np.minimum(logprobs + noise, 0.0).astype(np.float32)


def _eight_bits(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        return tensor
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127.0
    return (tensor / scale).round() * scale
