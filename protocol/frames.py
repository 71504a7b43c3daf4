"""Frames on a direct stream: a 4-byte big-endian length, then that many bytes.

For every transport, so that the cap is enforced in one place and before any allocation: read exactly
`FRAME_PREFIX_BYTES`, ask `frame_length`, and only then read the payload. Fixed width means that there is no
over-long varint to guard against; a length whose sign bit is set is simply above the cap. An empty frame says
nothing and is refused, so that a peer cannot keep a reader busy with free frames. Not for gossip or DHT
values, which the network stack delimits itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import DecodeError, LimitError, LocalProtocolError

__all__ = ["FRAME_PREFIX_BYTES", "encode_frame", "encode_frames", "frame_length"]

FRAME_PREFIX_BYTES = 4


def encode_frame(payload: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Prefix and payload. Raises `LocalProtocolError` for an empty payload or one above `max_bytes`."""
    return encode_frames((payload,), max_bytes)


def encode_frames(payloads: Iterable[bytes], max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Frames in a row, each as by `encode_frame`, copied once."""
    parts: list[bytes] = []
    for payload in payloads:
        if not payload:
            raise LocalProtocolError(
                "an empty frame says nothing and is refused by receivers; send at least 1 byte"
            )
        if len(payload) > max_bytes:
            raise LocalProtocolError(
                f"a frame of {len(payload)} bytes is above the cap of {max_bytes}; split it"
            )
        parts += (len(payload).to_bytes(FRAME_PREFIX_BYTES, "big"), payload)
    return b"".join(parts)


def frame_length(prefix: bytes, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """Payload bytes that follow `prefix`: between 1 and `max_bytes`, so that reading them is safe.

    Raises `LimitError` above the cap and for zero, `DecodeError` when the prefix itself is cut short.
    """
    if len(prefix) != FRAME_PREFIX_BYTES:
        raise DecodeError(f"frame prefix has {len(prefix)} bytes, not {FRAME_PREFIX_BYTES}")
    length = int.from_bytes(prefix, "big")
    if length == 0:
        raise LimitError("the peer sent an empty frame", reason="empty_frame")
    if length > max_bytes:
        raise LimitError(
            f"the peer declares a frame of {length} bytes, the cap is {max_bytes}", reason="frame_size"
        )
    return length
