"""The loops of merging over single weights, compiled by numba: the same bits on every machine.

Sums run in a fixed order, one double after the other, without fastmath: numpy's own sums are grouped as the
processor's vectors are wide. bf16 becomes double through a table, never through float32, whose denormals some
libraries flush to zero for a whole thread; and numba fuses no multiplication with an addition. Not for
deciding what is merged: `resolve.py`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from protocol._delta_kernels import U16, kernel

__all__ = [
    "F64",
    "U16",
    "VALUES",
    "accumulate",
    "add_squares",
    "difference",
    "rounded",
    "trimmed_mean",
]

F64 = NDArray[np.float64]


def _values() -> F64:
    """The double of every bf16 pattern; infinities and NaN, which are never looked up, as 0."""
    bits = np.arange(1 << 16, dtype=np.int64)
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    normal = np.ldexp((0x80 | mantissa).astype(np.float64), exponent - 134)
    tiny = np.ldexp(mantissa.astype(np.float64), -133)
    size = np.where(exponent == 0, tiny, np.where(exponent == 0xFF, 0.0, normal))
    return np.where(bits >> 15 == 1, -size, size)


VALUES = _values()
"""The double that equals each bf16 pattern."""


@kernel
def add_squares(total: float, base: U16, bits: U16, scale: float, centre: F64, values: F64) -> float:
    """`total` plus the squares of scale (bits - base) - centre, one after the other."""
    for i in range(base.size):
        distance = scale * (values[bits[i]] - values[base[i]]) - centre[i]
        total += distance * distance
    return total


@kernel
def accumulate(out: F64, base: U16, bits: U16, coefficient: float, values: F64) -> None:
    """Adds coefficient (bits - base)."""
    for i in range(base.size):
        out[i] += coefficient * (values[bits[i]] - values[base[i]])


@kernel
def difference(out: F64, base: U16, bits: U16, scale: float, values: F64) -> None:
    """Writes scale (bits - base)."""
    for i in range(base.size):
        out[i] = scale * (values[bits[i]] - values[base[i]])


@kernel
def trimmed_mean(rows: F64, cut: int, out: F64) -> None:
    """The mean of each column without its `cut` least and `cut` greatest values. Sorts the columns."""
    count = rows.shape[0]
    column = np.empty(count, np.float64)
    for i in range(rows.shape[1]):
        for k in range(count):  # insertion: few values
            value = rows[k, i]
            at = k
            while at > 0 and column[at - 1] > value:
                column[at] = column[at - 1]
                at -= 1
            column[at] = value
        total = 0.0  # +0.0: which zero comes first does not show
        for k in range(cut, count - cut):
            total += column[k]
        out[i] = total / (count - 2 * cut)


@kernel
def rounded(base: U16, change: F64, values: F64, out: U16) -> None:
    """base + change as bf16: to nearest, ties to even, and at most the greatest finite value. Where nothing
    changes the bits stay, so that -0.0 does."""
    for i in range(base.size):
        if change[i] == 0.0:
            out[i] = base[i]
            continue
        exact = values[base[i]] + change[i]
        sign = 0x8000 if exact < 0.0 else 0
        size = abs(exact)
        if size < 2.0**-126:
            magnitude = np.int64(np.rint(size * 2.0**133))  # whole steps; 128 is the least normal number
        elif size >= 2.0**128:
            magnitude = np.int64(0x7F7F)
        else:
            fraction, exponent = math.frexp(size)  # size = fraction 2^exponent, 1/2 <= fraction < 1
            steps = np.int64(np.rint(fraction * 256.0))  # 128 to 256
            magnitude = (np.int64(exponent) + 125) * 128 + steps
            if magnitude > 0x7F7F:
                magnitude = np.int64(0x7F7F)
        out[i] = np.uint16(sign | magnitude)
