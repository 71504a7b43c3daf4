"""Base-conditioned sparse coding: bytes that turn one bf16 weight set exactly into another of equal shapes.

The receiver's own old value says how likely a weight is to change: an optimiser's step flips it only where
it is not small against the bf16 spacing at that exponent. So changes are coded per bucket of the old
exponent: how many, which (gaps between changed values of the bucket, or one flag a value where more than a
tenth change), and the new value as a signed step in bf16 order. Segments are in `_delta_segments`, models
in `_delta_tables`, loops over weights in `_delta_kernels`.

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
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from protocol import _delta_kernels as kernels
from protocol._delta_kernels import U16
from protocol._delta_segments import Undo, apply_segment, encode_segments, mapped, read_tables
from protocol._delta_tables import CLASSES, Reader, varint
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import Digest

__all__ = ["DeltaHeader", "apply", "decode", "encode", "read_header", "weights_digest"]

Weights = Mapping[str, U16]

MAGIC = b"MURD\x01"
"""Kind and version of the format. Changing breaks: every stored and travelling delta."""

SEGMENT_VALUES = 1 << 22
"""A segment closes at this many values. Changing breaks: where segments are expected."""


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
    coded: list[bytes] = []
    segments = _segments(kinds, [old.size for old, _ in pairs])
    if segments:
        tables, body = encode_segments(
            [[(pairs[k][0][part], pairs[k][1][part]) for k, part in pieces] for pieces in segments], threads
        )
        coded = [tables, *(varint(len(part)) for part in body), *body]
        if sum(map(len, coded)) > sum(
            2 * pairs[k][0].size for k, kind in enumerate(kinds) if kind == _Kind.CODED
        ):
            coded = []  # few weights: the tables cost more than they save
            kinds = [_Kind.RAW if kind == _Kind.CODED else kind for kind in kinds]
    raw = [pairs[k][1].astype("<u2").tobytes() for k, kind in enumerate(kinds) if kind == _Kind.RAW]
    return b"".join([head, _packed(kinds), *(varint(tie) for tie in ties), *coded, *raw])


def _packed(kinds: list[_Kind]) -> bytes:
    """Two bits for each tensor, the first in the lowest."""
    padded = np.zeros(-(-len(kinds) // 4) * 4, dtype=np.uint8)
    padded[: len(kinds)] = kinds
    quads = padded.reshape(-1, 4)
    return (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).astype(np.uint8).tobytes()


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
    undo: Undo = []
    try:
        return _apply(weights, data, base_digest or weights_digest(weights), threads, undo)
    except BaseException:
        for target, where, olds in reversed(undo):
            target[where] = olds
        raise


def _apply(weights: Weights, data: bytes, have: Digest, threads: int, undo: Undo | None) -> Digest:
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


def _apply_body(tensors: list[U16], reader: Reader, threads: int, undo: Undo | None) -> None:
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
        tables = read_tables(reader)
        lengths = [reader.number(1 << 48, "the length of a segment") for _ in segments]
        parts = [Reader(reader.take(length, "a segment")) for length in lengths]

        def applied(segment: tuple[list[tuple[int, slice]], Reader]) -> None:
            pieces, part = segment
            apply_segment([tensors[k][where] for k, where in pieces], part, tables, undo)

        for _ in mapped(applied, zip(segments, parts, strict=True), threads):
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


def _flat(name: str, array: U16) -> U16:
    if array.dtype != np.uint16 or not array.flags.c_contiguous:
        raise LocalProtocolError(f"{name}: bf16 weights are contiguous uint16 arrays, not {array.dtype}")
    return array.reshape(-1)
