"""How the tensors of a delta are laid out: kinds, ties, and the pieces of them that make a segment.

For: what `protocol.delta` decides for each tensor as a whole and both sides derive from sizes alone. Not for
single weights (`_delta_kernels`), coded changes (`_delta_segments`) or hashes.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from protocol import _delta_kernels as kernels
from protocol._delta_kernels import U16
from protocol._delta_segments import mapped
from protocol._delta_tables import CLASSES, Reader
from protocol.errors import DecodeError, LocalProtocolError

__all__ = [
    "Kind",
    "address",
    "flat",
    "kinds_of",
    "packed",
    "pieces",
    "read_kinds",
    "read_only",
    "segments_of",
]

SEGMENT_VALUES = 1 << 21
"""Values of one segment, and of one piece that is hashed: many pieces keep all threads busy, and little of
the weights is in work at a time. Changing breaks: every delta and every hash of weights."""


class Kind(IntEnum):
    SAME, CODED, RAW, TIED = range(4)


def kinds_of(pairs: list[tuple[U16, U16]], threads: int) -> tuple[list[Kind], list[int]]:
    """How each tensor is coded, and the earlier tensor that each tied one equals before and after."""
    kinds = list(mapped(lambda pair: _kind_of(*pair), pairs, threads))
    ties: list[int] = []
    seen: dict[tuple[int, bytes, bytes], list[int]] = {}  # size and first values settle nearly all
    for k, (old, new) in enumerate(pairs):
        if kinds[k] == Kind.SAME:
            continue
        alike = seen.setdefault((old.size, old[:64].tobytes(), new[:64].tobytes()), [])
        tie = next((other for other in alike if _equal(pairs[other], pairs[k])), None)
        if tie is None:
            alike.append(k)
        else:
            kinds[k] = Kind.TIED
            ties.append(tie)
    return kinds, ties


def _kind_of(old: U16, new: U16) -> Kind:
    changed = int(np.count_nonzero(old != new))
    if changed == 0:
        return Kind.SAME
    if 2 * changed < old.size:
        return Kind.CODED
    classes = np.zeros(CLASSES, dtype=np.int64)
    kernels.count_classes(old, new, classes)
    used = np.flatnonzero(classes)
    opened = np.where(used < 8, 0, used // 4 - 1)
    bits = float((classes[used] * (opened + np.log2(changed / classes[used]))).sum())
    same = old.size - changed
    for part in (changed, same):
        bits += part * float(np.log2(old.size / part)) if part else 0.0
    return Kind.RAW if bits >= 16 * old.size else Kind.CODED


def _equal(one: tuple[U16, U16], other: tuple[U16, U16]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(address(a) == address(b) or np.array_equal(a, b) for a, b in pairs)


def packed(kinds: list[Kind]) -> bytes:
    """Two bits for each tensor, the first in the lowest."""
    padded = np.zeros(-(-len(kinds) // 4) * 4, dtype=np.uint8)
    padded[: len(kinds)] = kinds
    quads = padded.reshape(-1, 4)
    return (quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6).astype(np.uint8).tobytes()


def read_kinds(tensors: list[U16], reader: Reader) -> tuple[list[Kind], list[tuple[int, int]]]:
    """How each tensor is coded; which tensor is tied to which."""
    count = reader.number(1 << 32, "the number of tensors")
    if count != len(tensors):
        raise DecodeError(f"delta of {count} tensors for {len(tensors)}", reason="delta_shape")
    quads = np.frombuffer(reader.take(-(-count // 4), "the kinds of tensors"), dtype=np.uint8)
    each = np.stack([quads >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)
    if each[count:].any():
        raise DecodeError("delta: kinds beyond the last tensor", reason="delta_shape")
    kinds = [Kind(int(kind)) for kind in each[:count]]
    written = [address(tensors[k]) for k, kind in enumerate(kinds) if kind in (Kind.CODED, Kind.RAW)]
    if len(set(written)) < len(written):  # threads would change it at once, and undo in the wrong order
        raise DecodeError("delta: changes tied tensors one by one", reason="delta_shape")
    ties: list[tuple[int, int]] = []
    for k, kind in enumerate(kinds):
        if kind == Kind.TIED:
            source = reader.number(max(k - 1, 0), "a tied tensor")
            if source >= k or tensors[k].size != tensors[source].size:
                raise DecodeError(f"delta: tensor {k} cannot be tied to {source}", reason="delta_shape")
            ties.append((k, source))
    return kinds, ties


def segments_of(kinds: list[Kind], sizes: list[int]) -> list[list[tuple[int, slice]]]:
    """Which parts of which tensors each segment has; both sides derive it from kinds and sizes."""
    segments: list[list[tuple[int, slice]]] = []
    room = 0
    for k, kind in enumerate(kinds):
        at = 0
        while kind == Kind.CODED and at < sizes[k]:
            if room == 0:
                segments.append([])
                room = SEGMENT_VALUES
            end = min(at + room, sizes[k])
            segments[-1].append((k, slice(at, end)))
            room -= end - at
            at = end
    return segments


def pieces(size: int) -> list[slice]:
    """So many values in pieces of `SEGMENT_VALUES`."""
    return [slice(start, start + SEGMENT_VALUES) for start in range(0, size, SEGMENT_VALUES)]


def read_only(array: U16) -> U16:
    """The loops are compiled for each kind of array, so the writer shows them one kind."""
    view = array.view()
    view.flags.writeable = False
    return view


def address(array: U16) -> int:
    return int(array.ctypes.data)


def flat(name: str, array: U16) -> U16:
    if array.dtype != np.uint16 or not array.flags.c_contiguous:
        raise LocalProtocolError(f"{name}: bf16 weights are contiguous uint16 arrays, not {array.dtype}")
    return array.reshape(-1)
