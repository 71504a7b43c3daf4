"""How blobs are cut and hashed, and the frames of an exchange."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chunks import (
    MAX_ASKED,
    Cancel,
    Got,
    Have,
    Piece,
    Pull,
    Tell,
    bitmap_of,
    check_hashes,
    chunk_bytes_for,
    chunk_count,
    chunk_size,
    decode_from_downloader,
    decode_from_uploader,
    describe,
    encode_frame,
    indices_of,
    max_frame_bytes,
)
from protocol.constants import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_FRAME_BYTES,
    MAX_WEIGHTS_BYTES,
    MIN_CHUNK_BYTES,
)
from protocol.errors import DecodeError, LocalProtocolError, RemoteProtocolError
from protocol.messages import ChunkedBlob

KIB = 1 << 10
BLOB = ChunkedBlob("0" * 64, 16 * KIB * 10 - 5, 16 * KIB)


@given(st.integers(1, MAX_WEIGHTS_BYTES))
def test_chunks_are_powers_of_two_within_the_limits(size):
    chunk_bytes = chunk_bytes_for(size)
    assert MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES
    assert chunk_bytes & (chunk_bytes - 1) == 0
    blob = ChunkedBlob("0" * 64, size, chunk_bytes)
    count = chunk_count(blob)
    assert 1 <= count <= MAX_CHUNKS
    assert (count - 1) * chunk_bytes + chunk_size(blob, count - 1) == size
    assert 1 <= chunk_size(blob, count - 1) <= chunk_bytes
    assert max_frame_bytes(blob) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("size", [0, -1, MAX_WEIGHTS_BYTES + 1])
def test_sizes_that_cannot_travel_are_our_error(size):
    with pytest.raises(LocalProtocolError, match=str(size)):
        chunk_bytes_for(size)


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "reason"),
    [(KIB, 16 * KIB + 1, "chunk_size"), (MAX_WEIGHTS_BYTES, 512 * KIB, "chunk_count")],
)
def test_blob_in_odd_or_too_many_chunks_is_refused(size, chunk_bytes, reason):
    with pytest.raises(DecodeError) as refused:
        chunk_count(ChunkedBlob("0" * 64, size, chunk_bytes))
    assert refused.value.reason == reason


def test_root_binds_size_chunk_size_and_hashes():
    blob, hashes = describe(20 * KIB, [bytes(16 * KIB), bytes(4 * KIB)])
    check_hashes(blob, hashes)
    for other, other_hashes in (
        (blob, hashes[:-1] + b"\x00"),
        (blob, hashes[:-32]),
        (ChunkedBlob(blob.root, blob.size - 1, blob.chunk_bytes), hashes),
        (ChunkedBlob(blob.root, blob.size, 2 * blob.chunk_bytes), hashes[:32]),
    ):
        with pytest.raises(DecodeError) as refused:
            check_hashes(other, other_hashes)
        assert refused.value.reason == "chunk_hashes"


@pytest.mark.parametrize("frame", [Have(()), Have((0, 9)), Piece(3, bytes(16 * KIB)), Tell()])
def test_uploaders_frames_come_back(frame):
    data = encode_frame(frame)
    assert decode_from_uploader(data, BLOB) == frame
    assert len(data) <= max_frame_bytes(BLOB)
    with pytest.raises(DecodeError) as refused:
        decode_from_downloader(data, BLOB)
    assert refused.value.reason == "frame_kind"


@pytest.mark.parametrize("frame", [Pull(0, ()), Pull(2**32 - 1, (5,)), Cancel((1, 2)), Got(tuple(range(10)))])
def test_downloaders_frames_come_back(frame):
    data = encode_frame(frame)
    assert decode_from_downloader(data, BLOB) == frame
    with pytest.raises(DecodeError) as refused:
        decode_from_uploader(data, BLOB)
    assert refused.value.reason == "frame_kind"


def test_bytes_of_the_frames():
    assert encode_frame(Have((1, 256))).hex() == "010100000000010000"
    assert encode_frame(Piece(2, b"ab")).hex() == "02020000006162"
    assert encode_frame(Tell()).hex() == "03"
    assert encode_frame(Pull(7, (1,))).hex() == "040700000001000000"
    assert encode_frame(Cancel((1,))).hex() == "0501000000"
    assert encode_frame(Got((1,))).hex() == "0601000000"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "frame_kind"),
        (b"\x07", "frame_kind"),
        (b"\x03\x00", "frame_kind"),
        (b"\x02\x00\x00\x00", "frame_size"),
        (b"\x01\x00", "frame_size"),
        (encode_frame(Have((10,))), "chunk_index"),
        (encode_frame(Have((0,) * 11)), "frame_size"),
        (encode_frame(Piece(10, bytes(16 * KIB))), "chunk_index"),
        (encode_frame(Piece(9, bytes(16 * KIB))), "chunk_size"),
        (encode_frame(Piece(0, b"")), "chunk_size"),
    ],
)
def test_bad_frames_of_uploaders_are_refused(data, reason):
    with pytest.raises(DecodeError) as refused:
        decode_from_uploader(data, BLOB)
    assert refused.value.reason == reason


def test_too_many_chunks_asked_for_are_refused():
    with pytest.raises(DecodeError) as refused:
        decode_from_downloader(encode_frame(Pull(0, (1,) * (MAX_ASKED + 1))), BLOB)
    assert refused.value.reason == "frame_size"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(data):
    for decode in (decode_from_uploader, decode_from_downloader):
        try:
            frame = decode(data, BLOB)
        except RemoteProtocolError:
            continue
        assert encode_frame(frame) == data


@given(st.integers(1, 70), st.data())
def test_bitmaps_come_back(count, data):
    indices = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    assert indices_of(bitmap_of(indices, count), count) == indices


@pytest.mark.parametrize(("bitmap", "reason"), [(b"\xff", "have_size"), (b"\xff\x04", "chunk_index")])
def test_bitmaps_that_do_not_fit_are_refused(bitmap, reason):
    with pytest.raises(DecodeError) as refused:
        indices_of(bitmap, 10)
    assert refused.value.reason == reason
