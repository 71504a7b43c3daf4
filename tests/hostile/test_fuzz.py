"""Made and mutated messages (checklist item 7): 100,000 of them under `slow`, some hundreds otherwise.

Each goes to everything in `protocol/` that reads a peer's bytes. Nothing but the protocol's own refusals may
come out, and no message may take more than 50 ms.
"""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable

import msgpack
import pytest

from protocol import messages as m
from protocol.charter import charter_bytes, decode_charter
from protocol.codec import decode, encode
from protocol.constants import MAX_FRAME_BYTES
from protocol.envelope import open_envelope
from protocol.errors import CharterError, RemoteProtocolError
from protocol.frames import frame_length
from protocol.records import open_record
from protocol.topics import parse_key, peer_key
from tests.hostile import audit
from tests.protocol.samples import CHARTER, IDENTITY, NOW_MS, RECORDS, SWARM_ID, TOPIC, envelope_bytes

KEY = peer_key(SWARM_ID, IDENTITY.peer_id)


def readers() -> list[Callable[[bytes], object]]:
    """Everything in `protocol/` that reads a peer's bytes."""
    return [
        *(
            lambda data, record_type=record_type: decode(data, record_type, max_bytes=MAX_FRAME_BYTES)
            for record_type in record_types()
        ),
        lambda data: open_envelope(data, swarm_id=SWARM_ID, topic=TOPIC, now_ms=NOW_MS),
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


LETTERS = "aA0/_ \x00\x1b\né\u202e😀"


def made(rng: random.Random, depth: int = 4) -> object:
    """Any value that msgpack has."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, -1, 127, 128, -(2**63), 2**64 - 1, rng.randrange(-(2**63), 2**64)])
    if kind in (2, 3):
        return rng.choice([0.0, -0.0, 1e300, float("nan"), float("-inf"), rng.uniform(-9, 9)])
    if kind == 4:
        return "".join(rng.choices(LETTERS, k=rng.randrange(20)))
    if kind == 5:
        return rng.randbytes(rng.randrange(20))
    if kind == 6:
        return [made(rng, depth - 1) for _ in range(rng.randrange(5))]
    keys = ("".join(rng.choices(LETTERS, k=rng.randrange(10))) for _ in range(rng.randrange(5)))
    return {rng.choice([key, rng.randrange(-5, 5)]): made(rng, depth - 1) for key in keys}


def bent(rng: random.Random) -> bytes:
    """A right record in which one value, at any depth, is exchanged for something else."""
    value = msgpack.unpackb(rng.choice(SEEDS[:-1]))
    place: object = value
    while isinstance(place, dict | list) and place:
        key = rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.5:
            place[key] = made(rng)
            break
        place = inner
    return msgpack.packb(value)


def mutated_seed(rng: random.Random) -> bytes:
    return mutated(rng, rng.choice(SEEDS))


def made_message(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(300)) if rng.random() < 0.3 else msgpack.packb(made(rng))


KINDS = {"mutated": mutated_seed, "made": made_message, "bent": bent}


def attack_with(kind: str, count: int, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    for _ in range(count):
        attack(KINDS[kind](rng))


@pytest.mark.parametrize("kind", KINDS)
def test_7_messages(kind: str) -> None:
    attack_with(kind, 100, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("kind", "count"), [("mutated", 20_000), ("made", 2_500), ("bent", 2_500)])
def test_7_messages_100_000_in_all(kind: str, count: int, seed: int) -> None:
    attack_with(kind, count, seed)


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


class Tracer:
    """Runs `os.getcwd` when unpickled by a reader that looks names up."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return os.getcwd, ()


def test_6_pickles_reach_no_unpickler() -> None:
    audit.install()
    audit.seen.clear()
    data = pickle.dumps(Tracer())
    for read in READERS:
        with pytest.raises((RemoteProtocolError, CharterError)):
            read(data)
    assert audit.seen == []
