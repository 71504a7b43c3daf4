"""The loops of `protocol.delta` over single weights and single symbols, compiled by numba.

Only arithmetic on integers: no lengths from a peer are trusted here without a bound that the caller checked.
A bf16 value is its 16 bits, a bucket is its exponent field, a step is the distance in `_ordered` away from
zero, folded to a natural number (0, -1, 1, -2, 2 ... give 0, 1, 2, 3, 4): seen from zero, steps of young
weights are more alike than seen from below, 3 % of a delta. Not for reading or writing the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = [
    "BEYOND",
    "DONE",
    "NEVER",
    "NOT_FINITE",
    "apply_changes",
    "collect_changes",
    "count_buckets",
    "count_classes",
    "find_changed",
    "kernel",
    "read_extra",
    "sort_by_bucket",
    "to_symbols",
    "write_extra",
]

DONE, BEYOND, NOT_FINITE = range(3)
"""How `apply_changes` ends: all is done, a step leaves the 16 bits, a value would be infinite or NaN."""

NEVER = 1 << 60
"""More values than any set of weights has."""

F = TypeVar("F", bound=Callable[..., object])
Int = int | np.int64
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def kernel(function: F) -> F:
    """Compiled, without the interpreter's lock, and kept on the disk where that can be."""
    try:
        return cast("F", njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written: compile every time
        return cast("F", njit(nogil=True)(function))


@kernel
def _ordered(bits: Int) -> Int:
    """bf16 bits as an integer that grows with the value; one to one, -0.0 just below 0.0."""
    return 0x8000 + bits if bits < 0x8000 else 0xFFFF - bits


@kernel
def _class(value: Int) -> Int:
    """Four classes per octave: 0 to 7 alone, then 8-9, 10-11 ... ; class c >= 4 leaves c // 4 - 1 low bits
    open."""
    if value < 8:
        return value
    top = 3
    while value >> (top + 1):
        top += 1
    return 4 * (top - 1) + ((value >> (top - 2)) & 3)


@kernel
def _step(old: Int, new: Int) -> Int:
    sign = old & 0x8000
    distance = _ordered(new ^ sign) - _ordered(old ^ sign)
    return 2 * distance if distance >= 0 else -2 * distance - 1


@kernel
def find_changed(old: U16, new: U16, changed: I64) -> None:
    """Adds to `changed[e]` how many values of bucket e differ."""
    for i in range(old.size):
        if old[i] != new[i]:
            changed[(old[i] >> 7) & 0xFF] += 1


@kernel
def count_classes(old: U16, new: U16, classes: I64) -> None:
    """Adds to `classes[k]` how many changed values have a step of class k."""
    for i in range(old.size):
        if old[i] != new[i]:
            classes[_class(_step(np.int64(old[i]), np.int64(new[i])))] += 1


@kernel
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


@kernel
def collect_changes(old: U16, new: U16, since: I64, buckets: U8, gaps: U32, steps: U32, at: int) -> int:
    """Writes bucket, gap and step of each changed value from `at` on; returns the new end. A gap is how many
    unchanged values of the bucket came before; `since` counts them on from the tensor before."""
    for i in range(old.size):
        e = (old[i] >> 7) & 0xFF
        if old[i] != new[i]:
            buckets[at] = e
            gaps[at] = since[e]
            steps[at] = _step(np.int64(old[i]), np.int64(new[i]))
            at += 1
            since[e] = 0
        else:
            since[e] += 1
    return at


@kernel
def sort_by_bucket(
    buckets: U8, gaps: U32, steps: U32, starts: I64, sorted_gaps: U32, sorted_steps: U32
) -> None:
    """Changes in order of bucket, inside a bucket as they were."""
    write = starts.copy()
    for i in range(buckets.size):
        at = write[buckets[i]]
        sorted_gaps[at] = gaps[i]
        sorted_steps[at] = steps[i]
        write[buckets[i]] += 1


@kernel
def to_symbols(values: U32, exact: I32, by_class: I32, symbols: I32) -> None:
    """Symbol of each value: its own when `exact` has one, else that of its class."""
    for i in range(values.size):
        value = int(values[i])
        symbol = exact[value] if value < exact.size else np.int32(-1)
        symbols[i] = symbol if symbol >= 0 else by_class[_class(value)]


@kernel
def write_extra(values: U32, symbols: I32, extra: U8, out: U8, at: int) -> int:
    """Appends the open low bits of each value at bit `at` of zeroed bytes; returns the new end."""
    for i in range(values.size):
        for bit in range(extra[symbols[i]]):
            if (values[i] >> np.uint32(bit)) & np.uint32(1):
                out[at >> 3] |= np.uint8(1 << (at & 7))
            at += 1
    return at


@kernel
def read_extra(symbols: I32, lowest: U32, extra: U8, data: U8, at: int, values: U32) -> int:
    """Inverse of `write_extra`; the caller has checked that the bits are there."""
    for i in range(symbols.size):
        value = np.int64(lowest[symbols[i]])
        for bit in range(extra[symbols[i]]):
            value |= np.int64((data[at >> 3] >> (at & 7)) & 1) << bit
            at += 1
        values[i] = value
    return at


@kernel
def apply_changes(
    weights: U16,
    changes: tuple[U32, U32],
    buckets: tuple[I64, I64, I64],
    notes: tuple[U32, U16],
    finite: bool,
) -> tuple[int, int]:
    """Changes `weights` in place; notes position and old value of each change where there is room for notes.
    Returns how many were made, and why it ended: DONE, or BEYOND or NOT_FINITE before the change that was not
    made.

    `changes` are gaps and steps of all buckets. `buckets` says of each where it stands: left[e] values of
    bucket e stay before its next change, `NEVER` when there is none, and its changes are nexts[e] to ends[e].
    These count on from tensor to tensor. 0.64 ns a value.
    """
    gaps, steps = changes
    left, nexts, ends = buckets
    positions, olds = notes
    count = 0
    noted = positions.size > 0
    for i in range(weights.size):
        e = (weights[i] >> 7) & 0xFF
        left[e] -= 1
        if left[e] < 0:
            k = nexts[e]
            old = np.int64(weights[i])
            sign = old & 0x8000
            folded = np.int64(steps[k])
            distance = folded >> 1 if folded & 1 == 0 else -((folded + 1) >> 1)
            ordered = _ordered(old ^ sign) + distance
            if ordered < 0 or ordered > 0xFFFF:
                return count, BEYOND
            new = (ordered - 0x8000 if ordered >= 0x8000 else 0xFFFF - ordered) ^ sign
            if finite and new & 0x7F80 == 0x7F80:
                return count, NOT_FINITE
            if noted:
                positions[count] = i
                olds[count] = old
            weights[i] = new
            count += 1
            nexts[e] = k + 1
            left[e] = gaps[k + 1] if k + 1 < ends[e] else NEVER
    return count, DONE
