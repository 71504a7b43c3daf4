"""The packed linear layer against the plain one, before and after elements were written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from node.rollout.engine._vllm_linear import PackedLinear

SHAPES = [(96, 64), (113, 128), (30, 77), (1, 5), (3, 1), (300, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}


def parameter(shape: tuple[int, int], dtype: torch.dtype) -> torch.nn.Parameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if not PackedLinear.fits(values):
        pytest.skip(f"oneDNN packs no {dtype} here")
    return torch.nn.Parameter(values, requires_grad=False)


def agree(layer: PackedLinear, weight: Tensor, plain: Tensor, rows: int, *, bias: bool = False) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, plain.shape[1]), generator=generator).to(plain.dtype)
    shift = torch.randn(plain.shape[0], generator=generator).to(plain.dtype) if bias else None
    expected = linear(x, plain, shift)
    got = layer(x, weight, shift)
    assert got.shape == expected.shape
    gap = (got - expected).abs() / plain.shape[1] ** 0.5
    assert float(gap.float().max() if rows else 0.0) < TOLERANCE[plain.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_written_elements_arrive_at_their_places(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = parameter(shape, dtype)
    plain = weight.data.clone()
    layer = PackedLinear(weight, keep=False)
    agree(layer, weight, plain, rows=7)
    chosen = torch.randperm(plain.numel(), generator=torch.Generator().manual_seed(2))
    chosen = chosen[: max(1, plain.numel() // 3)]
    values = torch.linspace(-2, 2, chosen.numel()).to(dtype)
    layer.write(chosen, values)
    plain.view(-1)[chosen] = values
    for rows in (0, 1, 33):
        agree(layer, weight, plain, rows)
    agree(layer, weight, plain, 2, bias=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_arrive_wherever_they_begin_and_end(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = parameter(shape, dtype)
    plain = weight.data.clone()
    layer = PackedLinear(weight, keep=False)
    for start, stop in ((0, plain.numel()), (plain.numel() // 3, plain.numel() - 1), (1, 2)):
        values = torch.linspace(start, -2, max(0, stop - start)).to(dtype) / plain.numel()
        layer.write_run(start, values)
        plain.view(-1)[start:stop] = values[: plain.numel() - start]
        agree(layer, weight, plain, rows=5)


def test_a_weight_that_goes_keeps_its_shape_for_loaders() -> None:
    weight = parameter((96, 64), torch.float32)
    PackedLinear(weight, keep=False)
    part = weight.data.narrow(0, 10, 5)
    assert part.shape == (5, 64)
    assert part.storage_offset() == 640


def test_a_kept_weight_is_packed_when_it_is_first_used() -> None:
    """Patches before the first call are in the weight; later ones are written to both."""
    weight = parameter((96, 64), torch.float32)
    layer = PackedLinear(weight, keep=True)
    weight.data[3, 4] = 9.0
    layer.write(torch.tensor([3 * 64 + 4]), torch.tensor([9.0]))
    with torch.inference_mode():  # as the engine calls it
        agree(layer, weight, weight.data, rows=4)
    weight.data[95, 63] = -5.0
    layer.write(torch.tensor([96 * 64 - 1]), torch.tensor([-5.0]))
    agree(layer, weight, weight.data, rows=4)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(2, 3, 4), torch.zeros(4, 6).t(), torch.zeros(4, 4, dtype=torch.float64)],
    ids=["three dimensions", "transposed", "float64"],
)
def test_other_weights_do_not_fit(weight: Tensor) -> None:
    assert not PackedLinear.fits(weight)
