"""Canonical bytes of records, against hand-written msgpack."""

from __future__ import annotations

import math

import msgspec
import pytest

from protocol import messages as m
from protocol.codec import decode, digest, encode, framed, shown
from protocol.errors import DecodeError, LimitError, LocalProtocolError
from tests.protocol.samples import ANNOUNCEMENT, GROUP, RECORDS, SWARM_ID

CAP = 1 << 20
BLOB_REF = m.BlobRef(digest="e" * 64, size=300)
# fixmap of 2, fixstr "digest", str8 of 64, fixstr "size", uint16 300
BLOB_REF_BYTES = b"\x82\xa6digest\xd9\x40" + b"e" * 64 + b"\xa4size\xcd\x01\x2c"


def test_bytes_are_a_map_in_order_of_declaration() -> None:
    assert encode(BLOB_REF) == BLOB_REF_BYTES
    assert decode(BLOB_REF_BYTES, m.BlobRef, max_bytes=CAP) == BLOB_REF


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_survives(record: m.Record) -> None:
    data = encode(record)
    assert decode(data, type(record), max_bytes=len(data)) == record


def test_cap_is_inclusive() -> None:
    with pytest.raises(LimitError, match=rf"of {len(BLOB_REF_BYTES)} bytes is above the cap"):
        decode(BLOB_REF_BYTES, m.BlobRef, max_bytes=len(BLOB_REF_BYTES) - 1)


def test_int_in_a_float_field_of_ours_is_sent_as_float() -> None:
    sent = encode(m.Sampling(max_new_tokens=4, temperature=1, top_p=1))
    assert sent == encode(m.Sampling(max_new_tokens=4, temperature=1.0, top_p=1.0))
    assert b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00" in sent


@pytest.mark.parametrize(
    "record",
    [
        m.BlobReply(size=-1),
        m.BlobReply(size=2**64),
        m.BlobReply(size=2**100),
        m.BlobReply(size="3"),  # type: ignore[arg-type]
        m.BlobRequest(digest="E" * 64),
        m.BlobRequest(digest="e" * 63 + "\n"),
        msgspec.structs.replace(GROUP, engine="name\n"),
        msgspec.structs.replace(GROUP, question="\ud800"),
        msgspec.structs.replace(ANNOUNCEMENT, rewards=(math.nan,)),
        msgspec.structs.replace(ANNOUNCEMENT, rewards=(math.inf, 1.0)),
        msgspec.structs.replace(ANNOUNCEMENT, rewards=()),
        msgspec.structs.replace(ANNOUNCEMENT, body=object()),
    ],
)
def test_own_record_out_of_bounds_is_our_fault(record: m.Record) -> None:
    with pytest.raises(LocalProtocolError, match=f"this {type(record).__name__} must not be sent"):
        encode(record)


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa4size\xcd\x01\x2c\xa6digest\xd9\x40" + b"e" * 64,
        b"\xde\x00\x02\xa6digest\xd9\x40" + b"e" * 64 + b"\xa4size\xcd\x01\x2c",
        b"\x82\xa6digest\xda\x00\x40" + b"e" * 64 + b"\xa4size\xcd\x01\x2c",
        b"\x82\xa6digest\xd9\x40" + b"e" * 64 + b"\xa4size\xce\x00\x00\x01\x2c",
        b"\x82\xa6digest\xd9\x40" + b"e" * 64 + b"\xa4size\xd1\x01\x2c",
    ],
    ids=["order of fields", "long map", "long text", "long integer", "signed integer"],
)
def test_second_spelling_of_the_same_record_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match="not in canonical form"):
        decode(data, m.BlobRef, max_bytes=CAP)


def test_missing_field_with_a_default_is_refused() -> None:
    with pytest.raises(DecodeError, match="not in canonical form"):
        decode(b"\x81\xaemax_new_tokens\x04", m.Sampling, max_bytes=CAP)


def test_errors_quote_at_most_64_characters() -> None:
    data = b"\x81\xda\x03\xe8" + b"k" * 1000 + b"\x01"
    with pytest.raises(DecodeError, match="unknown field") as raised:
        decode(data, m.BlobRef, max_bytes=CAP)
    assert str(raised.value).count("k") == 65  # 64 of the peer, one of "unknown"
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_enum_error_quotes_little_and_escapes_it() -> None:
    data = encode(GROUP).replace(b"\xa6finish\xa4stop", b"\xa6finish\xd9\xc8" + b"\x1b[31m" * 40)
    with pytest.raises(DecodeError) as raised:
        decode(data, m.RolloutGroup, max_bytes=CAP)
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 450


def test_shown_cuts_and_escapes() -> None:
    assert shown("a\x1b[0m") == r"'a\x1b[0m'"
    assert shown("\u202e") == r"'\u202e'"
    assert shown(b"x" * 65) == f"{b'x' * 64!r}…"


def test_digest_is_sha256() -> None:
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_framed_is_length_prefixed_and_tagged() -> None:
    assert framed("x", b"ab", b"") == (
        b"\0\0\0\0\0\0\0\x0bmurmuration" + b"\0\0\0\0\0\0\0\x012" + b"\0\0\0\0\0\0\0\x01x"
        b"\0\0\0\0\0\0\0\x02ab" + b"\0\0\0\0\0\0\0\0"
    )
    assert framed("x", b"ab", b"c") != framed("x", b"a", b"bc")
    assert framed("x", b"ab") != framed("xa", b"b")


def test_swarm_id_of_the_sample_is_a_digest() -> None:
    assert len(SWARM_ID) == 64
    assert set(SWARM_ID) <= set("0123456789abcdef")
