"""Names on the network."""

from __future__ import annotations

import pytest

from protocol import topics
from protocol.errors import DecodeError, SignatureError, VersionError
from protocol.identity import Identity

SWARM = "ab" * 32
OWNER = Identity.from_seed(bytes(32)).peer_id


def test_names_carry_the_protocol_version_but_the_handshake() -> None:
    """Two versions must meet somewhere to tell each other."""
    assert topics.HELLO_PROTOCOL == "/murmuration/hello"
    assert topics.announcement_topic(SWARM) == f"murmuration/2/{SWARM}/announcements"
    assert topics.BLOB_PROTOCOL == "/murmuration/2/blob"
    assert topics.CHARTER_PROTOCOL == "/murmuration/2/charter"
    assert topics.RECONCILE_PROTOCOL == "/murmuration/2/reconcile"


def test_key_and_its_parts() -> None:
    key = topics.peer_key(SWARM, OWNER)
    assert key == f"murmuration/2/peer/{SWARM}/{OWNER}"
    assert topics.parse_key(key) == topics.RecordKey(topics.RecordKind.PEER, SWARM, OWNER)
    assert str(topics.parse_key(key)) == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "peer",
        f"murmuration/2/peer/{SWARM}/{OWNER}\n",
        f"murmuration/2/peer/{SWARM}/{OWNER}/more",
        f" murmuration/2/peer/{SWARM}/{OWNER}",
        f"murmuration/2/peer/{SWARM.upper()}/{OWNER}",
        f"murmuration/2/body/{SWARM}/{OWNER}",
        f"murmuration/٣/peer/{SWARM}/{OWNER}",
        f"murmuration/2/peer/../../{SWARM}/{OWNER}",
        "x" * 1_000_000,
    ],
)
def test_unknown_key_is_refused_in_a_short_sentence(key: str) -> None:
    with pytest.raises(DecodeError) as raised:
        topics.parse_key(key)
    assert len(str(raised.value)) < 200


def test_key_of_another_version_is_told_so() -> None:
    with pytest.raises(VersionError, match="version 1, this node speaks 2"):
        topics.parse_key(f"murmuration/1/peer/{SWARM}/{OWNER}")


def test_key_without_a_real_owner_is_refused() -> None:
    with pytest.raises(SignatureError, match="owner"):
        topics.parse_key(f"murmuration/2/peer/{SWARM}/{'1' * 52}")
