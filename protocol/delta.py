"""Base-conditioned sparse coding: bytes that turn one bf16 weight set exactly into another of equal shapes.

The receiver's own old value says how likely a weight is to change: an optimiser's step flips it only where
it is not small against the bf16 spacing at that exponent. So changes are coded per bucket of the old
exponent: how many, which (gaps between changed values of the bucket, or one flag a value where more than half
change), and the new value as a signed step in bf16 order. Tensors are laid out in `_delta_layout`, segments
coded in `_delta_segments` with the models of `_delta_tables`, loops over weights are in `_delta_kernels`.

    header   magic, base and result hash, for each tensor in order of name: same, coded, raw or tied
    tables   buckets that change; for each its steps, for each density the gaps; length of each segment
    segments coded tensors, one behind the other, in equal pieces: changed count per bucket,
             range-coded symbols, low bits
    raw      tensors whose changes would take more than their 16 bits a value

Weights are uint16 arrays of bf16 bits; every pattern is kept, NaN payloads too, unless the reader asks for
`finite`. Beyond the two weight sets, writer and reader need about 30 bytes for each change of the segment
that a thread has in work, at most 60 MB, and the writer 16 MB more. Who signed the delta, and in which chain
it stands, is not decided here. Needs the extra `node` (numba, constriction): nothing else in `protocol` may
import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from protocol._delta_kernels import U16
from protocol._delta_layout import (
    Kind,
    address,
    flat,
    kinds_of,
    packed,
    pieces,
    read_kinds,
    read_only,
    segments_of,
)
from protocol._delta_segments import Applied, apply_segment, encode_segments, mapped, read_tables
from protocol._delta_tables import Reader, varint
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import Digest

__all__ = [
    "DeltaHeader",
    "apply",
    "decode",
    "encode",
    "max_delta_bytes",
    "read_header",
    "warm_up",
    "weights_digest",
]

Weights = Mapping[str, U16]

MAGIC = b"MURD\x01"
"""Kind and version of the format. Changing breaks: every stored and travelling delta."""


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta says of itself before any of it is applied."""

    base: Digest
    result: Digest


def weights_digest(weights: Weights, *, threads: int = 1) -> Digest:
    """SHA-256 over names, shapes, and the SHA-256 of each piece of the bits, in order of name. The same for
    any number of threads; what lies in the same memory is read once. Raises LocalProtocolError for arrays
    that are not contiguous uint16."""
    names = sorted(weights)
    arrays = [flat(name, weights[name]) for name in names]
    parts = {
        (address(array), array.size, part.start): array[part]
        for array in arrays
        for part in pieces(array.size)
    }
    hashes = dict(zip(parts, mapped(_piece_hash, parts.values(), threads), strict=True))
    sha = hashlib.sha256(b"murmuration weights 1")
    for name, array in zip(names, arrays, strict=True):
        label = name.encode("utf-8", "surrogatepass")
        shape = weights[name].shape
        sha.update(b"".join(n.to_bytes(8, "little") for n in (len(label), len(shape), *shape)) + label)
        for part in pieces(array.size):
            sha.update(hashes[address(array), array.size, part.start])
    return sha.hexdigest()


def max_delta_bytes(weights: Weights) -> int:
    """No delta for these weights is longer: a full copy and its header. Longer ones need not be fetched."""
    header = len(MAGIC) + 2 * 32 + 10 + len(weights)
    return header + sum(10 + 2 * array.size for array in weights.values())


def read_header(data: bytes | memoryview) -> DeltaHeader:
    """Base and result hash, or `DecodeError`."""
    return _read_header(Reader(data))


def warm_up() -> None:
    """Compile the loops over weights, or read them compiled from numba's cache: 2 s on an idle machine the
    first time, then 0.2 s. For a moment when nobody waits; else the first delta takes so much longer."""
    base = {"coded": np.arange(4000, dtype=np.uint16), "raw": np.arange(100, dtype=np.uint16)}
    new = {"coded": base["coded"] ^ (base["coded"] % 5 == 0), "raw": base["raw"] ^ np.uint16(0x5A5A)}
    apply(base, encode(base, new))


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
    the caller knows them from a chain. Raises LocalProtocolError when names or shapes differ."""
    if base.keys() != new.keys() or any(base[name].shape != new[name].shape for name in base):
        raise LocalProtocolError("delta between weight sets of different names or shapes")
    names = sorted(base)
    pairs = [(read_only(flat(name, base[name])), read_only(flat(name, new[name]))) for name in names]
    head = MAGIC + bytes.fromhex(base_digest or weights_digest(base, threads=threads))
    head += bytes.fromhex(new_digest or weights_digest(new, threads=threads)) + varint(len(names))

    kinds, ties = kinds_of(pairs, threads)
    coded: list[bytes] = []
    segments = segments_of(kinds, [old.size for old, _ in pairs])
    if segments:
        tables, body = encode_segments(
            [[(pairs[k][0][part], pairs[k][1][part]) for k, part in pieces] for pieces in segments], threads
        )
        coded = [tables, *(varint(len(part)) for part in body), *body]
        if sum(map(len, coded)) > sum(
            2 * pairs[k][0].size for k, kind in enumerate(kinds) if kind == Kind.CODED
        ):
            coded = []  # few weights: the tables cost more than they save
            kinds = [Kind.RAW if kind == Kind.CODED else kind for kind in kinds]
    raw = [pairs[k][1].astype("<u2").tobytes() for k, kind in enumerate(kinds) if kind == Kind.RAW]
    return b"".join([head, packed(kinds), *(varint(tie) for tie in ties), *coded, *raw])


# --- reading ------------------------------------------------------------------------------------------------


def decode(
    base: Weights,
    data: bytes | memoryview,
    *,
    base_digest: Digest | None = None,
    finite: bool = False,
    threads: int = 1,
) -> dict[str, U16]:
    """The weights that `data` makes of `base`, which stays as it is. Raises `DecodeError` with the reason
    `delta_base` when the delta is for other weights, `delta_result` when what comes out is not what it names,
    with `finite` `delta_not_finite` when it writes an infinity or NaN, and another one when the bytes break
    the format. `base_digest` is what the caller knows to be the hash."""
    header = _checked(base, data, base_digest, threads)
    own = {(address(array), array.shape): array for array in base.values()}  # tied tensors stay tied
    copies = dict(zip(own, mapped(np.array, own.values(), threads), strict=True))
    new = {name: copies[address(array), array.shape] for name, array in base.items()}
    _apply(new, data, header, threads, Applied(finite, None))
    return new


def apply(
    weights: Weights,
    data: bytes | memoryview,
    *,
    base_digest: Digest | None = None,
    finite: bool = False,
    threads: int = 1,
) -> Digest:
    """`decode` in place: all or nothing, `weights` are put back when anything is wrong. Returns the hash of
    the result."""
    header = _checked(weights, data, base_digest, threads)
    how = Applied(finite, [])
    try:
        return _apply(weights, data, header, threads, how)
    except BaseException:
        for target, where, olds in reversed(how.undo or []):
            target[where] = olds
        raise


def _checked(weights: Weights, data: bytes | memoryview, digest: Digest | None, threads: int) -> DeltaHeader:
    """What the delta says of itself, when it is for these weights and not too long."""
    header = read_header(data)
    if len(data) > max_delta_bytes(weights):
        raise DecodeError(
            f"delta of {len(data)} bytes, at most {max_delta_bytes(weights)} can be", reason="delta_size"
        )
    have = digest or weights_digest(weights, threads=threads)
    if header.base != have:
        raise DecodeError(f"delta is for weights {header.base}, not {have}", reason="delta_base")
    return header


def _apply(
    weights: Weights, data: bytes | memoryview, header: DeltaHeader, threads: int, how: Applied
) -> Digest:
    reader = Reader(data)
    _read_header(reader)
    tensors = [flat(name, weights[name]) for name in sorted(weights)]
    if not all(tensor.flags.writeable for tensor in tensors):
        raise LocalProtocolError("weights that may not be written cannot take a delta; copy them first")
    _apply_body(tensors, reader, threads, how)
    result = weights_digest(weights, threads=threads)
    if result != header.result:
        raise DecodeError(f"delta gives weights {result}, it names {header.result}", reason="delta_result")
    return result


def _read_header(reader: Reader) -> DeltaHeader:
    magic = bytes(reader.take(len(MAGIC), "the format's name"))
    if magic != MAGIC:
        raise DecodeError(f"not a delta of this format: begins with {magic!r}", reason="delta_format")
    base, result = (bytes(reader.take(32, "a hash")).hex() for _ in range(2))
    return DeltaHeader(base, result)


def _apply_body(tensors: list[U16], reader: Reader, threads: int, how: Applied) -> None:
    kinds, ties = read_kinds(tensors, reader)
    segments = segments_of(kinds, [tensor.size for tensor in tensors])
    if segments:
        tables = read_tables(reader)
        lengths = [reader.number(reader.left, "the length of a segment") for _ in segments]
        parts = [Reader(reader.take(length, "a segment")) for length in lengths]

        def applied(segment: tuple[list[tuple[int, slice]], Reader]) -> None:
            pieces, part = segment
            apply_segment([tensors[k][where] for k, where in pieces], part, tables, how)

        for _ in mapped(applied, zip(segments, parts, strict=True), threads):
            pass
    for k, kind in enumerate(kinds):
        if kind == Kind.RAW:
            fresh = np.frombuffer(reader.take(2 * tensors[k].size, "a raw tensor"), dtype="<u2")
            if how.finite and ((fresh & 0x7F80) == 0x7F80).any():
                raise DecodeError("delta: a weight would not be finite", reason="delta_not_finite")
            _overwrite(tensors[k], fresh, how)
    if reader.left:
        raise DecodeError(f"{reader.left} bytes follow the delta", reason="delta_trailing")
    for k, source in ties:
        if address(tensors[k]) != address(tensors[source]):  # shared memory has changed with its source
            _overwrite(tensors[k], tensors[source], how)


def _overwrite(tensor: U16, fresh: U16, how: Applied) -> None:
    if how.undo is not None:
        how.undo.append((tensor, slice(None), tensor.copy()))
    tensor[:] = fresh


def _piece_hash(piece: U16) -> bytes:
    return hashlib.sha256(piece.astype("<u2", copy=False).data).digest()
