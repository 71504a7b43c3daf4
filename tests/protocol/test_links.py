"""Links: what their owner signed, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from protocol.codec import encode
from protocol.errors import DecodeError, LimitError, LocalProtocolError, SignatureError
from protocol.identity import Identity
from protocol.links import MAX_SIGNED_LINK_BYTES, decode_link, open_link, sign_link
from protocol.messages import ChunkedBlob, Lineage, LinkKind, SignedLink, WeightsLink

OWNER = Identity.from_seed(bytes([1]) * 32)
OTHER = Identity.from_seed(bytes([2]) * 32)
SWARM = "5" * 64
LINK = WeightsLink(
    lineage=Lineage(OWNER.peer_id, "b" * 64, "7" * 64),
    policy_version=9,
    kind=LinkKind.DELTA,
    base_version=7,
    base="1" * 64,
    result="2" * 64,
    blob=ChunkedBlob("3" * 64, 100_000, 16 * 1024),
    created_at=1_800_000_000_000,
)


def change(**fields) -> WeightsLink:
    return msgspec.structs.replace(LINK, **fields)


@pytest.mark.parametrize(
    "link",
    [LINK, change(base_version=8), change(kind=LinkKind.ANCHOR, base_version=9), change(base_version=0)],
)
def test_what_was_signed_is_read(link):
    signed = sign_link(OWNER, SWARM, link)
    assert open_link(signed, SWARM) == decode_link(signed) == link
    assert len(encode(signed)) <= MAX_SIGNED_LINK_BYTES


def test_another_owner_or_swarm_is_refused():
    signed = sign_link(OWNER, SWARM, LINK)
    with pytest.raises(SignatureError) as refused:
        open_link(signed, "6" * 64)
    assert refused.value.reason == "link_signature"
    forged = encode(change(lineage=Lineage(OTHER.peer_id, "b" * 64, "7" * 64)))
    with pytest.raises(SignatureError):
        open_link(SignedLink(forged, signed.signature), SWARM)
    with pytest.raises(LocalProtocolError, match="cannot sign a link of"):
        sign_link(OTHER, SWARM, LINK)


def test_every_flipped_bit_is_found():
    signed = sign_link(OWNER, SWARM, LINK)
    for at in range(len(signed.link)):
        flipped = bytearray(signed.link)
        flipped[at] ^= 1
        with pytest.raises((SignatureError, DecodeError, LimitError)):
            open_link(SignedLink(bytes(flipped), signed.signature), SWARM)
    for at in range(64):
        flipped = bytearray(signed.signature)
        flipped[at] ^= 1
        with pytest.raises(SignatureError):
            open_link(SignedLink(signed.link, bytes(flipped)), SWARM)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"base_version": 9}, "link_version"),
        ({"base_version": 10}, "link_version"),
        ({"kind": LinkKind.ANCHOR}, "link_version"),
        ({"kind": LinkKind.ANCHOR, "base_version": 10}, "link_version"),
        ({"blob": ChunkedBlob("3" * 64, 100_000, 20_000)}, "chunk_size"),
        ({"blob": ChunkedBlob("3" * 64, 16 * 2**30, 16 * 1024)}, "chunk_count"),
    ],
)
def test_a_link_that_contradicts_itself_is_neither_signed_nor_read(fields, reason):
    link = change(**fields)
    with pytest.raises(LocalProtocolError, match="must not be signed"):
        sign_link(OWNER, SWARM, link)
    payload = encode(link)
    from protocol.links import _signed

    signed = SignedLink(payload, OWNER.sign(_signed(SWARM, payload)))
    with pytest.raises(DecodeError) as refused:
        open_link(signed, SWARM)
    assert refused.value.reason == reason


def test_bytes_that_are_no_link_are_refused():
    for junk in (b"", b"\x80", b"\xff" * 100, encode(LINK)[:-1], encode(LINK) + b"\x00"):
        with pytest.raises(DecodeError):
            open_link(SignedLink(junk, bytes(64)), SWARM)
