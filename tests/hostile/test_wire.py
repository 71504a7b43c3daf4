"""What a stranger's bytes can do to the parser and to the envelope: nothing. Checklist items 1-3, 5 and 8-12.

The number of the item stands in each section. Whatever is refused is refused with a `RemoteProtocolError`,
within bounded memory and time. Compression (item 4) does not exist in this protocol version.
"""

from __future__ import annotations

import base64
import io
import logging
import math
import stat
import struct
import threading
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgpack
import msgspec
import pytest

from node.state.keys import create_key, load_key
from node.state.stores import ReplayStore
from protocol import messages as m
from protocol.charter import decode_charter
from protocol.codec import decode, encode, framed
from protocol.constants import (
    MAX_CLOCK_SKEW_MS,
    MAX_DEPTH,
    MAX_ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    MAX_TTL_MS,
)
from protocol.envelope import Envelope, open_envelope
from protocol.errors import (
    CharterError,
    DecodeError,
    FreshnessError,
    KeyFileError,
    LimitError,
    RemoteProtocolError,
    ReplayError,
    SignatureError,
    VersionError,
)
from protocol.frames import frame_length
from protocol.replay import REPLAY_HORIZON_MS, ReplayCache
from protocol.topics import parse_key, peer_key
from tests.protocol.golden_v2 import GOLDEN_V2
from tests.protocol.samples import (
    CHARTER,
    GROUP,
    IDENTITY,
    MEMBER,
    NOW_MS,
    PEER_RECORD,
    SWARM_ID,
    TOPIC,
    envelope_bytes,
)

MEBIBYTE = 1 << 20
ROOT = Path(__file__).parents[2]
KEY = peer_key(SWARM_ID, IDENTITY.peer_id)


def peak_growth_bytes(action: Callable[[], object]) -> int:
    """Peak of memory that Python allocates during `action`, above where it began."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def opened(data: bytes, now_ms: int = NOW_MS) -> Envelope:
    return open_envelope(data, swarm_id=SWARM_ID, topic=TOPIC, now_ms=now_ms)


# --- 1: frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    [
        struct.pack(">I", 2**32 - 1),
        struct.pack(">i", -1),
        struct.pack(">i", -(2**31)),
        struct.pack(">I", 10 * 2**30 % 2**32),  # 10 GiB, as far as 32 bits hold it
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[:4],  # an over-long varint read as a prefix
        b"\x80\x80\x80\x80",
        bytes(4),
    ],
    ids=["largest", "minus one", "smallest", "10 GiB", "cap + 1", "varint", "varint of zero", "zero"],
)
def test_1_frame_length_is_refused_before_allocation(prefix: bytes) -> None:
    def receive() -> None:
        stream = io.BytesIO(prefix + b"x" * 10)
        with pytest.raises(LimitError):
            stream.read(frame_length(stream.read(4)))

    assert peak_growth_bytes(receive) < MEBIBYTE


# --- 2, 3: counts and nesting -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0xDD, 0xDF, 0xDB, 0xC6], ids=["array", "map", "text", "binary"])
@pytest.mark.parametrize("record_type", [m.Announcement, m.BlobReply, Envelope])
def test_2_claimed_count_allocates_nothing(first: int, record_type: type[m.Record]) -> None:
    data = bytes([first]) + b"\xff\xff\xff\xff" + b"\x00" * 5
    assert len(data) == 10

    def read() -> None:
        with pytest.raises(DecodeError, match="declares 4294967295"):
            decode(data, record_type, max_bytes=MAX_ENVELOPE_BYTES)

    assert peak_growth_bytes(read) < MEBIBYTE


def test_2_counts_inside_one_another_allocate_nothing() -> None:
    """Each of 16 arrays claims all the bytes that follow."""
    data = b"".join(b"\xdd" + (20_000 - 5 * i - 5).to_bytes(4, "big") for i in range(MAX_DEPTH))
    data += b"\xc0" * (20_000 - len(data))

    def read() -> None:
        with pytest.raises((DecodeError, LimitError)):
            decode(data, m.Announcement, max_bytes=MAX_ENVELOPE_BYTES)

    assert peak_growth_bytes(read) < MEBIBYTE


def test_2_number_of_values_is_bounded() -> None:
    def array(count: int) -> bytes:
        return b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count

    with pytest.raises(LimitError, match=f"more than {MAX_ITEMS} values"):
        decode(array(MAX_ITEMS), m.Charter, max_bytes=MAX_FRAME_BYTES)
    with pytest.raises(DecodeError, match="does not fit its type"):
        decode(array(MAX_ITEMS - 1), m.Charter, max_bytes=MAX_FRAME_BYTES)
    with pytest.raises(LimitError):
        decode(array(MAX_FRAME_BYTES - 5), m.Charter, max_bytes=MAX_FRAME_BYTES)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\xde\x00\x01\xa1k"])
def test_3_deep_nesting_on_a_small_stack(opening: bytes) -> None:
    outcomes: list[BaseException] = []

    def read() -> None:
        for data in (opening * 10_000 + b"\xc0", opening * (MAX_DEPTH + 1) + b"\xc0"):
            for record_type in (m.Announcement, m.Charter, Envelope):
                try:
                    decode(data, record_type, max_bytes=MEBIBYTE)
                except BaseException as error:
                    outcomes.append(error)

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [type(outcome) for outcome in outcomes] == [DecodeError] * 6
    assert {outcome.reason for outcome in outcomes} == {"depth"}


def test_3_allowed_depth_is_read_and_refused_for_its_type_only() -> None:
    with pytest.raises(DecodeError, match="does not fit its type"):
        decode(b"\x91" * MAX_DEPTH + b"\xc0", m.Announcement, max_bytes=MEBIBYTE)


def test_3_nested_json_inside_a_charter_on_a_small_stack() -> None:
    outcomes: list[BaseException] = []
    config = '{"a":' + "[" * 4000 + "]" * 4000 + "}"
    data = encode(msgspec.structs.replace(CHARTER, environments=(m.EnvironmentSpec("e", config),)))

    def read() -> None:
        try:
            decode_charter(data)
        except BaseException as error:
            outcomes.append(error)

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [type(outcome) for outcome in outcomes] == [CharterError]


# --- 5: types ---------------------------------------------------------------------------------------------

REPLY = encode(m.BlobReply(3))  # 81 a4 "size" 03


@pytest.mark.parametrize(
    ("data", "record_type"),
    [
        (b"\x82\xa4size\x03\xa4more\x00", m.BlobReply),
        (b"\x81\xa4Size\x03", m.BlobReply),
        (b"\x80", m.BlobReply),
        (b"\x81\xa4size\xd4\x05\x03", m.BlobReply),
        (b"\x81\xa4size\xc7\x01\x05\x03", m.BlobReply),
        (b"\x81\xa4size\xd6\xff\x00\x00\x00\x00", m.BlobReply),
        (b"\x81\xa4size\xa13", m.BlobReply),
        (b"\x81\xa4size\xc0", m.BlobReply),
        (b"\x81\xa4size\xc3", m.BlobReply),
        (b"\x81\xa4size\xff", m.BlobReply),
        (b"\x81\xa4size\x91\x03", m.BlobReply),
        (b"\x81\xa4size\xcb" + struct.pack(">d", 3.0), m.BlobReply),
        (b"\x81\xa4size\xca" + struct.pack(">f", 3.0), m.BlobReply),
        (b"\x82\xa4size\x03\xa4size\x03", m.BlobReply),
        (b"\x82\xa4size\x03\xa4size\x04", m.BlobReply),
        (REPLY + b"\x00", m.BlobReply),
        (REPLY + REPLY, m.BlobReply),
        (REPLY[:-1], m.BlobReply),
        (b"", m.BlobReply),
        (b"\xc1", m.BlobReply),
        (b"\x91\x03", m.BlobReply),
        (b"\x81\xc4\x04size\x03", m.BlobReply),
        (b"\x81\x01\x03", m.BlobReply),
        (b"\x81\x90\x03", m.BlobReply),
        (b"\x81\xa6digest\xd9\x40" + b"\xff" * 64, m.BlobRequest),
        (b"\x81\xa6digest\xd9\x40" + b"\xed\xa0\x80" * 21 + b"e", m.BlobRequest),
        (b"\x81\xa6digest\xc4\x40" + b"e" * 64, m.BlobRequest),
    ],
    ids=[
        "unknown field",
        "other case",
        "missing field",
        "fixext",
        "ext8",
        "timestamp",
        "text for a number",
        "nil",
        "bool",
        "negative",
        "array",
        "3.0 for 3",
        "32-bit float",
        "duplicate key",
        "duplicate key, other value",
        "trailing byte",
        "two messages",
        "cut",
        "empty",
        "unused type byte",
        "array for a map",
        "binary key",
        "integer key",
        "array as key",
        "invalid UTF-8",
        "surrogates in UTF-8",
        "binary for text",
    ],
)
def test_5_wrong_shape_is_refused(data: bytes, record_type: type[m.Record]) -> None:
    with pytest.raises(DecodeError):
        decode(data, record_type, max_bytes=MAX_ENVELOPE_BYTES)


def test_5_text_where_bytes_belong_is_refused() -> None:
    """A lenient converter reads text as base64."""
    good = encode(m.ReconcileRequest(TOPIC, b""))
    with pytest.raises(DecodeError):
        decode(good[:-2] + b"\xa0", m.ReconcileRequest, max_bytes=MAX_ENVELOPE_BYTES)
    with pytest.raises(DecodeError):
        decode(good[:-2] + b"\xa4QUJD", m.ReconcileRequest, max_bytes=MAX_ENVELOPE_BYTES)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_5_numbers_that_are_none_are_refused_in_every_place(number: float) -> None:
    data = encode(GROUP)
    places = [i for i in range(len(data) - 8) if data[i] == 0xCB]
    assert len(places) >= 4
    for place in places:
        bad = data[: place + 1] + struct.pack(">d", number) + data[place + 9 :]
        with pytest.raises(DecodeError):
            decode(bad, m.RolloutGroup, max_bytes=MEBIBYTE)


@pytest.mark.parametrize("text", ["a\n", "a b", "-a", "", "a" * 65, "a\x00", "ä", "a\u202eb"])
def test_5_names_are_plain(text: str) -> None:
    """A trailing newline too: `$` of a regular expression would let it through."""
    bare = msgpack.unpackb(encode(GROUP))
    with pytest.raises(DecodeError):
        decode(msgpack.packb({**bare, "engine": text}), m.RolloutGroup, max_bytes=MEBIBYTE)


# --- 8: versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 3])
def test_8_other_version_gets_a_sentence(version: int) -> None:
    data = bytes.fromhex(GOLDEN_V2["Envelope"]).replace(
        b"murmuration/2\xa8", f"murmuration/{version}".encode() + b"\xa8"
    )
    with pytest.raises(VersionError, match=f"protocol version {version}, this node 2"):
        opened(data)
    with pytest.raises(VersionError, match=f"protocol version {version}, this node speaks 2"):
        parse_key(KEY.replace("/2/", f"/{version}/"))
    with pytest.raises(CharterError, match=f"speaks protocol version {version}, this program 2"):
        decode_charter(encode(msgspec.structs.replace(CHARTER, protocol_version=version)))


# --- 9: signatures ----------------------------------------------------------------------------------------


def test_9_no_bit_can_be_flipped() -> None:
    data = envelope_bytes(payload=b"")
    opened(data)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(RemoteProtocolError):
            opened(bytes(flipped))


def test_9_claimed_sender_must_be_the_key() -> None:
    envelope = msgspec.structs.replace(opened(envelope_bytes()), sender=MEMBER.peer_id)
    with pytest.raises(SignatureError, match=MEMBER.peer_id):
        opened(encode(envelope))


@pytest.mark.parametrize("purpose", ["charter", "slot", "item", "announcement"])
def test_9_signature_of_another_purpose_is_refused(purpose: str) -> None:
    envelope = opened(envelope_bytes())
    fields = (envelope.swarm_id, envelope.topic, envelope.sender)
    numbers = (envelope.sequence, envelope.created_at, envelope.expires_at)
    signed = framed(
        purpose, *(f.encode() for f in fields), *(n.to_bytes(8, "big") for n in numbers), envelope.payload
    )
    with pytest.raises(SignatureError):
        opened(encode(msgspec.structs.replace(envelope, signature=IDENTITY.sign(signed))))


def test_9_bytes_cannot_move_between_fields() -> None:
    """Topic and payload next to each other: the lengths are signed."""
    envelope = opened(envelope_bytes(payload=b"xy"))
    moved = msgspec.structs.replace(envelope, topic=TOPIC + "x", payload=b"y")
    with pytest.raises(SignatureError, match="not by the claimed sender"):
        open_envelope(encode(moved), swarm_id=SWARM_ID, topic=TOPIC + "x", now_ms=NOW_MS)


# --- 10: replays ------------------------------------------------------------------------------------------


def admit(guard: ReplayCache | ReplayStore, data: bytes, now_ms: int = NOW_MS) -> None:
    envelope = opened(data, now_ms)
    guard.admit(envelope.sender, envelope.sequence, envelope.created_at, envelope.expires_at, now_ms)


def test_10_same_envelope_counts_once_also_after_restarts(tmp_path: Path) -> None:
    """Which relay brought it plays no part: sender and sequence are under the signature."""
    data = envelope_bytes(7, ttl_ms=600_000)
    store = ReplayStore(tmp_path, ReplayCache(), NOW_MS)
    admit(store, data)
    with pytest.raises(ReplayError):
        admit(store, data)
    for restart in range(1, 4):
        store._journal.close()  # all that the system does for a killed process
        store = ReplayStore(tmp_path, ReplayCache(), NOW_MS + restart)
        assert not store.damaged
        with pytest.raises(ReplayError):
            admit(store, data, NOW_MS + restart)
    admit(store, envelope_bytes(8))
    store.close()


def test_10_cache_is_bounded_and_outlives_three_skews() -> None:
    cache = ReplayCache(capacity=32)
    for sequence in range(100):
        admit(cache, envelope_bytes(sequence))
    assert len(cache) <= 32
    for sequence in range(100):
        with pytest.raises(ReplayError):
            admit(cache, envelope_bytes(sequence))
    assert REPLAY_HORIZON_MS >= 3 * MAX_CLOCK_SKEW_MS


# --- 11: times --------------------------------------------------------------------------------------------

HOSTILE_TIMES: dict[str, object] = {
    "minus one": -1,
    "minus 2^63": -(2**63),
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "float": 1.7e12,
    "2^53 + 1": 2**53 + 1,
    "2^63": 2**63,
    "2^64 - 1": 2**64 - 1,
    "text": "1700000000000",
    "nil": None,
    "bool": True,
}


@pytest.mark.parametrize("field", ["created_at", "expires_at"])
@pytest.mark.parametrize("value", HOSTILE_TIMES.values(), ids=HOSTILE_TIMES)
def test_11_time_outside_its_type_is_refused(field: str, value: object) -> None:
    bare = msgpack.unpackb(envelope_bytes())
    with pytest.raises(DecodeError):
        opened(msgpack.packb({**bare, field: value}))


@pytest.mark.parametrize(
    ("created_at", "expires_at", "accepted"),
    [
        (0, 0, False),
        (0, 2**53, False),
        (0, NOW_MS + 1, False),
        (NOW_MS, 2**53, False),
        (2**53, 2**53, False),
        (NOW_MS, 0, False),
        (NOW_MS + MAX_CLOCK_SKEW_MS - 1, NOW_MS + MAX_TTL_MS, True),
        (NOW_MS + MAX_CLOCK_SKEW_MS, NOW_MS + MAX_TTL_MS, True),
        (NOW_MS + MAX_CLOCK_SKEW_MS + 1, NOW_MS + MAX_TTL_MS, False),
        (NOW_MS - MAX_TTL_MS + 1, NOW_MS + 1, True),
        (NOW_MS - MAX_TTL_MS, NOW_MS, False),
        (NOW_MS - MAX_TTL_MS, NOW_MS + 1, False),
        (NOW_MS - 1, NOW_MS, False),
        (NOW_MS - 1, NOW_MS + 1, True),
        (NOW_MS, NOW_MS + MAX_TTL_MS - 1, True),
        (NOW_MS, NOW_MS + MAX_TTL_MS, True),
        (NOW_MS, NOW_MS + MAX_TTL_MS + 1, False),
        (NOW_MS + 1, NOW_MS + 1, False),
    ],
)
def test_11_limits_are_exact(created_at: int, expires_at: int, accepted: bool) -> None:
    envelope = opened(envelope_bytes())
    fields = (SWARM_ID, TOPIC, IDENTITY.peer_id)
    numbers = (envelope.sequence, created_at, expires_at)
    signed = framed(
        "envelope", *(f.encode() for f in fields), *(n.to_bytes(8, "big") for n in numbers), envelope.payload
    )
    data = encode(
        msgspec.structs.replace(
            envelope, created_at=created_at, expires_at=expires_at, signature=IDENTITY.sign(signed)
        )
    )
    for read in (opened, lambda data: admit(ReplayCache(), data)):
        if accepted:
            read(data)
        else:
            with pytest.raises(FreshnessError):
                read(data)


@pytest.mark.parametrize("now_ms", [0, 1, -(2**70), 2**53, 2**70])
def test_11_any_clock_of_ours_gives_a_refusal_not_a_crash(now_ms: int) -> None:
    with pytest.raises(FreshnessError):
        opened(envelope_bytes(), now_ms)


# --- 12: the private key ----------------------------------------------------------------------------------


def spellings(secret: bytes) -> list[str]:
    """How the key could look in text."""
    return [secret.hex(), repr(secret)[2:-1], base64.b64encode(secret).decode()[:40], str(list(secret))[1:-1]]


def test_12_private_key_is_closed_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "identity.key"
    identity = create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    seed = path.read_bytes()[4:36]

    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").debug("%s %r %s", identity, identity, [identity])
    texts = [caplog.text, repr(identity), str(PEER_RECORD)]
    for damage in (path.read_bytes()[:-1], path.read_bytes() + b"x", path.read_bytes()[:36] + bytes(32)):
        path.write_bytes(damage)
        with pytest.raises(KeyFileError) as raised:
            load_key(path)
        texts.append(str(raised.value))
        shown = traceback.TracebackException.from_exception(raised.value, capture_locals=True)
        own_frames = [
            frame for frame in shown.stack if "/node/" in frame.filename or "/protocol/" in frame.filename
        ]
        assert own_frames
        texts += [str(frame.locals) for frame in own_frames]
    for text in texts:
        assert not any(spelling in text for spelling in spellings(seed))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o610, 0o644, 0o777])
def test_12_open_key_file_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    create_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
        load_key(path)
