"""Alphabets of `protocol.delta`: how numbers become symbols, what a symbol costs, and both as bytes.

An alphabet is a list of exact values and of classes (`_delta_kernels`), each with a count. A count is sent as
one byte, which names one of 256 integers (`LEVELS`), and the model of the range coder is built from these
alone on both sides. The range coder takes them as 64-bit floats, where they are exact, and scales them to
24-bit integers with single divisions and multiplications, which IEEE 754 defines to the bit: the same model
on any machine.
"""

from __future__ import annotations

import functools
from typing import Any

import constriction
import numpy as np

from protocol._delta_kernels import I32, I64, U8, U32, to_symbols
from protocol.errors import DecodeError

__all__ = ["CLASSES", "GAP", "STEP", "Alphabet", "Reader", "binary_model", "varint"]

CLASSES = 124
"""Classes that 32-bit numbers fall into."""

LEVELS: I64 = np.array([(16 + code % 16) << code // 16 for code in range(256)], dtype=np.int64)
"""What the byte of a count stands for: 3 % apart, which costs a symbol less than 0.001 bit. Changing breaks:
every delta."""

MAX_STEP = (1 << 17) - 1
"""Largest folded step between two 16-bit patterns."""

GAP, STEP = 0, 1
"""Smallest value of a gap between changes, and of the step of a change (a change is never by nothing)."""

MIN_SAVED_BITS = 20.0
"""A value gets a symbol of its own when that saves more than the entry in the table costs."""

MAX_EXACT = 1 << 12
"""Values with symbols of their own in one alphabet: a few bytes must not become many objects."""


class Reader:
    """Reads forward in untrusted bytes; every read past the end is a `DecodeError`."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).toreadonly()
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, count: int, what: str) -> memoryview:
        if count > self.left:
            raise DecodeError(
                f"delta ends early: {what} needs {count} bytes, {self.left} are left",
                reason="delta_truncated",
            )
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, limit: int, what: str) -> int:
        """A varint of at most `limit`, in its shortest form."""
        value = shift = 0
        while True:
            byte = self.take(1, what)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 56:
                raise DecodeError(f"delta: {what} is a number of more than 8 bytes", reason="delta_bounds")
        if value > limit or (byte == 0 and shift > 7):
            raise DecodeError(f"delta: {what} is {value}, at most {limit} can be", reason="delta_bounds")
        return value


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Alphabet:
    """Symbols 0 to n-1: exact values in ascending order, then classes in ascending order."""

    def __init__(self, exact: list[int], classes: list[int], counts: bytes) -> None:
        self._exact, self._classes, self._counts = exact, classes, counts
        self.lowest: U32 = np.array(exact + [_lowest(c) for c in classes], dtype=np.uint32)
        self.extra: U8 = np.array([0] * len(exact) + [_extra(c) for c in classes], dtype=np.uint8)
        self.size = len(counts)

    @functools.cached_property
    def model(self) -> Any:
        return _categorical(LEVELS[np.frombuffer(self._counts, dtype=np.uint8)])

    def symbols(self, values: U32) -> I32:
        exact, by_class = self._lookup
        symbols = np.empty(values.size, dtype=np.int32)
        to_symbols(values, exact, by_class, symbols)
        return symbols

    @functools.cached_property
    def _lookup(self) -> tuple[I32, I32]:
        """Only the writer needs these; a reader would give half a megabyte for a few bytes of a stranger."""
        exact: I32 = np.full(self._exact[-1] + 1 if self._exact else 0, -1, dtype=np.int32)
        exact[self._exact] = np.arange(len(self._exact), dtype=np.int32)
        by_class: I32 = np.full(CLASSES, -1, dtype=np.int32)
        by_class[self._classes] = np.arange(len(self._exact), self.size, dtype=np.int32)
        return exact, by_class

    @classmethod
    def fitted(cls, histogram: I64) -> Alphabet:
        """The alphabet for values that occur `histogram[value]` times; at least one occurs."""
        values = np.flatnonzero(histogram)
        counts = histogram[values]
        kinds = np.array([_class_of(int(v)) for v in values])
        opened = np.array([_extra(int(k)) for k in kinds])
        per_class = np.bincount(kinds, weights=counts, minlength=CLASSES)
        # what each value would cost as a member of its class, against a symbol of its own
        saved = counts * (opened - np.log2(per_class[kinds] / counts))
        own = (opened > 0) & (saved > MIN_SAVED_BITS)
        own[np.argsort(np.where(own, -saved, 0.0), kind="stable")[MAX_EXACT:]] = False
        rest = np.bincount(kinds[~own], weights=counts[~own], minlength=CLASSES).astype(np.int64)
        classes = np.flatnonzero(rest)
        raw = np.concatenate([counts[own], rest[classes]])
        return cls(values[own].tolist(), classes.tolist(), _codes(raw))

    @classmethod
    def fitted_to_classes(cls, rest: I64) -> Alphabet:
        """The alphabet of classes alone, which occur `rest[class]` times."""
        classes = np.flatnonzero(rest)
        return cls([], classes.tolist(), _codes(rest[classes]))

    def to_bytes(self) -> bytes:
        parts = [varint(len(self._exact)), varint(len(self._classes))]
        for values in (self._exact, self._classes):
            parts += [varint(v - before - 1) for before, v in zip([-1, *values], values, strict=False)]
        return b"".join([*parts, self._counts])

    @classmethod
    def read(cls, reader: Reader, least: int) -> Alphabet:
        """`least` is `GAP` or `STEP`."""
        n_exact = reader.number(MAX_EXACT if least == STEP else 0, "the number of exact values")
        n_classes = reader.number(CLASSES, "the number of classes")
        if n_exact + n_classes == 0:
            raise DecodeError("delta: an alphabet without symbols", reason="delta_table")
        if 2 * n_exact + 2 * n_classes > reader.left:
            raise DecodeError(
                f"delta: an alphabet of {n_exact + n_classes} symbols in {reader.left} bytes",
                reason="delta_truncated",
            )
        lists: list[list[int]] = []
        for count, limit in ((n_exact, MAX_STEP), (n_classes, CLASSES - 1)):
            values: list[int] = []
            value = -1
            for _ in range(count):
                value += 1 + reader.number(limit, "a value")
                if not least <= value <= limit:
                    raise DecodeError(f"delta: {value} in an alphabet to {limit}", reason="delta_table")
                values.append(value)
            lists.append(values)
        counts = reader.take(n_exact + n_classes, "counts")
        return cls(lists[0], lists[1], bytes(counts))


def binary_model(changed: int, size: int) -> Any:
    """The model of one change flag, when `changed` of `size` values change."""
    return _categorical(np.array([size - changed, changed], dtype=np.int64))


def _categorical(counts: I64) -> Any:
    return constriction.stream.model.Categorical(counts.astype(np.float64), lazy=False, perfect=False)


def _codes(counts: I64) -> bytes:
    """The level next to each count, the largest at the highest level."""
    scaled = counts * (LEVELS[-1] / counts.max())
    return bytes(np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, scaled).astype(np.uint8))


def _class_of(value: int) -> int:
    if value < 8:
        return value
    top = value.bit_length() - 1
    return 4 * (top - 1) + ((value >> (top - 2)) & 3)


def _extra(kind: int) -> int:
    return 0 if kind < 8 else kind // 4 - 1


def _lowest(kind: int) -> int:
    return kind if kind < 8 else (4 + kind % 4) << _extra(kind)
