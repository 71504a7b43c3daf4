"""Base-conditioned sparse coding: bytes that turn one bf16 weight set exactly into another of equal shapes.

The receiver's own old value says how likely a weight is to change: an optimiser's step flips it only where
it is not small against the bf16 spacing at that exponent. So changes are coded per bucket of the old
exponent: how many, which (gaps between changed values of the bucket, or one flag a value where more than a
tenth change), and the new value as a signed step in bf16 order. Models are in `_delta_tables`, loops over
weights in `_delta_kernels`.

    header   magic, base and result hash, for each tensor in order of name: same, coded, raw or tied
    tables   buckets that change; for each its steps, for each density the gaps; length of each segment
    segments runs of coded tensors: changed count per bucket, range-coded symbols, low bits
    raw      tensors whose changes would take more than their 16 bits a value

Weights are uint16 arrays of bf16 bits; every pattern is kept, NaN payloads too. Whether a weight *should* be
NaN, who signed the delta, and in which chain it stands is not decided here. Needs the extra `node` (numba,
constriction): nothing else in `protocol` may import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import constriction  # type: ignore[import-untyped]
import numpy as np

from protocol import _delta_kernels as kernels
from protocol._delta_kernels import I32, I64, U16, U32
from protocol._delta_tables import CLASSES, GAP, MAX_STEP, STEP, Alphabet, Reader, binary_model, varint
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import Digest

__all__ = ["DeltaHeader", "apply", "decode", "encode", "read_header", "weights_digest"]

Weights = Mapping[str, U16]

MAGIC = b"MURD\x01"
"""Kind and version of the format. Changing breaks: every stored and travelling delta."""

SEGMENT_VALUES = 1 << 22
"""A segment closes at this many values. Changing breaks: where segments are expected."""

DENSE = 10
"""Flags instead of gaps where more than one in so many values changes. Changing breaks: every delta."""


KEPT_BYTES = 1 << 24
"""Changes that the writer keeps between its two passes, 8 bytes each."""

_Undo = list[tuple[U16, U32 | slice, U16]]
"""Where in which tensor which values were."""

T = TypeVar("T")
R = TypeVar("R")


class _Kind(IntEnum):
    SAME, CODED, RAW, TIED = range(4)


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta says of itself before any of it is applied."""

    base: Digest
    result: Digest


def weights_digest(weights: Weights) -> Digest:
    """SHA-256 over names, shapes and bits, in order of name."""
    sha = hashlib.sha256(b"murmuration weights 1")
    for name in sorted(weights):
        label = name.encode("utf-8", "surrogatepass")
        shape = weights[name].shape
        sha.update(b"".join(n.to_bytes(8, "little") for n in (len(label), len(shape), *shape)) + label)
        sha.update(_flat(name, weights[name]).astype("<u2", copy=False).data)
    return sha.hexdigest()


def read_header(data: bytes) -> DeltaHeader:
    """Base and result hash, or `DecodeError`."""
    reader = Reader(data)
    return _read_header(reader)


# --- writing ------------------------------------------------------------------------------------------------


def encode(
    base: Weights,
    new: Weights,
    *,
    base_digest: Digest | None = None,
    new_digest: Digest | None = None,
    threads: int = 1,
) -> bytes:
    """The delta from `base` to `new`, the same bytes for any number of threads. Digests are computed unless
    the caller knows them from a chain."""
    if base.keys() != new.keys() or any(base[name].shape != new[name].shape for name in base):
        raise LocalProtocolError("delta between weight sets of different names or shapes")
    names = sorted(base)
    pairs = [(_flat(name, base[name]), _flat(name, new[name])) for name in names]
    head = MAGIC + bytes.fromhex(base_digest or weights_digest(base))
    head += bytes.fromhex(new_digest or weights_digest(new)) + varint(len(names))

    kinds: list[_Kind] = []
    ties: list[int] = []
    for index, (old, fresh) in enumerate(pairs):
        kind = _kind_of(old, fresh)
        if kind in (_Kind.CODED, _Kind.RAW):
            tie = next((k for k in range(index) if kinds[k] == kind and _equal(pairs, k, index)), None)
            if tie is not None:
                kind = _Kind.TIED
                ties.append(tie)
        kinds.append(kind)
    packed = np.zeros(-(-len(kinds) // 4) * 4, dtype=np.uint8)
    packed[: len(kinds)] = kinds
    quads = packed.reshape(-1, 4)
    head += (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).astype(np.uint8).tobytes()
    head += b"".join(varint(tie) for tie in ties)

    segments = _segments(kinds, [old.size for old, _ in pairs])
    body: list[bytes] = []
    if segments:
        tables, body = _encode_segments(
            [[(pairs[k][0][part], pairs[k][1][part]) for k, part in pieces] for pieces in segments], threads
        )
        head += tables + b"".join(varint(len(part)) for part in body)
    raw = [pairs[k][1].astype("<u2").tobytes() for k, kind in enumerate(kinds) if kind == _Kind.RAW]
    return b"".join([head, *body, *raw])


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


def _encode_segments(segments: list[list[tuple[U16, U16]]], threads: int) -> tuple[bytes, list[bytes]]:
    """Two passes: histograms of all segments, which make the tables, then symbols. Changes of the first pass
    are kept up to `KEPT_BYTES`, and found again beyond."""
    spare = KEPT_BYTES
    kept: list[_Changes | None] = []
    step_counts: dict[int, I64] = {}
    gap_counts: dict[int, I64] = {}
    every_class = Alphabet.fitted_to_classes(np.ones(CLASSES, dtype=np.int64))
    for changes in _mapped(_changes_of, segments, threads):
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

    return tables, list(_mapped(encoded, zip(segments, kept, strict=True), threads))


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


def _kind_of(old: U16, new: U16) -> _Kind:
    changed = int(np.count_nonzero(old != new))
    if changed == 0:
        return _Kind.SAME
    if 2 * changed < old.size:
        return _Kind.CODED
    classes = np.zeros(CLASSES, dtype=np.int64)
    kernels.count_classes(old, new, classes)
    used = np.flatnonzero(classes)
    opened = np.where(used < 8, 0, used // 4 - 1)
    bits = float((classes[used] * (opened + np.log2(changed / classes[used]))).sum())
    same = old.size - changed
    for part in (changed, same):
        bits += part * float(np.log2(old.size / part)) if part else 0.0
    return _Kind.RAW if bits >= 16 * old.size else _Kind.CODED


def _equal(pairs: list[tuple[U16, U16]], one: int, other: int) -> bool:
    """Whether two tensors are tied: the same before and after. A look at the first values settles most."""
    for a, b in zip(pairs[one], pairs[other], strict=True):
        if a.size != b.size or not np.array_equal(a[:64], b[:64]) or not np.array_equal(a, b):
            return False
    return True


# --- reading ------------------------------------------------------------------------------------------------


def decode(
    base: Weights, data: bytes, *, base_digest: Digest | None = None, threads: int = 1
) -> dict[str, U16]:
    """The weights that `data` makes of `base`, which stays as it is. Raises `DecodeError` with the reason
    `delta_base` when the delta is for other weights, `delta_result` when what comes out is not what it names,
    and another one when the bytes break the format. `base_digest` is what the caller knows to be the hash."""
    have = base_digest or weights_digest(base)
    new: dict[str, U16] = {}
    for name, array in base.items():  # tied tensors stay tied
        tie = next((other for other, seen in base.items() if other in new and seen is array), None)
        new[name] = array.copy() if tie is None else new[tie]
    _apply(new, data, have, threads, None)
    return new


def apply(weights: Weights, data: bytes, *, base_digest: Digest | None = None, threads: int = 1) -> Digest:
    """`decode` in place: all or nothing, `weights` are put back when anything is wrong. Returns the hash of
    the result."""
    undo: _Undo = []
    try:
        return _apply(weights, data, base_digest or weights_digest(weights), threads, undo)
    except BaseException:
        for target, where, olds in reversed(undo):
            target[where] = olds
        raise


def _apply(weights: Weights, data: bytes, have: Digest, threads: int, undo: _Undo | None) -> Digest:
    reader = Reader(data)
    header = _read_header(reader)
    if header.base != have:
        raise DecodeError(f"delta is for weights {header.base}, not {have}", reason="delta_base")
    _apply_body([_flat(name, weights[name]) for name in sorted(weights)], reader, threads, undo)
    result = weights_digest(weights)
    if result != header.result:
        raise DecodeError(f"delta gives weights {result}, it names {header.result}", reason="delta_result")
    return result


def _read_header(reader: Reader) -> DeltaHeader:
    magic = bytes(reader.take(len(MAGIC), "the format's name"))
    if magic != MAGIC:
        raise DecodeError(f"not a delta of this format: begins with {magic!r}", reason="delta_format")
    base, result = (bytes(reader.take(32, "a hash")).hex() for _ in range(2))
    return DeltaHeader(base, result)


def _apply_body(tensors: list[U16], reader: Reader, threads: int, undo: _Undo | None) -> None:
    count = reader.number(1 << 32, "the number of tensors")
    if count != len(tensors):
        raise DecodeError(f"delta of {count} tensors for {len(tensors)}", reason="delta_shape")
    quads = np.frombuffer(reader.take(-(-count // 4), "the kinds of tensors"), dtype=np.uint8)
    flat = np.stack([quads >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)
    if flat[count:].any():
        raise DecodeError("delta: kinds beyond the last tensor", reason="delta_shape")
    kinds = [_Kind(int(kind)) for kind in flat[:count]]
    ties = [
        (k, reader.number(max(k - 1, 0), "a tied tensor"))
        for k, kind in enumerate(kinds)
        if kind == _Kind.TIED
    ]
    for k, source in ties:
        if source >= k or tensors[k].size != tensors[source].size:
            raise DecodeError(f"delta: tensor {k} cannot be tied to {source}", reason="delta_shape")

    segments = _segments(kinds, [tensor.size for tensor in tensors])
    if segments:
        steps, gaps = _read_tables(reader)
        lengths = [reader.number(1 << 48, "the length of a segment") for _ in segments]
        parts = [Reader(reader.take(length, "a segment")) for length in lengths]

        def applied(segment: tuple[list[tuple[int, slice]], Reader]) -> None:
            pieces, part = segment
            _apply_segment([tensors[k][where] for k, where in pieces], part, steps, gaps, undo)

        for _ in _mapped(applied, zip(segments, parts, strict=True), threads):
            pass
    for k, kind in enumerate(kinds):
        if kind == _Kind.RAW:
            fresh = np.frombuffer(reader.take(2 * tensors[k].size, "a raw tensor"), dtype="<u2")
            if undo is not None:
                undo.append((tensors[k], slice(None), tensors[k].copy()))
            tensors[k][:] = fresh
    if reader.left:
        raise DecodeError(f"{reader.left} bytes follow the delta", reason="delta_trailing")
    for k, source in ties:
        if tensors[k].ctypes.data != tensors[source].ctypes.data:  # shared memory has changed with its source
            if undo is not None:
                undo.append((tensors[k], slice(None), tensors[k].copy()))
            tensors[k][:] = tensors[source]


def _read_tables(reader: Reader) -> tuple[dict[int, Alphabet], dict[int, Alphabet]]:
    active = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(32, "the buckets"), dtype=np.uint8)))
    densities = np.flatnonzero(np.unpackbits(np.frombuffer(reader.take(16, "densities"), dtype=np.uint8)))
    steps = {int(e): Alphabet.read(reader, STEP) for e in active}
    return steps, {int(d): Alphabet.read(reader, GAP) for d in densities}


def _apply_segment(
    tensors: list[U16],
    reader: Reader,
    steps: dict[int, Alphabet],
    gaps: dict[int, Alphabet],
    undo: _Undo | None,
) -> None:
    total_values = sum(tensor.size for tensor in tensors)
    counts = np.zeros(256, dtype=np.int64)
    for e in steps:
        counts[e] = reader.number(total_values, "a count of changes")
    wanted = (counts > 0).astype(np.uint8)
    sizes = np.zeros(256, dtype=np.int64)
    for tensor in tensors:
        kernels.count_buckets(tensor, wanted, sizes)
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


def _segments(kinds: list[_Kind], sizes: list[int]) -> list[list[tuple[int, slice]]]:
    """Coded tensors in runs of less than two segments' values, large ones in pieces; both sides derive them
    from kinds and sizes."""
    segments: list[list[tuple[int, slice]]] = []
    values = SEGMENT_VALUES
    for k, kind in enumerate(kinds):
        if kind != _Kind.CODED:
            continue
        for start in range(0, sizes[k], SEGMENT_VALUES):
            if values >= SEGMENT_VALUES:
                segments.append([])
                values = 0
            end = min(start + SEGMENT_VALUES, sizes[k])
            segments[-1].append((k, slice(start, end)))
            values += end - start
    return segments


def _mapped(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterable[R]:
    """`map`; with threads all are done, or the first error is raised after all have ended."""
    if threads <= 1:
        return map(function, items)
    with ThreadPoolExecutor(threads, "delta") as pool:
        return list(pool.map(function, items))


def _density(count: int, size: int) -> int:
    """Which table the gaps of a bucket use: four to each doubling of the mean distance between changes."""
    spacing = size // count
    top = spacing.bit_length() - 1
    return spacing if spacing < 8 else 4 * (top - 1) + ((spacing >> (top - 2)) & 3)


def _flat(name: str, array: U16) -> U16:
    if array.dtype != np.uint16 or not array.flags.c_contiguous:
        raise LocalProtocolError(f"{name}: bf16 weights are contiguous uint16 arrays, not {array.dtype}")
    return array.reshape(-1)
