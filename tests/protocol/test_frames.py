"""Length prefixes of stream frames."""

from __future__ import annotations

import pytest

from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import DecodeError, LimitError, LocalProtocolError
from protocol.frames import FRAME_PREFIX_BYTES, encode_frame, frame_length


def test_frame_is_a_big_endian_length_and_the_payload() -> None:
    assert encode_frame(b"abc") == b"\x00\x00\x00\x03abc"
    assert encode_frame(bytes(258))[:FRAME_PREFIX_BYTES] == b"\x00\x00\x01\x02"


@pytest.mark.parametrize("length", [1, 255, 65_536, MAX_FRAME_BYTES])
def test_length_is_read_back(length: int) -> None:
    assert frame_length(length.to_bytes(4, "big")) == length


def test_cap_is_inclusive() -> None:
    assert frame_length(b"\x00\x00\x00\x0a", max_bytes=10) == 10
    with pytest.raises(LimitError, match="11 bytes, the cap is 10"):
        frame_length(b"\x00\x00\x00\x0b", max_bytes=10)


@pytest.mark.parametrize("prefix", [b"", b"\x00", b"\x00\x00\x01", b"\x00\x00\x00\x00\x01"])
def test_cut_prefix_is_refused(prefix: bytes) -> None:
    with pytest.raises(DecodeError, match=f"{len(prefix)} bytes, not 4"):
        frame_length(prefix)


def test_own_frames_are_within_bounds() -> None:
    with pytest.raises(LocalProtocolError, match="empty"):
        encode_frame(b"")
    with pytest.raises(LocalProtocolError, match="11 bytes is above the cap of 10"):
        encode_frame(bytes(11), max_bytes=10)
