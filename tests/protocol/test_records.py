"""DHT records: only their owner can write them."""

from __future__ import annotations

import msgspec
import pytest

from protocol import messages as m
from protocol.codec import encode
from protocol.constants import MAX_TTL_MS
from protocol.envelope import seal
from protocol.errors import (
    DecodeError,
    FreshnessError,
    LocalProtocolError,
    RemoteProtocolError,
    SignatureError,
)
from protocol.records import open_record, record_validator, seal_record
from protocol.topics import peer_key
from tests.protocol.samples import IDENTITY, LINEAGE, MEMBER, NOW_MS, PEER_RECORD, SWARM_ID


def sealed(record: m.PeerRecord, identity=IDENTITY) -> tuple[str, bytes]:
    return seal_record(identity, record, swarm_id=SWARM_ID, sequence=1, now_ms=NOW_MS, ttl_ms=60_000)


def test_record_is_read_back() -> None:
    key, value = sealed(PEER_RECORD)
    assert key == peer_key(SWARM_ID, IDENTITY.peer_id)
    assert open_record(key, value, swarm_id=SWARM_ID, now_ms=NOW_MS) == PEER_RECORD


def test_stranger_cannot_write_under_the_key_of_another() -> None:
    key = peer_key(SWARM_ID, MEMBER.peer_id)
    value = seal(
        IDENTITY,
        swarm_id=SWARM_ID,
        topic=key,
        sequence=1,
        payload=encode(PEER_RECORD),
        now_ms=NOW_MS,
        ttl_ms=1000,
    )
    with pytest.raises(SignatureError) as raised:
        open_record(key, value, swarm_id=SWARM_ID, now_ms=NOW_MS)
    assert raised.value.reason == "owner"


def test_record_of_one_key_does_not_fit_another() -> None:
    _, value = sealed(PEER_RECORD)
    for key in (peer_key(SWARM_ID, MEMBER.peer_id), peer_key("0" * 64, IDENTITY.peer_id)):
        with pytest.raises(SignatureError):
            open_record(key, value, swarm_id=SWARM_ID, now_ms=NOW_MS)


def test_type_must_fit_the_key() -> None:
    key = peer_key(SWARM_ID, IDENTITY.peer_id)
    value = seal(
        IDENTITY,
        swarm_id=SWARM_ID,
        topic=key,
        sequence=1,
        payload=encode(LINEAGE),
        now_ms=NOW_MS,
        ttl_ms=1000,
    )
    with pytest.raises(DecodeError):
        open_record(key, value, swarm_id=SWARM_ID, now_ms=NOW_MS)


def test_follower_may_name_the_lineage_of_another() -> None:
    foreign = msgspec.structs.replace(LINEAGE, owner=MEMBER.peer_id)
    follower = msgspec.structs.replace(PEER_RECORD, lineage=foreign)
    key, value = sealed(follower)
    assert open_record(key, value, swarm_id=SWARM_ID, now_ms=NOW_MS) == follower


def test_record_for_another_swarm_is_refused() -> None:
    key, value = sealed(PEER_RECORD)
    with pytest.raises(SignatureError) as raised:
        open_record(key, value, swarm_id="0" * 64, now_ms=NOW_MS)
    assert raised.value.reason == "swarm"


def test_validator_bounds_the_expiry_by_the_signature() -> None:
    validate = record_validator(SWARM_ID, lambda: NOW_MS)
    key, value = sealed(PEER_RECORD)
    validate(key, value, NOW_MS + 60_000)
    for expires_at in (NOW_MS + 60_001, 2**64):
        with pytest.raises(FreshnessError):
            validate(key, value, expires_at)
    with pytest.raises(FreshnessError):
        record_validator(SWARM_ID, lambda: NOW_MS + 60_000)(key, value, NOW_MS + 60_000)
    for garbage in ("", "unknown", peer_key(SWARM_ID, MEMBER.peer_id)):
        with pytest.raises(RemoteProtocolError):
            validate(garbage, value, NOW_MS)
        with pytest.raises(RemoteProtocolError):
            validate(key, b"x" * 100_000, NOW_MS)


def test_too_large_a_record_is_our_fault() -> None:
    addresses = tuple("x" * 256 for _ in range(16))
    sealed(msgspec.structs.replace(PEER_RECORD, addresses=addresses))
    with pytest.raises(LocalProtocolError):
        seal_record(
            IDENTITY, PEER_RECORD, swarm_id=SWARM_ID, sequence=1, now_ms=NOW_MS, ttl_ms=MAX_TTL_MS + 1
        )
