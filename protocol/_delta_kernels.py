"""The loops of `protocol.delta` over single weights and single symbols, compiled by numba.

Only arithmetic on integers: no lengths from a peer are trusted here without a bound that the caller checked.
A bf16 value is its 16 bits, a bucket is its exponent field, a step is the signed distance in `_ordered`
folded to a natural number (0, -1, 1, -2, 2 ... give 0, 1, 2, 3, 4). Not for reading or writing the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = [
    "apply_changes",
    "collect_changes",
    "count_buckets",
    "count_classes",
    "find_changed",
    "read_extra",
    "sort_by_bucket",
    "to_symbols",
    "write_extra",
]

F = TypeVar("F", bound=Callable[..., object])
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def _kernel(function: F) -> F:
    return cast("F", njit(cache=True, nogil=True)(function))


@_kernel
def _ordered(bits: int) -> int:
    """bf16 bits as an integer that grows with the value; one to one, -0.0 just below 0.0."""
    return 0x8000 + bits if bits < 0x8000 else 0xFFFF - bits


@_kernel
def _class(value: int) -> int:
    """Four classes per octave: 0 to 7 alone, then 8-9, 10-11 ... ; class c >= 4 leaves c // 4 - 1 low bits
    open."""
    if value < 8:
        return value
    top = 3
    while value >> (top + 1):
        top += 1
    return 4 * (top - 1) + ((value >> (top - 2)) & 3)


@_kernel
def _step(old: int, new: int) -> int:
    distance = _ordered(new) - _ordered(old)
    return 2 * distance if distance >= 0 else -2 * distance - 1


@_kernel
def find_changed(old: U16, new: U16, changed: I64) -> None:
    """Adds to `changed[e]` how many values of bucket e differ."""
    for i in range(old.size):
        if old[i] != new[i]:
            changed[(old[i] >> 7) & 0xFF] += 1


@_kernel
def count_classes(old: U16, new: U16, classes: I64) -> None:
    """Adds to `classes[k]` how many changed values have a step of class k."""
    for i in range(old.size):
        if old[i] != new[i]:
            classes[_class(_step(int(old[i]), int(new[i])))] += 1


@_kernel
def count_buckets(old: U16, sizes: I64) -> None:
    """Adds the number of values in each bucket. Four tables in turn, for the same bucket often follows itself
    and would wait for its own count: 0.4 ns a value, 2.2 with one table."""
    table = np.zeros((4, 256), np.int64)
    whole = old.size // 4 * 4
    for i in range(0, whole, 4):
        table[0, (old[i] >> 7) & 0xFF] += 1
        table[1, (old[i + 1] >> 7) & 0xFF] += 1
        table[2, (old[i + 2] >> 7) & 0xFF] += 1
        table[3, (old[i + 3] >> 7) & 0xFF] += 1
    for i in range(whole, old.size):
        table[0, (old[i] >> 7) & 0xFF] += 1
    for e in range(256):
        sizes[e] += table[0, e] + table[1, e] + table[2, e] + table[3, e]


@_kernel
def collect_changes(
    old: U16, new: U16, wanted: U8, sizes: I64, buckets: U8, ranks: U32, steps: U32, at: int
) -> int:
    """Writes bucket, rank in the bucket and step of each changed value from `at` on; returns the new end.
    `sizes` counts on from the tensor before."""
    for i in range(old.size):
        e = (old[i] >> 7) & 0xFF
        if wanted[e]:
            if old[i] != new[i]:
                buckets[at] = e
                ranks[at] = sizes[e]
                steps[at] = _step(int(old[i]), int(new[i]))
                at += 1
            sizes[e] += 1
    return at


@_kernel
def sort_by_bucket(buckets: U8, ranks: U32, steps: U32, starts: I64, gaps: U32, sorted_steps: U32) -> None:
    """Changes in order of bucket, then rank; `gaps` are the unchanged values since the change before."""
    write = starts.copy()
    last = np.full(256, -1, np.int64)
    for i in range(buckets.size):
        e = buckets[i]
        gaps[write[e]] = np.int64(ranks[i]) - last[e] - 1
        sorted_steps[write[e]] = steps[i]
        last[e] = ranks[i]
        write[e] += 1


@_kernel
def to_symbols(values: U32, exact: I32, by_class: I32, symbols: I32) -> None:
    """Symbol of each value: its own when `exact` has one, else that of its class."""
    for i in range(values.size):
        value = int(values[i])
        symbol = exact[value] if value < exact.size else np.int32(-1)
        symbols[i] = symbol if symbol >= 0 else by_class[_class(value)]


@_kernel
def write_extra(values: U32, symbols: I32, extra: U8, out: U8, at: int) -> int:
    """Appends the open low bits of each value at bit `at` of zeroed bytes; returns the new end."""
    for i in range(values.size):
        for bit in range(extra[symbols[i]]):
            if (values[i] >> np.uint32(bit)) & np.uint32(1):
                out[at >> 3] |= np.uint8(1 << (at & 7))
            at += 1
    return at


@_kernel
def read_extra(symbols: I32, lowest: U32, extra: U8, data: U8, at: int, values: I64) -> int:
    """Inverse of `write_extra`; the caller has checked that the bits are there."""
    for i in range(symbols.size):
        value = np.int64(lowest[symbols[i]])
        for bit in range(extra[symbols[i]]):
            value |= np.int64((data[at >> 3] >> (at & 7)) & 1) << bit
            at += 1
        values[i] = value
    return at


@_kernel
def apply_changes(
    weights: U16,
    wanted: U8,
    sizes: I64,
    nexts: I64,
    ends: I64,
    ranks: I64,
    steps: I64,
    positions: U32,
    olds: U16,
) -> int:
    """Changes `weights` in place and notes position and old value of each change. Returns how many, or
    -1 - that number when the next step would leave the 16 bits: what is noted can be undone.

    `ranks` and `steps` hold the changes of all buckets, those of bucket e in nexts[e] to ends[e].
    """
    count = 0
    for i in range(weights.size):
        e = (weights[i] >> 7) & 0xFF
        if wanted[e]:
            k = nexts[e]
            if k < ends[e] and ranks[k] == sizes[e]:
                folded = steps[k]
                distance = folded >> 1 if folded & 1 == 0 else -((folded + 1) >> 1)
                ordered = _ordered(int(weights[i])) + distance
                if ordered < 0 or ordered > 0xFFFF:
                    return -1 - count
                positions[count] = i
                olds[count] = weights[i]
                weights[i] = ordered - 0x8000 if ordered >= 0x8000 else 0xFFFF - ordered
                count += 1
                nexts[e] = k + 1
            sizes[e] += 1
    return count
