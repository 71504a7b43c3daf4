"""Annexes and members' tokens: who may sign them, which one counts, who is admitted."""

from __future__ import annotations

import msgspec
import pytest

from protocol.annex import check_annex, is_issuer, is_member, issue_token, newer, sign_annex, token_name
from protocol.codec import encode
from protocol.constants import MAX_ADDRESSES, MAX_CLOCK_SKEW_MS, MAX_FRAME_BYTES, MAX_REVOKED_TOKENS
from protocol.errors import DecodeError, LocalProtocolError, SignatureError
from protocol.messages import Annex
from tests.protocol.samples import ANNEX, CHARTER, IDENTITY, ISSUER, MEMBER, NOW_MS, SWARM_ID, TOKEN

replace = msgspec.structs.replace


@pytest.mark.parametrize("identity", [IDENTITY, ISSUER], ids=["founder", "issuer"])
def test_founder_and_issuers_sign(identity) -> None:
    assert is_issuer(CHARTER, identity.peer_id)
    annex = sign_annex(identity, CHARTER, Annex(SWARM_ID, 1, identity.peer_id, NOW_MS))
    check_annex(annex, CHARTER)
    token = issue_token(identity, CHARTER, MEMBER.peer_id, now_ms=NOW_MS, expires_at=NOW_MS + 1)
    assert is_member(CHARTER, None, MEMBER.peer_id, token, NOW_MS)
    assert is_member(CHARTER, None, identity.peer_id, None, NOW_MS)  # they need none themselves


def test_members_do_not_sign() -> None:
    with pytest.raises(LocalProtocolError, match="may not issue an annex"):
        sign_annex(MEMBER, CHARTER, Annex(SWARM_ID, 1, MEMBER.peer_id, NOW_MS))
    with pytest.raises(LocalProtocolError, match="did not sign"):
        sign_annex(MEMBER, CHARTER, Annex(SWARM_ID, 1, ISSUER.peer_id, NOW_MS))
    with pytest.raises(LocalProtocolError, match="cannot admit"):
        issue_token(MEMBER, CHARTER, MEMBER.peer_id, now_ms=NOW_MS, expires_at=NOW_MS + 1000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"swarm_id": "0" * 64}, "swarm"),
        ({"issuer": MEMBER.peer_id}, "annex_signature"),
        ({"issuer": IDENTITY.peer_id}, "annex_signature"),
        ({"sequence": 4}, "annex_signature"),
        ({"revoked": ()}, "annex_signature"),
        ({"signature": b""}, "annex_signature"),
    ],
)
def test_a_changed_annex_is_refused(change: dict[str, object], reason: str) -> None:
    check_annex(ANNEX, CHARTER)
    with pytest.raises(SignatureError) as refused:
        check_annex(replace(ANNEX, **change), CHARTER)
    assert refused.value.reason == reason


def test_the_higher_sequence_counts() -> None:
    later = replace(ANNEX, sequence=4)
    assert newer(None, ANNEX) is ANNEX
    assert newer(ANNEX, later) is later
    assert newer(later, ANNEX) is later
    assert newer(ANNEX, replace(ANNEX)) is ANNEX
    with pytest.raises(DecodeError, match="two annexes have the sequence 3") as refused:
        newer(ANNEX, replace(ANNEX, relays=()))
    assert refused.value.reason == "annex_conflict"


def test_the_largest_annex_fits_into_a_frame() -> None:
    addresses = ("a" * 256,) * MAX_ADDRESSES
    annex = replace(ANNEX, bootstraps=addresses, relays=addresses, revoked=("0" * 64,) * MAX_REVOKED_TOKENS)
    assert len(encode(annex)) < MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"swarm_id": "0" * 64},
        {"peer_id": ISSUER.peer_id},
        {"issuer": IDENTITY.peer_id},
        {"issuer": MEMBER.peer_id},
        {"expires_at": TOKEN.expires_at + 1},
        {"created_at": NOW_MS - 1},
        {"signature": b""},
    ],
)
def test_a_changed_token_admits_nobody(change: dict[str, object]) -> None:
    assert is_member(CHARTER, None, MEMBER.peer_id, TOKEN, NOW_MS)
    assert not is_member(CHARTER, None, MEMBER.peer_id, replace(TOKEN, **change), NOW_MS)


def test_a_token_is_its_bearers_for_a_time() -> None:
    stranger = ISSUER.from_seed(bytes(32)).peer_id
    assert not is_member(CHARTER, None, MEMBER.peer_id, None, NOW_MS)
    assert not is_member(CHARTER, None, stranger, TOKEN, NOW_MS)
    assert is_member(CHARTER, None, MEMBER.peer_id, TOKEN, NOW_MS - MAX_CLOCK_SKEW_MS)
    assert not is_member(CHARTER, None, MEMBER.peer_id, TOKEN, NOW_MS - MAX_CLOCK_SKEW_MS - 1)
    assert is_member(CHARTER, None, MEMBER.peer_id, TOKEN, TOKEN.expires_at - 1)
    assert not is_member(CHARTER, None, MEMBER.peer_id, TOKEN, TOKEN.expires_at)
    assert is_member(replace(CHARTER, closed=False), None, stranger, None, NOW_MS)


def test_a_revoked_token_admits_nobody() -> None:
    assert is_member(CHARTER, ANNEX, MEMBER.peer_id, TOKEN, NOW_MS)
    revoked = replace(ANNEX, revoked=(token_name(TOKEN),))
    assert not is_member(CHARTER, revoked, MEMBER.peer_id, TOKEN, NOW_MS)
    again = issue_token(ISSUER, CHARTER, MEMBER.peer_id, now_ms=NOW_MS + 1, expires_at=TOKEN.expires_at)
    assert is_member(CHARTER, revoked, MEMBER.peer_id, again, NOW_MS + 1)
