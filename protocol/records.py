"""Records in the DHT: a signed envelope under a key that only its signer owns.

    record + identity --seal_record--> value          key + value --open_record--> record

Key, type, signer and expiry must fit each other, so a stranger can neither overwrite nor invent a record, nor
keep one alive beyond its signature. Payloads larger than MAX_DHT_RECORD_BYTES do not exist: bodies go over
streams.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.codec import decode, encode
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.envelope import open_envelope, seal
from protocol.errors import FreshnessError, LocalProtocolError, SignatureError
from protocol.identity import Identity
from protocol.messages import Digest, PeerRecord
from protocol.topics import parse_key, peer_key

__all__ = ["open_record", "record_validator", "seal_record"]


def seal_record(
    identity: Identity,
    record: PeerRecord,
    *,
    swarm_id: Digest,
    sequence: int,
    now_ms: int,
    ttl_ms: int,
) -> tuple[str, bytes]:
    """Key and value to store: the DHT must drop it at `now_ms + ttl_ms`. Raises `LocalProtocolError` for a
    record that others would refuse."""
    key = peer_key(swarm_id, identity.peer_id)
    value = seal(
        identity,
        swarm_id=swarm_id,
        topic=key,
        sequence=sequence,
        payload=encode(record),
        now_ms=now_ms,
        ttl_ms=ttl_ms,
    )
    if len(value) > MAX_DHT_RECORD_BYTES:
        raise LocalProtocolError(f"a record of {len(value)} bytes is above the cap of {MAX_DHT_RECORD_BYTES}")
    return key, value


def open_record(key: str, value: bytes, *, swarm_id: Digest, now_ms: int) -> PeerRecord:
    """The record under `key`, whose owner has signed it. Raises a `RemoteProtocolError` when anything does
    not fit."""
    record, _ = _open(key, value, swarm_id, now_ms)
    return record


def record_validator(swarm_id: Digest, now_ms: Callable[[], int]) -> Callable[[str, bytes, int], None]:
    """What a transport calls with `(key, value, expires_at)` before it stores or returns a record."""

    def validate(key: str, value: bytes, expires_at: int) -> None:
        _, signed_until = _open(key, value, swarm_id, now_ms())
        if expires_at > signed_until:
            raise FreshnessError(
                f"the record shall be stored until {expires_at}, its signature ends at {signed_until}"
            )

    return validate


def _open(key: str, value: bytes, swarm_id: Digest, now_ms: int) -> tuple[PeerRecord, int]:
    parsed = parse_key(key)
    envelope = open_envelope(
        value, swarm_id=swarm_id, topic=key, now_ms=now_ms, max_bytes=MAX_DHT_RECORD_BYTES
    )
    if parsed.swarm_id != swarm_id:
        raise SignatureError(f"the key is of swarm {parsed.swarm_id}, not {swarm_id}", reason="swarm")
    if envelope.sender != parsed.owner:
        raise SignatureError(f"{envelope.sender} signed a record that {parsed.owner} owns", reason="owner")
    return decode(envelope.payload, PeerRecord, max_bytes=MAX_DHT_RECORD_BYTES), envelope.expires_at
