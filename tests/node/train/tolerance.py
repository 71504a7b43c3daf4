"""How far two computations of the same number may lie apart by rounding alone.

Processors add in different orders and widths (AVX2, AVX-512, AMX), so a limit that was read off one of them
is wrong on the next. Each of n additions rounds by at most eps/2, relative to what was added so far, and as
good as independently: together about sqrt(n) eps/2 (Higham and Mary, 2019). Two computations are then within
sqrt(n) eps of each other, times the magnitude of what is added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.rollout.policy import Policy

__all__ = ["near", "rounding", "same_gradients", "summands"]


def rounding(summands: int, magnitude: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference between two sums of so many terms of this magnitude."""
    return math.sqrt(summands) * torch.finfo(dtype).eps * magnitude


def summands(policy: Policy) -> int:
    """Additions on the longest way from a token to a log-probability: in each layer a norm, the query, the
    scores, their softmax, the mix of values, the output, a norm, up and down; then a norm, the logits and
    their softmax."""
    config = json.loads((policy.path / "config.json").read_text())
    hidden, inner, positions = (
        config[key] for key in ("hidden_size", "intermediate_size", "max_position_embeddings")
    )
    layer = 6 * hidden + inner + 2 * positions
    return int(config["num_hidden_layers"] * layer + 2 * hidden + policy.vocab_size)


def near(expected: Any, policy: Policy) -> Any:
    """Log-probabilities, or means of them, by another pass of the same model."""
    values = torch.as_tensor(np.asarray(expected))
    return pytest.approx(expected, abs=rounding(summands(policy), max(1.0, float(values.abs().max()))))


def same_gradients(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], policy: Policy) -> None:
    """Assert that these are gradients of one loss: the way there and back, by parameter."""
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    limit = rounding(2 * summands(policy), largest)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=0.0, atol=limit), name
