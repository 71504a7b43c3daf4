"""What a stranger's bytes can do to the parser and to the envelope: nothing. Checklist items 1-3 and 5-12.

The number of the item stands in each section. Whatever is refused is refused with a `RemoteProtocolError`,
within bounded memory and time. Compression (item 4) does not exist in this protocol version.
"""

from __future__ import annotations

import ast
import base64
import io
import logging
import math
import os
import pickle
import random
import stat
import struct
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.keys import create_key, load_key
from node.state import ReplayStore
from protocol import messages as m
from protocol.charter import charter_bytes, decode_charter
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
from protocol.records import open_record
from protocol.replay import REPLAY_HORIZON_MS, ReplayCache
from protocol.topics import parse_key, peer_key
from tests.hostile import audit
from tests.protocol.golden_v1 import GOLDEN_V1
from tests.protocol.samples import (
    CHARTER,
    GROUP,
    IDENTITY,
    MEMBER,
    NOW_MS,
    PEER_RECORD,
    RECORDS,
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


# --- 6: nothing that runs code from data ------------------------------------------------------------------

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_MEMBERS = {("torch", "load"), ("yaml", "load"), ("builtins", "eval"), ("builtins", "exec")}


def violations(source: str) -> list[str]:
    """Banned names in a module. A method `.eval()` such as `model.eval()` is no call of the builtin."""
    found: list[str] = []

    def add(node: ast.AST, what: str) -> None:
        found.append(f"line {getattr(node, 'lineno', '?')}: {what}")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in BANNED_MODULES:
                    add(node, f"import {name.name}")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module in BANNED_MODULES:
                add(node, f"from {module}")
            for name in node.names:
                if (module, name.name) in BANNED_MEMBERS or name.name in BANNED_MODULES:
                    add(node, f"from {module} import {name.name}")
        elif isinstance(node, ast.Name) and node.id in BANNED_BUILTINS | BANNED_MODULES:
            add(node, node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if (owner, node.attr) in BANNED_MEMBERS or node.attr in BANNED_MODULES:
                add(node, f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            add(node.value, "allow_pickle")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            module = str(node.args[0].value).split(".")[0]
            if called in {"__import__", "import_module"} and module in BANNED_MODULES:
                add(node, f"{called}({module})")
    return found


SOURCES = sorted(
    path for package in ("node", "protocol", "swarm_cli") for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_6_module_cannot_run_code_from_data(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "import torch.load; import dill.source",
        "from multiprocessing.reduction import pickle",
        "torch.load(path)",
        "load = torch.load",
        "from torch import load",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "eval(text)",
        "run = exec",
        "builtins.eval(text)",
        "__import__('pickle')",
        "importlib.import_module('cloudpickle.cloudpickle')",
        "joblib.load(path)",
        "shelve.open(path)",
        "torch.serialization.pickle.loads(x)",
    ],
)
def test_6_the_search_finds(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "safetensors.torch.load(data)", "self.load(x)", "yaml.safe_load(x)"]
)
def test_6_the_search_lets_pass(source: str) -> None:
    assert violations(source) == []


class Tracer:
    """Runs `os.getcwd` when unpickled by a reader that looks names up."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return os.getcwd, ()


def test_6_audit_hook_sees_an_unpickler() -> None:
    seen = audit._seen
    audit._install()
    seen.clear()
    pickle.loads(pickle.dumps(Tracer()))
    assert any("getcwd" in name for name in seen)
    seen.clear()


def test_6_pickles_reach_no_unpickler() -> None:
    audit._install()
    audit._seen.clear()
    data = pickle.dumps(Tracer())
    for attempt in readers():
        with pytest.raises((RemoteProtocolError, CharterError)):
            attempt(data)
    assert audit._seen == []


# --- 7: made and mutated messages -------------------------------------------------------------------------


def readers() -> list[Callable[[bytes], object]]:
    """Everything in `protocol/` that reads a peer's bytes."""
    return [
        *(
            lambda data, record_type=record_type: decode(data, record_type, max_bytes=MAX_FRAME_BYTES)
            for record_type in record_types()
        ),
        opened,
        decode_charter,
        lambda data: open_record(KEY, data, swarm_id=SWARM_ID, now_ms=NOW_MS),
        lambda data: parse_key(data.decode("utf-8", "replace")),
        lambda data: frame_length(data[:4]),
    ]


def record_types() -> list[type[m.Record]]:
    return [
        value for value in vars(m).values()
        if isinstance(value, type) and issubclass(value, m.Record) and value is not m.Record
    ]  # fmt: skip


READERS = readers()
SEEDS = [*(encode(record) for record in RECORDS), envelope_bytes(), charter_bytes(CHARTER), KEY.encode()]
LIMIT_S = 0.05


def attack(data: bytes, readers: list[Callable[[bytes], object]] = READERS) -> None:
    """Give `data` to every reader. Only the refusals of the protocol may come out, each within 50 ms of work.
    (Time of this thread, the best of three: the machine may be busy with other things.)"""
    for read in readers:
        for attempt in range(3):
            began = time.thread_time()
            message = refusal(read, data)
            took_s = time.thread_time() - began
            assert len(message) < 600
            if took_s < LIMIT_S:
                break
            assert attempt < 2, f"{took_s:.3f} s for {data[:40]!r}…"


def refusal(read: Callable[[bytes], object], data: bytes) -> str:
    try:
        read(data)
    except (RemoteProtocolError, CharterError) as error:
        return str(error)
    return ""


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few random edits: bits, bytes, cuts, repeats, splices and hostile numbers."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        upto = min(len(data), at + rng.randint(1, 9))
        choice = rng.randrange(8)
        if choice == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif choice == 1:
            data = data[:at] + rng.randbytes(upto - at) + data[upto:]
        elif choice == 2:
            data = data[:at] + data[upto:]
        elif choice == 3:
            data = data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        elif choice == 4:
            data = data[:upto] + data[at:]
        elif choice == 5:
            data = data[:at]
        elif choice == 6:
            other = rng.choice(SEEDS)
            data = data[:at] + other[rng.randrange(len(other)) :]
        else:
            hostile = rng.choice(
                [
                    b"\xdd\xff\xff\xff\xff",
                    b"\xdf\x00\x01\x00\x00",
                    b"\xc6\xff\xff\xff\xff",
                    b"\xcf" + b"\xff" * 8,
                    b"\xd3\x80" + bytes(7),
                    b"\xcb\x7f\xf8" + bytes(6),
                    b"\xc9\x00\x00\x00\x01\x05\x00",
                    b"\x91" * 20,
                    b"\xc0",
                ]
            )
            data = data[:at] + hostile + data[at + len(hostile) :]
    return data


def mutate_many(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        attack(mutated(rng, rng.choice(SEEDS)))


LETTERS = "aA0/_ \x00\x1b\né\u202e😀"
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(LETTERS, max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(LETTERS, max_size=10) | st.integers(-5, 5), inner, max_size=5)
    ),
    max_leaves=20,
)
MADE = st.binary(max_size=300) | PLAIN.map(lambda value: msgpack.packb(value))


@st.composite
def bent_records(draw: st.DrawFn) -> bytes:
    """A right record in which one value, at any depth, is exchanged for something else."""
    value = msgpack.unpackb(draw(st.sampled_from(SEEDS[:-1])))
    place: object = value
    while isinstance(place, dict | list) and place:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
            place[key] = draw(PLAIN)
            break
        place = inner
    return msgpack.packb(value)


def profile(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_7_mutated_messages() -> None:
    mutate_many(300, seed=0)


@profile(20)
@given(MADE)
def test_7_made_messages(data: bytes) -> None:
    attack(data)


@profile(20)
@given(bent_records())
def test_7_bent_messages(data: bytes) -> None:
    attack(data)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_7_mutated_messages_90_000_in_all(seed: int) -> None:
    mutate_many(15_000, seed)


@pytest.mark.slow
@profile(5_000)
@given(MADE)
def test_7_made_messages_5_000(data: bytes) -> None:
    attack(data)


@pytest.mark.slow
@profile(5_000)
@given(bent_records())
def test_7_bent_messages_5_000(data: bytes) -> None:
    attack(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdc\x7f\xff" + b"\xc0" * 32_767,
        b"\xde\x3f\xff" + b"".join(b"\xa3" + f"{i:03x}".encode()[-3:] + b"\xc0" for i in range(16_383)),
        b"\x81\xc6" + (MAX_FRAME_BYTES - 6).to_bytes(4, "big") + bytes(MAX_FRAME_BYTES - 6),
        b"\x81\xdb" + (MAX_FRAME_BYTES - 6).to_bytes(4, "big") + b"a" * (MAX_FRAME_BYTES - 6),
        b"\x81\xa4name\xdb" + (MAX_FRAME_BYTES - 11).to_bytes(4, "big") + b"\xff" * (MAX_FRAME_BYTES - 11),
        b"\xdd" + (MAX_FRAME_BYTES - 5).to_bytes(4, "big") + b"\x90" * (MAX_FRAME_BYTES - 5),
    ],
    ids=["values", "keys", "binary", "text", "invalid text", "arrays"],
)
def test_7_dearest_messages_are_cheap(data: bytes) -> None:
    attack(data, [lambda data: decode(data, m.RolloutGroup, max_bytes=MAX_FRAME_BYTES), decode_charter])


# --- 8: versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2])
def test_8_other_version_gets_a_sentence(version: int) -> None:
    data = bytes.fromhex(GOLDEN_V1["Envelope"]).replace(
        b"murmuration/1\xa8", f"murmuration/{version}".encode() + b"\xa8"
    )
    with pytest.raises(VersionError, match=f"protocol version {version}, this node 1"):
        opened(data)
    with pytest.raises(VersionError, match=f"protocol version {version}, this node speaks 1"):
        parse_key(KEY.replace("/1/", f"/{version}/"))
    with pytest.raises(CharterError, match=r"protocol version|no charter"):
        decode_charter(encode(msgspec.structs.replace(CHARTER, protocol_version=max(version, 1) * 2)))


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


@pytest.mark.parametrize("purpose", ["charter", "completions", "item", "announcement"])
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
