"""The signed envelope around every message.

    seal: payload + topic + sequence --sign--> bytes
    open_envelope: bytes --every check but replay--> Envelope --ReplayCache.admit--> counted once

The signature covers domain, protocol version, swarm, topic, sender, sequence, both times and the payload,
each behind its length: it fits no other swarm, topic or version. Freshness and replay are
`protocol/replay.py`. The payload is opaque here; who may send what is decided by the stages of the node.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from protocol.codec import decode, encode, framed, shown
from protocol.constants import DOMAIN, MAX_ENVELOPE_BYTES, MAX_TTL_MS, PROTOCOL_VERSION
from protocol.errors import LocalProtocolError, SignatureError, VersionError
from protocol.identity import SIGNATURE_BYTES, Identity, verify
from protocol.messages import Digest, Millis, PeerId, Record, Uint
from protocol.replay import ReplayCache, check_freshness

__all__ = ["Envelope", "ReplayCache", "check_freshness", "open_envelope", "seal"]

_DOMAIN_NAME = DOMAIN.decode("ascii")
_VERSIONED_DOMAIN = f"{_DOMAIN_NAME}/{PROTOCOL_VERSION}"
_ANY_VERSION = re.compile(rf"{_DOMAIN_NAME}/([0-9]{{1,9}})")


class Envelope(Record, frozen=True):
    """One signed message. `domain` is `murmuration/<protocol version>`."""

    domain: Annotated[str, Meta(max_length=32)]
    swarm_id: Digest
    topic: Annotated[str, Meta(min_length=1, max_length=256)]
    sender: PeerId
    sequence: Uint
    """Strictly increasing for one sender, also over restarts (`node/state/stores.py`)."""
    created_at: Millis
    expires_at: Millis
    payload: Annotated[bytes, Meta(max_length=MAX_ENVELOPE_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


def seal(
    identity: Identity,
    *,
    swarm_id: Digest,
    topic: str,
    sequence: int,
    payload: bytes,
    now_ms: int,
    ttl_ms: int,
) -> bytes:
    """The bytes of a signed envelope that lives from `now_ms` for `ttl_ms`. Raises `LocalProtocolError` when
    a receiver would refuse it."""
    if not 0 < ttl_ms <= MAX_TTL_MS:
        raise LocalProtocolError(f"an envelope lives 1 to {MAX_TTL_MS} ms, not {ttl_ms}")
    times = (now_ms, now_ms + ttl_ms)
    to_sign = _signed_bytes(swarm_id, topic, identity.peer_id, sequence, *times, payload)
    signature = identity.sign(to_sign)
    data = encode(
        Envelope(_VERSIONED_DOMAIN, swarm_id, topic, identity.peer_id, sequence, *times, payload, signature)
    )
    if len(data) > MAX_ENVELOPE_BYTES:
        raise LocalProtocolError(f"an envelope of {len(data)} bytes is above the cap of {MAX_ENVELOPE_BYTES}")
    return data


def open_envelope(
    data: bytes, *, swarm_id: Digest, topic: str, now_ms: int, max_bytes: int = MAX_ENVELOPE_BYTES
) -> Envelope:
    """The envelope in `data` if it is for this swarm and topic, fresh at `now_ms` and signed by its sender.

    Cheap checks come first; the signature (0.1 ms) is the last. Raises a `RemoteProtocolError` otherwise.
    Replay is not checked here: give the result to `ReplayCache.admit`.
    """
    envelope = decode(data, Envelope, max_bytes=max_bytes)
    if envelope.domain != _VERSIONED_DOMAIN:
        match = _ANY_VERSION.fullmatch(envelope.domain)
        if match is not None:
            raise VersionError(
                f"the sender speaks protocol version {match.group(1)}, this node {PROTOCOL_VERSION}: "
                "the older of the two must be updated"
            )
        raise SignatureError(
            f"the envelope is of another protocol: {shown(envelope.domain)}", reason="domain"
        )
    if envelope.swarm_id != swarm_id:
        raise SignatureError(f"the envelope is for swarm {envelope.swarm_id}, not {swarm_id}", reason="swarm")
    if envelope.topic != topic:
        raise SignatureError(
            f"the envelope is for topic {shown(envelope.topic)}, not {topic!r}", reason="topic"
        )
    check_freshness(envelope.created_at, envelope.expires_at, now_ms)
    signed = _signed_bytes(
        envelope.swarm_id,
        envelope.topic,
        envelope.sender,
        envelope.sequence,
        envelope.created_at,
        envelope.expires_at,
        envelope.payload,
    )
    if not verify(envelope.sender, signed, envelope.signature):
        raise SignatureError(f"the signature is not by the claimed sender {envelope.sender}")
    return envelope


def _signed_bytes(
    swarm_id: Digest,
    topic: str,
    sender: PeerId,
    sequence: int,
    created_at: int,
    expires_at: int,
    payload: bytes,
) -> bytes:
    """What the signature covers. Our own out-of-range numbers are refused here, before signing."""
    try:
        numbers = [number.to_bytes(8, "big") for number in (sequence, created_at, expires_at)]
        texts = [text.encode("utf-8") for text in (swarm_id, topic, sender)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"this envelope cannot be signed: {error}") from error
    return framed("envelope", *texts, *numbers, payload)
