"""Bytes <-> records: one canonical msgpack form, read with the suspicion that a stranger's bytes deserve.

Canonical: a map with every field in the order of its declaration, integers and lengths in their shortest
form, floats in 64 bits, no NaN or infinity, text in valid UTF-8. So equal records are equal bytes, and a hash
or a signature over them means one thing.

Reading goes from cheap to dear, and no step trusts a length before it is checked: size cap, a walk over the
bytes without recursion or allocation (`_scan`), msgpack with limits, strict conversion to the record's types,
and encoding again, which must give the very bytes that came. Not for signatures (`envelope`) or streams
(`frames`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from typing import Any, NoReturn, TypeVar

import msgpack
import msgspec

from protocol.constants import DOMAIN, MAX_DEPTH, MAX_ITEMS, PROTOCOL_VERSION
from protocol.errors import DecodeError, LimitError, LocalProtocolError
from protocol.messages import Digest, Record

__all__ = ["decode", "digest", "encode", "framed", "shown"]

R = TypeVar("R", bound=Record)

MAX_SHOWN_CHARS = 64
"""How much of a peer's bytes an error message may carry."""

_encoder = msgspec.msgpack.Encoder()


def encode(record: Record) -> bytes:
    """The canonical bytes of `record`. Raises `LocalProtocolError` when a field breaks its own type or bound,
    which records built in Python do not check; an int in a float field becomes a float."""
    try:
        checked = _decoder(type(record)).decode(_encoder.encode(record))
        data = _encoder.encode(checked)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"this {type(record).__name__} must not be sent: {_brief(error)}") from error
    try:
        _scan(data)
    except (DecodeError, LimitError) as error:
        raise LocalProtocolError(f"this {type(record).__name__} must not be sent: {error}") from error
    return data


def decode(data: bytes, record_type: type[R], *, max_bytes: int) -> R:
    """The record in `data`, or `LimitError` (too large, too many values) or `DecodeError` (everything
    else)."""
    name = record_type.__name__
    if len(data) > max_bytes:
        raise LimitError(f"{name} of {len(data)} bytes is above the cap of {max_bytes}", reason="size")
    _scan(data)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            unicode_errors="strict",
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_unique_pairs,
            ext_hook=_refuse_extension,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"{name} is not msgpack: {_brief(error)}") from None
    try:
        record = msgspec.convert(value, record_type, strict=True)
        canonical = _encoder.encode(record)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"{name} does not fit its type: {_brief(error)}") from None
    if canonical != data:
        raise DecodeError(
            f"{name} is not in canonical form: {len(data)} bytes came, {len(canonical)} expected"
        )
    return record


def digest(data: bytes) -> Digest:
    """SHA-256 of `data` as 64 lower-case hex characters."""
    return hashlib.sha256(data).hexdigest()


def framed(purpose: str, *fields: bytes) -> bytes:
    """What is signed or hashed: domain, protocol version, purpose and fields, each behind its 8-byte length.

    No two different inputs give the same bytes, and bytes made for one purpose fit no other.
    """
    parts = (DOMAIN, str(PROTOCOL_VERSION).encode("ascii"), purpose.encode("ascii"), *fields)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def shown(value: str | bytes) -> str:
    """A peer's text or bytes for an error message: at most 64 characters of it, quoted and escaped."""
    cut = value[:MAX_SHOWN_CHARS]
    return repr(cut) if len(cut) == len(value) else f"{cut!r}…"


@functools.lru_cache(maxsize=64)
def _decoder(record_type: type[R]) -> msgspec.msgpack.Decoder[R]:
    return msgspec.msgpack.Decoder(record_type, strict=True)


def _brief(error: Exception) -> str:
    """The error's text, with what it quotes from a peer cut short. UnicodeDecodeError would print all
    bytes."""
    if isinstance(error, UnicodeError):
        return "text is not valid UTF-8"
    text = str(error)
    for opening in ("Object contains unknown field ", "Invalid enum value "):
        if text.startswith(opening):
            return opening + shown(text[len(opening) :].strip("`'"))
    return repr(text[:160]).strip("'\"")


def _unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a map has the same key twice")
    return fields


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not part of the protocol")


# --- the walk before decoding -------------------------------------------------------------------------------
# For each first byte: what kind of value, how many bytes of length or payload follow it directly.

_SCALAR, _TEXT, _BINARY, _ARRAY, _MAP, _FLOAT, _REFUSED = range(7)


def _table() -> tuple[tuple[int, int, int], ...]:
    """256 rows of (kind, bytes after the first one, count in the first byte or -1 when it is in those
    bytes)."""
    rows: list[tuple[int, int, int]] = []
    for first in range(256):
        if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            rows.append((_SCALAR, 0, 0))
        elif first <= 0x8F:
            rows.append((_MAP, 0, first & 0x0F))
        elif first <= 0x9F:
            rows.append((_ARRAY, 0, first & 0x0F))
        elif first <= 0xBF:
            rows.append((_TEXT, 0, first & 0x1F))
        elif 0xC4 <= first <= 0xC6:
            rows.append((_BINARY, 1 << (first - 0xC4), -1))
        elif first == 0xCB:
            rows.append((_FLOAT, 8, 0))
        elif 0xCC <= first <= 0xCF:
            rows.append((_SCALAR, 1 << (first - 0xCC), 0))
        elif 0xD0 <= first <= 0xD3:
            rows.append((_SCALAR, 1 << (first - 0xD0), 0))
        elif 0xD9 <= first <= 0xDB:
            rows.append((_TEXT, 1 << (first - 0xD9), -1))
        elif first in (0xDC, 0xDD):
            rows.append((_ARRAY, 2 << (first - 0xDC), -1))
        elif first in (0xDE, 0xDF):
            rows.append((_MAP, 2 << (first - 0xDE), -1))
        else:  # unused, extensions, 32-bit floats
            rows.append((_REFUSED, 0, 0))
    return tuple(rows)


_TABLE = _table()
_float64 = struct.Struct(">d").unpack_from


def _scan(data: bytes) -> None:
    """Walk over one msgpack value and refuse what must not reach a decoder.

    Iterative, with one small integer per open container, so neither nesting nor a declared count can use
    memory or stack: a count above what the remaining bytes could hold is refused where it stands. The cost is
    at most MAX_ITEMS turns of the loop.
    """
    size = len(data)
    at = 0
    items = 0
    open_counts: list[int] = []  # values still to come in each open container
    remaining = 1
    while True:
        if remaining == 0:
            if not open_counts:
                break
            remaining = open_counts.pop()
            continue
        remaining -= 1
        items += 1
        if items > MAX_ITEMS:
            raise LimitError(f"a message holds more than {MAX_ITEMS} values", reason="items")
        if at >= size:
            raise DecodeError(f"the message ends early, after {size} bytes")
        kind, extra, count = _TABLE[data[at]]
        start = at + 1
        at = start + extra
        if at > size:
            raise DecodeError(f"the message ends early, inside the value at byte {start - 1} of {size}")
        if kind == _SCALAR:
            continue
        if count < 0:
            count = int.from_bytes(data[start:at], "big")
        if kind in (_TEXT, _BINARY):
            at += count
            if at > size:
                raise DecodeError(
                    f"the value at byte {start - 1} declares {count} bytes, {size - start} are left"
                )
        elif kind in (_ARRAY, _MAP):
            values = count if kind == _ARRAY else 2 * count
            if values > size - at:
                raise DecodeError(
                    f"the value at byte {start - 1} declares {count} entries, {size - at} bytes are left"
                )
            if len(open_counts) + 1 > MAX_DEPTH:
                raise DecodeError(f"a message is nested deeper than {MAX_DEPTH} levels", reason="depth")
            open_counts.append(remaining)
            remaining = values
        elif kind == _FLOAT:
            if not math.isfinite(_float64(data, start)[0]):
                raise DecodeError(f"the number at byte {start - 1} is not finite", reason="not_finite")
        else:
            raise DecodeError(
                f"type byte 0x{data[start - 1]:02x} at byte {start - 1} is not part of the protocol"
            )
    if at != size:
        raise DecodeError(f"{size - at} bytes follow the end of the message")
