"""Signed envelopes: what is covered, what is fresh, who sent it."""

from __future__ import annotations

import msgspec
import pytest

from protocol.codec import decode, encode, framed
from protocol.constants import MAX_CLOCK_SKEW_MS, MAX_ENVELOPE_BYTES, MAX_TTL_MS
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import (
    FreshnessError,
    LimitError,
    LocalProtocolError,
    SignatureError,
    VersionError,
)
from protocol.identity import verify
from tests.protocol.samples import IDENTITY, MEMBER, NOW_MS, SWARM_ID, TOPIC, envelope_bytes


def opened(data: bytes, now_ms: int = NOW_MS) -> Envelope:
    return open_envelope(data, swarm_id=SWARM_ID, topic=TOPIC, now_ms=now_ms)


def changed(**change: object) -> bytes:
    """A right envelope with fields exchanged, the old signature kept."""
    envelope = decode(envelope_bytes(), Envelope, max_bytes=MAX_ENVELOPE_BYTES)
    return encode(msgspec.structs.replace(envelope, **change))


def test_what_is_sealed_can_be_opened() -> None:
    envelope = opened(envelope_bytes(5, payload=b"hello", ttl_ms=60_000))
    assert (envelope.sender, envelope.sequence, envelope.payload) == (IDENTITY.peer_id, 5, b"hello")
    assert (envelope.created_at, envelope.expires_at) == (NOW_MS, NOW_MS + 60_000)


def test_signature_covers_every_field_behind_its_length() -> None:
    envelope = opened(envelope_bytes())
    signed = framed(
        "envelope",
        SWARM_ID.encode(),
        TOPIC.encode(),
        IDENTITY.peer_id.encode(),
        (5).to_bytes(8, "big"),
        NOW_MS.to_bytes(8, "big"),
        (NOW_MS + 60_000).to_bytes(8, "big"),
        b"payload",
    )
    assert verify(IDENTITY.peer_id, signed, envelope.signature)


@pytest.mark.parametrize(
    "change",
    [
        {"sender": MEMBER.peer_id},
        {"sequence": 6},
        {"created_at": NOW_MS - 1},
        {"expires_at": NOW_MS + 60_001},
        {"payload": b"Payload"},
        {"payload": b""},
        {"signature": bytes(64)},
    ],
)
def test_changed_field_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(SignatureError, match="not by the claimed sender"):
        opened(changed(**change))


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"topic": TOPIC + "x"}, "topic"), ({"swarm_id": "0" * 64}, "swarm")],
)
def test_envelope_for_elsewhere_is_refused(other: dict[str, str], reason: str) -> None:
    """Also when it only claims to be for here."""
    data = envelope_bytes(**other)
    with pytest.raises(SignatureError) as raised:
        opened(data)
    assert raised.value.reason == reason
    moved = msgspec.structs.replace(
        decode(data, Envelope, max_bytes=MAX_ENVELOPE_BYTES), swarm_id=SWARM_ID, topic=TOPIC
    )
    with pytest.raises(SignatureError, match="not by the claimed sender"):
        opened(encode(moved))


@pytest.mark.parametrize("version", ["0", "1", "999999999"])
def test_other_version_is_told_so(version: str) -> None:
    with pytest.raises(VersionError, match=f"protocol version {version}, this node 2"):
        opened(changed(domain=f"murmuration/{version}"))


@pytest.mark.parametrize("domain", ["", "murmuration", "grail/1", "murmuration/1 ", "murmuration/01x"])
def test_other_protocol_is_refused(domain: str) -> None:
    with pytest.raises(SignatureError) as raised:
        opened(changed(domain=domain))
    assert raised.value.reason == "domain"


def test_signature_for_another_purpose_does_not_fit() -> None:
    fields = (SWARM_ID, TOPIC, IDENTITY.peer_id)
    numbers = [number.to_bytes(8, "big") for number in (5, NOW_MS, NOW_MS + 60_000)]
    signature = IDENTITY.sign(framed("charter", *(f.encode() for f in fields), *numbers, b"payload"))
    with pytest.raises(SignatureError):
        opened(changed(signature=signature))


@pytest.mark.parametrize(
    ("created_after_now", "life", "accepted"),
    [
        (0, 1, True),
        (0, MAX_TTL_MS, True),
        (0, MAX_TTL_MS + 1, False),
        (0, 0, False),
        (0, -1, False),
        (MAX_CLOCK_SKEW_MS, 1, True),
        (MAX_CLOCK_SKEW_MS + 1, 1, False),
        (-60_000, 60_000, False),
        (-60_000, 60_001, True),
        (-MAX_TTL_MS + 1, MAX_TTL_MS, True),
        (-NOW_MS, MAX_TTL_MS, False),
        (2**53 - NOW_MS, 0, False),
    ],
)
def test_freshness_has_exact_limits(created_after_now: int, life: int, accepted: bool) -> None:
    created_at = NOW_MS + created_after_now
    numbers = [number.to_bytes(8, "big") for number in (5, created_at, max(0, created_at + life))]
    texts = [text.encode() for text in (SWARM_ID, TOPIC, IDENTITY.peer_id)]
    data = changed(
        created_at=created_at,
        expires_at=max(0, created_at + life),
        signature=IDENTITY.sign(framed("envelope", *texts, *numbers, b"payload")),
    )
    if accepted:
        assert opened(data).created_at == created_at
    else:
        with pytest.raises(FreshnessError):
            opened(data)


def test_own_mistakes_are_our_fault() -> None:
    good = {
        "swarm_id": SWARM_ID,
        "topic": TOPIC,
        "payload": b"",
        "now_ms": NOW_MS,
        "ttl_ms": 1000,
        "sequence": 0,
    }
    seal(IDENTITY, **good)
    for change in (
        {"ttl_ms": 0},
        {"ttl_ms": MAX_TTL_MS + 1},
        {"sequence": -1},
        {"sequence": 2**63},
        {"sequence": 2**70},
        {"topic": ""},
        {"topic": "\ud800"},
        {"topic": "x" * 257},
        {"swarm_id": "x"},
        {"now_ms": -1},
        {"payload": bytes(MAX_ENVELOPE_BYTES)},
        {"payload": bytes(MAX_ENVELOPE_BYTES + 1)},
    ):
        with pytest.raises(LocalProtocolError):
            seal(IDENTITY, **{**good, **change})


def test_caller_may_set_a_lower_cap() -> None:
    data = envelope_bytes(payload=bytes(2000))
    with pytest.raises(LimitError):
        open_envelope(data, swarm_id=SWARM_ID, topic=TOPIC, now_ms=NOW_MS, max_bytes=2000)
