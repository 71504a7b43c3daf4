"""Segments of `protocol.delta`: runs of weights whose changes are coded together, and the tables they share.

A segment is the changed count of each bucket that changes anywhere, the range coder's words behind their
number, and the low bits that classes leave open. In the words, per bucket: which values change, then their
steps. Not for tensors, names or hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import constriction
import numpy as np

from protocol import _delta_kernels as kernels
from protocol._delta_kernels import I32, I64, U16, U32
from protocol._delta_tables import CLASSES, GAP, MAX_STEP, STEP, Alphabet, Reader, binary_model, varint
from protocol.errors import DecodeError

__all__ = ["Applied", "Tables", "Undo", "apply_segment", "encode_segments", "mapped", "read_tables"]

DENSE = 2
"""Flags instead of gaps where more than one in so many values changes. Changing breaks: every delta."""

KEPT_BYTES = 1 << 24
"""Changes that the writer keeps between its two passes, 8 bytes each."""

NOTE_BYTES = 6
"""Of one change in an `Undo`: position and old value."""

Tables = tuple[dict[int, Alphabet], dict[int, Alphabet]]
"""Steps per bucket, gaps per density."""

Undo = list[tuple[U16, U32 | slice, U16]]
"""Where in which tensor which values were."""

T = TypeVar("T")
R = TypeVar("R")


# --- writing ------------------------------------------------------------------------------------------------


@dataclass
class _Changes:
    """Changes of a segment, sorted by bucket."""

    sizes: I64  # values per bucket
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
    since = np.zeros(256, dtype=np.int64)
    buckets = np.empty(total, dtype=np.uint8)
    gaps, steps = np.empty(total, dtype=np.uint32), np.empty(total, dtype=np.uint32)
    at = 0
    for old, new in pairs:
        at = kernels.collect_changes(old, new, since, buckets, gaps, steps, at)
    changes = _Changes(since + counts, counts, np.empty_like(gaps), np.empty_like(steps))
    kernels.sort_by_bucket(buckets, gaps, steps, np.cumsum(counts) - counts, changes.gaps, changes.steps)
    for e, part in changes.buckets():
        changes.sizes[e] += int(changes.gaps[part].sum(dtype=np.int64))
    return changes


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
    densities = np.zeros(64, dtype=np.uint8)
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


@dataclass(frozen=True)
class Applied:
    """How changes are made."""

    finite: bool
    """Refuse to write what is infinite or no number."""
    undo: Undo | None
    """Learns how to put everything back."""


def read_tables(reader: Reader) -> Tables:
    active = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(32, "the buckets"), dtype=np.uint8)))
    densities = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(8, "densities"), dtype=np.uint8)))
    steps = {int(e): Alphabet.read(reader, STEP) for e in active}
    return steps, {int(d): Alphabet.read(reader, GAP) for d in densities}


def apply_segment(tensors: list[U16], reader: Reader, tables: Tables, how: Applied) -> None:
    """Changes `tensors`."""
    steps, gaps = tables
    total_values = sum(tensor.size for tensor in tensors)
    counts = np.zeros(256, dtype=np.int64)
    for e in steps:
        counts[e] = reader.number(total_values, "a count of changes")
    sizes = np.zeros(256, dtype=np.int64)
    for tensor in tensors:
        kernels.count_buckets(tensor, sizes)
    if (counts > sizes).any():
        e = int(np.argmax(counts - sizes))
        raise DecodeError(f"delta: {counts[e]} changes among {sizes[e]} values", reason="delta_bounds")
    before, folded = _read_changes(reader, counts, sizes, steps, gaps)

    ends = np.cumsum(counts)
    nexts = ends - counts
    left = np.full(256, kernels.NEVER, dtype=np.int64)
    used = counts > 0
    left[used] = before[nexts[used]]
    for tensor in tensors:
        changes = min(tensor.size, int((ends - nexts).sum()))
        room = 0
        if how.undo is not None and NOTE_BYTES * changes < tensor.nbytes:
            room = changes
        elif how.undo is not None:
            how.undo.append((tensor, slice(None), tensor.copy()))
        positions, olds = np.empty(room, dtype=np.uint32), np.empty(room, dtype=np.uint16)
        done, end = kernels.apply_changes(
            tensor, (before, folded), (left, nexts, ends), (positions, olds), how.finite
        )
        if how.undo is not None and room:
            how.undo.append((tensor, positions[:done].copy(), olds[:done].copy()))
        if end == kernels.BEYOND:
            raise DecodeError("delta: a step leaves the 16 bits of a weight", reason="delta_bounds")
        if end == kernels.NOT_FINITE:
            raise DecodeError("delta: a weight would not be finite", reason="delta_not_finite")
    if not np.array_equal(nexts, ends):
        raise DecodeError("delta: changes that meet no weight", reason="delta_bounds")


def _read_changes(
    reader: Reader, counts: I64, sizes: I64, steps: dict[int, Alphabet], gaps: dict[int, Alphabet]
) -> tuple[U32, U32]:
    """Gap before and step of each change. The low bits follow the symbols, so these come first."""
    words = reader.number(reader.left // 4, "the length of the coded symbols")
    coded = np.frombuffer(reader.take(4 * words, "coded symbols"), dtype="<u4").astype(np.uint32)
    low = np.frombuffer(reader.take(reader.left, "low bits"), dtype=np.uint8)
    decoder = constriction.stream.queue.RangeDecoder(coded)
    total = int(counts.sum())
    before, folded = np.zeros(total, dtype=np.uint32), np.empty(total, dtype=np.uint32)
    streams: list[tuple[I32, Alphabet, U32, int]] = []  # the last: size of the bucket for gaps, 0 for steps
    end = 0
    for bucket in np.flatnonzero(counts):
        e, count, size = int(bucket), int(counts[bucket]), int(sizes[bucket])
        start, end = end, end + count
        if count * DENSE <= size:
            alphabet = gaps.get(_density(count, size))
            if alphabet is None:
                raise DecodeError(f"delta: no table for {count} of {size}", reason="delta_table")
            streams.append((_read_symbols(decoder, alphabet, count), alphabet, before[start:end], size))
        elif count < size:
            flags = _decoded(decoder, binary_model(count, size), size)
            if int(flags.sum(dtype=np.int64)) != count:
                raise DecodeError(f"delta: not {count} changes among {size} values", reason="delta_bounds")
            before[start:end] = np.diff(np.flatnonzero(flags), prepend=-1) - 1
        streams.append((_read_symbols(decoder, steps[e], count), steps[e], folded[start:end], 0))

    bits = sum(int(alphabet.extra[symbols].sum(dtype=np.int64)) for symbols, alphabet, _, _ in streams)
    if (bits + 7) // 8 != low.size:
        raise DecodeError(f"delta: {bits} low bits in {low.size} bytes", reason="delta_bounds")
    if not decoder.maybe_exhausted():
        raise DecodeError("delta: coded symbols are left over", reason="delta_trailing")
    at = 0
    for symbols, alphabet, values, size in streams:
        at = kernels.read_extra(symbols, alphabet.lowest, alphabet.extra, low, at, values)
        reach = int(values.sum(dtype=np.int64)) + values.size
        if size and reach > size:
            raise DecodeError(f"delta: change {reach - 1} among {size} values", reason="delta_bounds")
        if not size and values.max() > MAX_STEP:
            raise DecodeError(f"delta: a step of {values.max()}", reason="delta_bounds")
    return before, folded


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
    """`map` on threads, that many at a time and no more than twice as many results ahead of the reader. An
    error comes out when all that were begun have ended."""
    if threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, "delta") as pool:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _density(count: int, size: int) -> int:
    """Which table the gaps of a bucket use: two to each doubling of the mean distance between changes."""
    spacing = size // count
    top = spacing.bit_length() - 1
    return 2 * top + ((spacing >> (top - 1)) & 1 if top else 0)
