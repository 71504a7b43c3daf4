"""The bfloat16 view of a state dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from node.weights.chain.bf16 import all_finite, to_bits, to_tensors
from protocol.errors import LocalProtocolError


def bits_of(*values: float) -> list[str]:
    return [f"{bit:04x}" for bit in to_bits({"w": torch.tensor(values)})["w"].tolist()]


def test_rounds_to_nearest_and_ties_to_even():
    one, step = 1.0, 2.0**-7
    assert bits_of(one, one + step, one + step / 2, one + 1.5 * step, one + 0.51 * step) == [
        "3f80",
        "3f81",
        "3f80",
        "3f82",
        "3f81",
    ]
    assert bits_of(-0.0, float("inf"), 3.4e38, 1e-45) == ["8000", "7f80", "7f80", "0000"]


def test_there_and_back_keeps_every_bit_of_bfloat16():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = to_bits({"w": every})
    assert bits["w"].dtype == np.uint16
    assert (to_tensors(bits)["w"].view(torch.int16) == every.view(torch.int16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_what_it_gets_and_shows_what_it_holds(dtype):
    state = {"w": torch.ones(4, dtype=dtype)}
    bits = to_bits(state)
    state["w"].zero_()
    assert bits["w"].tolist() == [0x3F80] * 4
    tensors = to_tensors(bits)
    bits["w"][0] = 0x4000
    assert tensors["w"].tolist() == [2, 1, 1, 1]


def test_shapes_and_order_of_memory():
    state = {"t": torch.arange(6.0).reshape(2, 3).T, "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}
    bits = to_bits(state)
    assert {name: array.shape for name, array in bits.items()} == {"t": (3, 2), "scalar": (), "empty": (0, 3)}
    assert all(array.flags.c_contiguous for array in bits.values())
    assert to_tensors(bits)["t"].tolist() == state["t"].tolist()


def test_tied_tensors_stay_one_array_and_views_do_not():
    tensor = torch.arange(6.0)
    bits = to_bits(
        {"a": tensor, "b": tensor, "c": tensor[:3], "d": tensor.reshape(2, 3), "e": tensor.clone()}
    )
    assert bits["a"] is bits["b"]
    assert len({id(array) for array in bits.values()}) == 4
    assert bits["c"].tolist() == bits["a"][:3].tolist()


def test_only_floating_point_travels():
    with pytest.raises(LocalProtocolError, match="ids is torch"):
        to_bits({"ids": torch.arange(3)})


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_finds_what_is_not_finite(bad):
    large = torch.zeros(3 * 2**20 + 5)
    assert all_finite(to_bits({"a": large, "b": torch.tensor(3.3e38), "c": torch.zeros(0)}))
    large[-1] = bad
    assert not all_finite(to_bits({"a": large}))
