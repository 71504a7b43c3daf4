"""Differences of float32 weights: exact both ways, and as small as they can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.train.differences import difference, walk
from protocol.errors import LocalProtocolError


def floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def pattern(weights: torch.Tensor) -> list[int]:
    return weights.reshape(-1).view(torch.int32).tolist()


BITS = st.integers(0, 2**32 - 1)


@settings(max_examples=25)
@given(st.lists(st.tuples(BITS, BITS), min_size=1, max_size=12))
def test_any_bits_become_any_other_and_back(pairs: list[tuple[int, int]]) -> None:
    """NaN, infinities, changed signs: differences that do not fit 32 bits wrap around."""
    older, newer = (floats([pair[place] for pair in pairs]) for place in (0, 1))
    change = difference(older, newer)
    weights = older.clone()
    walk(weights, change, back=False)
    assert pattern(weights) == pattern(newer)
    walk(weights, change, back=True)
    assert pattern(weights) == pattern(older)


@pytest.mark.parametrize(
    ("moved", "expected_bytes"),
    [
        ([0] * 100, 0),
        ([7] * 100, 200),  # 16 bits each
        ([0] * 99 + [7], 12),  # a place and a value
        ([40_000] + [7] * 99, 200 + 12),
        ([-32_768] * 50 + [32_767] * 50, 200),
        ([40_000] * 100, 400),
        ([40_000] * 17 + [7] * 83, 400),  # 200 + 17 x 12 would be more
    ],
)
def test_the_smallest_form_is_taken(moved: list[int], expected_bytes: int) -> None:
    older = torch.linspace(0.5, 0.9, 100).reshape(10, 10)
    bits = torch.tensor(pattern(older)) + torch.tensor(moved)
    newer = bits.to(torch.int32).view(torch.float32).reshape(10, 10)
    change = difference(older, newer)
    assert change.nbytes == expected_bytes
    weights = older.clone()
    walk(weights, change, back=False)
    assert torch.equal(weights, newer)


def test_a_step_of_training_takes_half_of_a_copy() -> None:
    """Weights of deviation 0.04 that move by 1e-6: 270 units in the last place at 0.04, 16 bits down to
    weights of 1e-6 / 32767 x 2^23 = 2.6e-4, below which lie 0.5 % of them."""
    older = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 0.04
    change = difference(older, older + 1e-6)
    assert 2.0 < change.nbytes / 20_000 < 2.2


@pytest.mark.parametrize(
    "newer", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)]
)
def test_other_shapes_and_types_are_refused(newer: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match="no difference"):
        difference(torch.zeros(2), newer)


def test_what_was_no_number_stays_the_same_one() -> None:
    older, newer = torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, -1.0])
    change = difference(older, newer)
    weights = older.clone()
    walk(weights, change, back=False)
    assert pattern(weights) == pattern(newer)
