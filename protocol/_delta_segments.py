"""Segments of `protocol.delta`: runs of weights whose changes are coded together, and the tables they share.

A segment is the changed count of each bucket that changes anywhere, the range coder's words behind their
number, and the low bits that classes leave open. In the words, per bucket: which values change, then their
steps. Not for tensors, names or hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import constriction
import numpy as np

from protocol import _delta_kernels as kernels
from protocol._delta_kernels import I32, I64, U16, U32
from protocol._delta_tables import CLASSES, GAP, MAX_STEP, STEP, Alphabet, Reader, binary_model, varint
from protocol.errors import DecodeError

__all__ = ["Tables", "Undo", "apply_segment", "encode_segments", "mapped", "read_tables"]

DENSE = 10
"""Flags instead of gaps where more than one in so many values changes. Changing breaks: every delta."""

KEPT_BYTES = 1 << 24
"""Changes that the writer keeps between its two passes, 8 bytes each."""

Tables = tuple[dict[int, Alphabet], dict[int, Alphabet]]
"""Steps per bucket, gaps per density."""

Undo = list[tuple[U16, U32 | slice, U16]]
"""Where in which tensor which values were."""

T = TypeVar("T")
R = TypeVar("R")


# --- writing ------------------------------------------------------------------------------------------------


@dataclass
class _Changes:
    """Changes of a segment, sorted by bucket and rank."""

    sizes: I64  # values per bucket; only buckets that change
    counts: I64
    gaps: U32
    steps: U32

    def buckets(self) -> Iterator[tuple[int, slice]]:
        ends = np.cumsum(self.counts)
        for e in np.flatnonzero(self.counts):
            yield int(e), slice(int(ends[e] - self.counts[e]), int(ends[e]))


def _changes_of(pairs: list[tuple[U16, U16]]) -> _Changes:
    counts = np.zeros(256, dtype=np.int64)
    for old, new in pairs:
        kernels.find_changed(old, new, counts)
    total = int(counts.sum())
    wanted = (counts > 0).astype(np.uint8)
    sizes = np.zeros(256, dtype=np.int64)
    buckets = np.empty(total, dtype=np.uint8)
    ranks, steps = np.empty(total, dtype=np.uint32), np.empty(total, dtype=np.uint32)
    at = 0
    for old, new in pairs:
        at = kernels.collect_changes(old, new, wanted, sizes, buckets, ranks, steps, at)
    gaps, ordered = np.empty(total, dtype=np.uint32), np.empty(total, dtype=np.uint32)
    kernels.sort_by_bucket(buckets, ranks, steps, np.cumsum(counts) - counts, gaps, ordered)
    return _Changes(sizes, counts, gaps, ordered)


def encode_segments(segments: list[list[tuple[U16, U16]]], threads: int) -> tuple[bytes, list[bytes]]:
    """Tables and segments. Two passes: histograms of all segments, which make the tables, then symbols.
    Changes of the first pass are kept up to `KEPT_BYTES`, and found again beyond."""
    spare = KEPT_BYTES
    kept: list[_Changes | None] = []
    step_counts: dict[int, I64] = {}
    gap_counts: dict[int, I64] = {}
    every_class = Alphabet.fitted_to_classes(np.ones(CLASSES, dtype=np.int64))
    for changes in mapped(_changes_of, segments, threads):
        for e, part in changes.buckets():
            _add(step_counts, e, np.bincount(changes.steps[part]))
            count, size = int(changes.counts[e]), int(changes.sizes[e])
            if count * DENSE <= size:
                symbols = every_class.symbols(changes.gaps[part])
                _add(gap_counts, _density(count, size), np.bincount(symbols, minlength=CLASSES))
        spare -= changes.gaps.nbytes + changes.steps.nbytes
        kept.append(changes if spare >= 0 else None)

    steps = {e: Alphabet.fitted(step_counts[e]) for e in sorted(step_counts)}
    gaps = {d: Alphabet.fitted_to_classes(gap_counts[d]) for d in sorted(gap_counts)}
    active = np.zeros(256, dtype=np.uint8)
    active[list(steps)] = 1
    densities = np.zeros(CLASSES + 4, dtype=np.uint8)
    densities[list(gaps)] = 1
    tables = np.packbits(active).tobytes() + np.packbits(densities).tobytes()
    tables += b"".join(a.to_bytes() for a in (*steps.values(), *gaps.values()))

    def encoded(segment: tuple[list[tuple[U16, U16]], _Changes | None]) -> bytes:
        pairs, changes = segment
        return _encode_segment(changes or _changes_of(pairs), steps, gaps)

    return tables, list(mapped(encoded, zip(segments, kept, strict=True), threads))


def _encode_segment(changes: _Changes, steps: dict[int, Alphabet], gaps: dict[int, Alphabet]) -> bytes:
    encoder = constriction.stream.queue.RangeEncoder()
    streams: list[tuple[U32, I32, Alphabet]] = []

    def put(values: U32, alphabet: Alphabet) -> None:
        symbols = alphabet.symbols(values)
        if alphabet.size > 1:
            encoder.encode(symbols, alphabet.model)
        streams.append((values, symbols, alphabet))

    for e, part in changes.buckets():
        count, size = int(changes.counts[e]), int(changes.sizes[e])
        if count * DENSE <= size:
            put(changes.gaps[part], gaps[_density(count, size)])
        elif count < size:
            flags = np.zeros(size, dtype=np.int32)
            flags[np.cumsum(changes.gaps[part].astype(np.int64) + 1) - 1] = 1
            encoder.encode(flags, binary_model(count, size))
        put(changes.steps[part], steps[e])
    words: U32 = encoder.get_compressed()
    bits = sum(int(alphabet.extra[symbols].sum(dtype=np.int64)) for _, symbols, alphabet in streams)
    low = np.zeros((bits + 7) // 8, dtype=np.uint8)
    at = 0
    for values, symbols, alphabet in streams:
        at = kernels.write_extra(values, symbols, alphabet.extra, low, at)
    counts = b"".join(varint(int(changes.counts[e])) for e in steps)
    return counts + varint(len(words)) + words.astype("<u4").tobytes() + low.tobytes()


def _add(histograms: dict[int, I64], key: int, counts: I64) -> None:
    had = histograms.get(key)
    if had is None:
        histograms[key] = counts
    else:
        longer, shorter = (had, counts) if had.size >= counts.size else (counts, had)
        longer[: shorter.size] += shorter
        histograms[key] = longer


# --- reading ------------------------------------------------------------------------------------------------


def read_tables(reader: Reader) -> Tables:
    active = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(32, "the buckets"), dtype=np.uint8)))
    densities = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(16, "densities"), dtype=np.uint8)))
    steps = {int(e): Alphabet.read(reader, STEP) for e in active}
    return steps, {int(d): Alphabet.read(reader, GAP) for d in densities}


def apply_segment(
    tensors: list[U16],
    reader: Reader,
    tables: Tables,
    undo: Undo | None,
) -> None:
    """Changes `tensors`, and notes in `undo` how to put them back."""
    steps, gaps = tables
    total_values = sum(tensor.size for tensor in tensors)
    counts = np.zeros(256, dtype=np.int64)
    for e in steps:
        counts[e] = reader.number(total_values, "a count of changes")
    wanted = (counts > 0).astype(np.uint8)
    sizes = np.zeros(256, dtype=np.int64)
    for tensor in tensors:
        kernels.count_buckets(tensor, sizes)
    if (counts > sizes).any():
        e = int(np.argmax(counts - sizes))
        raise DecodeError(f"delta: {counts[e]} changes among {sizes[e]} values", reason="delta_bounds")
    ranks, folded = _read_changes(reader, counts, sizes, steps, gaps)

    ends = np.cumsum(counts)
    nexts = ends - counts
    seen = np.zeros(256, dtype=np.int64)
    for tensor in tensors:
        room = min(tensor.size, int((ends - nexts).sum()))
        positions, olds = np.empty(room, dtype=np.uint32), np.empty(room, dtype=np.uint16)
        done = kernels.apply_changes(tensor, wanted, seen, nexts, ends, ranks, folded, positions, olds)
        noted = done if done >= 0 else -1 - done
        if undo is not None:
            undo.append((tensor, positions[:noted].copy(), olds[:noted].copy()))
        if done < 0:
            raise DecodeError("delta: a step leaves the 16 bits of a weight", reason="delta_bounds")
    if not np.array_equal(nexts, ends):
        raise DecodeError("delta: changes that meet no weight", reason="delta_bounds")


def _read_changes(
    reader: Reader, counts: I64, sizes: I64, steps: dict[int, Alphabet], gaps: dict[int, Alphabet]
) -> tuple[I64, I64]:
    """Rank in its bucket and step of each change. The low bits follow the symbols, so these come first."""
    words = reader.number(reader.left // 4, "the length of the coded symbols")
    coded = np.frombuffer(reader.take(4 * words, "coded symbols"), dtype="<u4").astype(np.uint32)
    low = np.frombuffer(reader.take(reader.left, "low bits"), dtype=np.uint8)
    decoder = constriction.stream.queue.RangeDecoder(coded)
    total = int(counts.sum())
    ranks, folded = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    streams: list[tuple[I32, Alphabet, I64, int]] = []  # the last: size of the bucket for gaps, 0 for steps
    end = 0
    for bucket in np.flatnonzero(counts):
        e, count, size = int(bucket), int(counts[bucket]), int(sizes[bucket])
        start, end = end, end + count
        if count * DENSE <= size:
            alphabet = gaps.get(_density(count, size))
            if alphabet is None:
                raise DecodeError(f"delta: no table for {count} of {size}", reason="delta_table")
            streams.append((_read_symbols(decoder, alphabet, count), alphabet, ranks[start:end], size))
        elif count < size:
            flags = _decoded(decoder, binary_model(count, size), size)
            if int(flags.sum(dtype=np.int64)) != count:
                raise DecodeError(f"delta: not {count} changes among {size} values", reason="delta_bounds")
            ranks[start:end] = np.flatnonzero(flags)
        else:
            ranks[start:end] = np.arange(size)
        streams.append((_read_symbols(decoder, steps[e], count), steps[e], folded[start:end], 0))

    bits = sum(int(alphabet.extra[symbols].sum(dtype=np.int64)) for symbols, alphabet, _, _ in streams)
    if (bits + 7) // 8 != low.size:
        raise DecodeError(f"delta: {bits} low bits in {low.size} bytes", reason="delta_bounds")
    if not decoder.maybe_exhausted():
        raise DecodeError("delta: coded symbols are left over", reason="delta_trailing")
    at = 0
    for symbols, alphabet, values, size in streams:
        at = kernels.read_extra(symbols, alphabet.lowest, alphabet.extra, low, at, values)
        if size:
            np.cumsum(values + 1, out=values)
            values -= 1
            if values[-1] >= size:
                raise DecodeError(f"delta: change {values[-1]} among {size} values", reason="delta_bounds")
        elif values.max() > MAX_STEP:
            raise DecodeError(f"delta: a step of {values.max()}", reason="delta_bounds")
    return ranks, folded


def _read_symbols(decoder: Any, alphabet: Alphabet, count: int) -> I32:
    if alphabet.size == 1:
        return np.zeros(count, dtype=np.int32)
    return _decoded(decoder, alphabet.model, count)


def _decoded(decoder: Any, model: Any, count: int) -> I32:
    try:
        symbols: I32 = decoder.decode(model, count)
    except (AssertionError, ValueError) as error:  # how the range coder refuses bytes that nobody encoded
        raise DecodeError("delta: bytes that no symbols give", reason="delta_symbols") from error
    return symbols


# --- both ---------------------------------------------------------------------------------------------------


def mapped(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """`map`, as many at a time as there are threads, so that no more results wait than that. An error comes
    out when all that were begun have ended."""
    if threads <= 1:
        yield from map(function, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(threads, "delta") as pool:
        while batch := list(itertools.islice(left, threads)):
            yield from pool.map(function, batch)


def _density(count: int, size: int) -> int:
    """Which table the gaps of a bucket use: four to each doubling of the mean distance between changes."""
    spacing = size // count
    top = spacing.bit_length() - 1
    return spacing if spacing < 8 else 4 * (top - 1) + ((spacing >> (top - 2)) & 3)
