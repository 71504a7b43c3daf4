"""A linear layer on a CPU whose weight is packed for speed and can still be patched, element by element.

For: vLLM's CPU engines that take sparse updates. Packed by oneDNN, a layer of SmolLM2-135M at batch 32 takes
a third of the time that `torch.nn.functional.linear` takes on the plain weight; vLLM packs for that reason,
but hides the packed memory, so that nothing in it can be changed, and packing 135 M elements anew takes about
a second. Here the packed memory is open: where element (row, column) lies in it is the sum of two numbers,
one of the row and one of the column, as in every blocked layout. Both are learnt once for each shape by
packing marked weights, and checked with random ones. A long run of elements is one strided copy. Not for:
choosing layers (`_vllm_plugin`), or knowing which elements change (`_vllm_worker`).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PackedLinear"]

BATCH = 32
"""Rows of input that oneDNN chooses the layout for; any number may come."""
DIGIT = 128
"""Marks are written in this base: small integers are exact in every type."""


class PackedLinear:
    """Called as vLLM calls `layer.cpu_linear`: (x, weight, bias)."""

    def __init__(self, weight: Tensor, *, keep: bool) -> None:
        """`weight` is the layer's contiguous parameter (rows, columns). Kept, it is packed at the first call:
        most of those are embeddings, never multiplied. Otherwise it is packed now, and its own memory becomes
        addresses with nothing behind them, in which loaders still find their places."""
        self.keeps = keep
        """The plain weight is there as well, and whoever patches it writes to both."""
        self._rows, self._columns = _layout(tuple(weight.shape), weight.dtype)
        self._row_places = self._rows.places(weight.shape[0])
        self._column_places = self._columns.places(weight.shape[1])
        self._weight = weight
        self._packed: Tensor | None = None
        self._memory_P = weight.new_empty(0)
        if not keep:
            self._pack()
            weight.data = _addresses(weight)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether weights like this one can be packed here, and an element's place in the result is known."""
        kinds: dict[torch.dtype, Callable[[], bool]] = {
            torch.float32: torch.backends.mkldnn.is_available,
            torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
            torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        }
        supported = kinds.get(weight.dtype)
        if weight.ndim != 2 or not weight.is_contiguous() or supported is None or not supported():
            return False
        try:
            _layout(tuple(weight.shape), weight.dtype)
        except (RuntimeError, ValueError):  # oneDNN has no such layer, or an unheard-of layout
            return False
        return True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is None:
            self._pack()
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product

    def write(self, positions: Tensor, values: Tensor) -> None:
        """New values for elements at flat positions of the weight. Does nothing before a kept weight is
        packed, as they are in the weight then."""
        if self._packed is None:
            return
        width = self._weight.shape[1]
        rows = torch.div(positions, width, rounding_mode="floor")
        places = self._row_places[rows] + self._column_places[positions - rows * width]
        self._memory_P.index_copy_(0, places, values.to(self._memory_P.dtype))

    def write_run(self, start: int, values: Tensor) -> None:
        """The same for a run of elements."""
        if self._packed is None:
            return
        width, stop = self._weight.shape[1], start + values.numel()
        block = self._rows.block * width
        first, last = -(-start // block), stop // block
        if last <= first or width % self._columns.block:
            self.write(torch.arange(start, stop), values)
            return
        begin, end = first * block, last * block
        inner = (self._rows.block, width // self._columns.block, self._columns.block)
        strides = (self._rows.outer, self._rows.inner, self._columns.outer, self._columns.inner)
        blocks = self._memory_P.as_strided((last - first, *inner), strides, first * self._rows.outer)
        blocks.copy_(values[begin - start : end - start].view(last - first, *inner))
        self.write(torch.arange(start, begin), values[: begin - start])
        self.write(torch.arange(end, stop), values[end - start :])

    def _pack(self) -> None:
        self._packed, self._memory_P = _pack(self._weight.data)


@dataclass(frozen=True)
class _Axis:
    """How places grow along the rows, or along the columns: blocks of `block`, `outer` apart, with steps of
    `inner` within."""

    block: int
    inner: int
    outer: int

    def places(self, count: int) -> Tensor:
        index = torch.arange(count)
        blocks = torch.div(index, self.block, rounding_mode="floor")
        return blocks * self.outer + (index - blocks * self.block) * self.inner

    @classmethod
    def of(cls, places: Tensor) -> _Axis:
        count = places.numel()
        inner = int(places[1]) if count > 1 else 0
        breaks = (places != torch.arange(count) * inner).nonzero()
        block = int(breaks[0]) if breaks.numel() else count
        return cls(block, inner, int(places[block]) if block < count else 0)


def _addresses(like: Tensor) -> Tensor:
    """A tensor of zeros that takes no memory until it is written."""
    return torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """oneDNN's tensor and all of its memory, padding included, as a flat tensor of the same type."""
    with torch.inference_mode(False), torch.no_grad():  # what is made in that mode cannot be written later
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH)
        address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
        return packed, torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=weight.dtype)


@functools.cache
def _layout(shape: tuple[int, int], dtype: torch.dtype) -> tuple[_Axis, _Axis]:
    """Places of rows and of columns: the sum of an element's two is its place in the packed memory. Raises
    ValueError when the layout is not of that kind."""
    rows = _Axis.of(_find(shape, dtype, along=0))
    columns = _Axis.of(_find(shape, dtype, along=1))
    sample = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, memory = _pack(sample)
    column_places = columns.places(shape[1])
    for part, places in zip(sample.split(4096), rows.places(shape[0]).split(4096), strict=True):
        where = places[:, None] + column_places
        if int(where.max()) >= memory.numel() or not torch.equal(memory[where], part):
            raise ValueError(f"a packed weight of shape {shape} has an unknown layout")
    del packed  # owns the memory
    return rows, columns


def _find(shape: tuple[int, int], dtype: torch.dtype, *, along: int) -> Tensor:
    """Places of the first element of every row (`along` 0) or of every column (1)."""
    count = shape[along]
    wanted, read = torch.arange(count), torch.tensor(0)
    found = wanted
    scale = 1
    while scale <= count:
        marked = torch.zeros(shape, dtype=dtype)
        marked.select(1 - along, 0).copy_(wanted // scale % DIGIT + 1)
        packed, memory = _pack(marked)
        found = memory.nonzero().view(-1)
        read = read + (memory[found].to(torch.int64) - 1) * scale
        del packed  # owns the memory
        scale *= DIGIT
    if found.numel() != count or not torch.equal(read.sort().values, wanted):
        raise ValueError(f"packing moves elements of a weight of shape {shape} in an unknown way")
    places = torch.empty(count, dtype=torch.int64)
    places[read] = found
    return places
