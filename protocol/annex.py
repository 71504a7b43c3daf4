"""What changes in a swarm's life: the annex beside the charter, and the tokens by which members are admitted.

    Annex + identity --sign_annex--> signed Annex --check_annex--> --newer--> the one that counts
    peer id + identity --issue_token--> MemberToken --is_member--> whether its bearer takes part

Both are signed by the founder or by a key that the charter names as an issuer, so adding a member or an
address makes no new swarm. Not for what must be the same for everybody at all times (`protocol/charter.py`).
"""

from __future__ import annotations

import msgspec

from protocol.charter import swarm_id
from protocol.codec import digest, encode, framed
from protocol.constants import MAX_CLOCK_SKEW_MS, MAX_FRAME_BYTES
from protocol.errors import DecodeError, LocalProtocolError, SignatureError
from protocol.identity import Identity, verify
from protocol.messages import Annex, Charter, Digest, MemberToken, PeerId

__all__ = [
    "MAX_ANNEX_BYTES",
    "check_annex",
    "is_issuer",
    "is_member",
    "issue_token",
    "newer",
    "sign_annex",
    "token_name",
]

MAX_ANNEX_BYTES = MAX_FRAME_BYTES
"""An annex travels in one frame."""


def is_issuer(charter: Charter, peer_id: PeerId) -> bool:
    """Whether a peer may sign annexes and tokens."""
    return peer_id == charter.founder or peer_id in charter.issuers


def sign_annex(identity: Identity, charter: Charter, annex: Annex) -> Annex:
    """`annex` with its signature. Raises LocalProtocolError when receivers would refuse it."""
    signed = msgspec.structs.replace(annex, signature=identity.sign(_annex_bytes(annex)))
    try:
        check_annex(signed, charter)
    except SignatureError as error:
        raise LocalProtocolError(f"{identity.peer_id} must not sign this annex: {error}") from error
    if len(data := encode(signed)) > MAX_ANNEX_BYTES:
        raise LocalProtocolError(f"the annex has {len(data)} bytes, above the cap of {MAX_ANNEX_BYTES}")
    return signed


def check_annex(annex: Annex, charter: Charter) -> None:
    """Raise SignatureError unless the annex is of this swarm (`swarm`) and signed by its founder or an issuer
    (`annex_signature`)."""
    if annex.swarm_id != swarm_id(charter):
        raise SignatureError(f"the annex is of swarm {annex.swarm_id}", reason="swarm")
    if not is_issuer(charter, annex.issuer):
        raise SignatureError(
            f"{annex.issuer} may not issue an annex of swarm {charter.name}", reason="annex_signature"
        )
    if not verify(annex.issuer, _annex_bytes(annex), annex.signature):
        raise SignatureError(f"{annex.issuer} did not sign this annex", reason="annex_signature")


def newer(known: Annex | None, heard: Annex) -> Annex:
    """Which of two annexes counts: the one with the higher sequence. Raises DecodeError (`annex_conflict`)
    for another content under the same sequence: its issuers do not agree, and the known one stays."""
    if known is None or heard.sequence > known.sequence:
        return heard
    if heard.sequence == known.sequence and heard != known:
        raise DecodeError(
            f"two annexes have the sequence {heard.sequence}, by {known.issuer} and by {heard.issuer}",
            reason="annex_conflict",
        )
    return known


def issue_token(
    identity: Identity, charter: Charter, peer_id: PeerId, *, now_ms: int, expires_at: int
) -> MemberToken:
    """A token for `peer_id`, valid until `expires_at` (ms). Raises LocalProtocolError when receivers would
    refuse it."""
    token = MemberToken(swarm_id(charter), peer_id, identity.peer_id, now_ms, expires_at)
    signed = msgspec.structs.replace(token, signature=identity.sign(_token_bytes(token)))
    if not is_member(charter, None, peer_id, signed, now_ms):
        raise LocalProtocolError(
            f"{identity.peer_id} cannot admit {peer_id} to swarm {charter.name} until {expires_at}"
        )
    return signed


def token_name(token: MemberToken) -> Digest:
    """What an annex revokes a token by: the hash of all of it but its signature."""
    return digest(_token_bytes(token))


def is_member(
    charter: Charter, annex: Annex | None, peer_id: PeerId, token: MemberToken | None, now_ms: int
) -> bool:
    """Whether a peer may take part at `now_ms`: everybody in an open swarm; in a closed one its founder, its
    issuers, and whoever has a token of theirs that has not expired and was not revoked."""
    if not charter.closed or is_issuer(charter, peer_id):
        return True
    return (
        token is not None
        and token.peer_id == peer_id
        and token.created_at - MAX_CLOCK_SKEW_MS <= now_ms < token.expires_at
        and is_issuer(charter, token.issuer)
        and token.swarm_id == swarm_id(charter)
        and (annex is None or token_name(token) not in annex.revoked)
        and verify(token.issuer, _token_bytes(token), token.signature)
    )


def _annex_bytes(annex: Annex) -> bytes:
    return framed("annex", encode(msgspec.structs.replace(annex, signature=b"")))


def _token_bytes(token: MemberToken) -> bytes:
    return framed("token", encode(msgspec.structs.replace(token, signature=b"")))
