"""Links of a lineage's chain, signed by its owner so that anybody can pass them on.

    WeightsLink + identity --sign_link--> SignedLink          SignedLink --open_link--> WeightsLink

A signature says who made a link and in which swarm. Which links form a chain is what
`node/weights/chain/chain.py` says.
"""

from __future__ import annotations

from protocol.chunks import chunk_count
from protocol.codec import decode, encode, framed
from protocol.errors import DecodeError, LocalProtocolError, RemoteProtocolError, SignatureError
from protocol.identity import Identity, verify
from protocol.messages import Digest, LinkKind, SignedLink, WeightsLink

__all__ = ["MAX_SIGNED_LINK_BYTES", "decode_link", "open_link", "sign_link"]

MAX_LINK_BYTES = 2048
MAX_SIGNED_LINK_BYTES = MAX_LINK_BYTES + 128
"""A SignedLink on a stream or in a file."""


def sign_link(identity: Identity, swarm_id: Digest, link: WeightsLink) -> SignedLink:
    """Raises LocalProtocolError for a link of another owner, or one that contradicts itself."""
    if link.lineage.owner != identity.peer_id:
        raise LocalProtocolError(f"{identity.peer_id} cannot sign a link of {link.lineage.owner}")
    payload = encode(link)
    try:
        _check(link)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"this link must not be signed: {error}") from error
    return SignedLink(link=payload, signature=identity.sign(_signed(swarm_id, payload)))


def decode_link(signed: SignedLink) -> WeightsLink:
    """The link inside, whoever signed it. Raises DecodeError."""
    return decode(signed.link, WeightsLink, max_bytes=MAX_LINK_BYTES)


def open_link(signed: SignedLink, swarm_id: Digest) -> WeightsLink:
    """The link inside. Raises SignatureError (link_signature) when its owner did not sign it for this swarm,
    DecodeError when it contradicts itself: a version that does not come after its base's (link_version), or
    chunks that no blob can have."""
    link = decode_link(signed)
    if not verify(link.lineage.owner, _signed(swarm_id, signed.link), signed.signature):
        raise SignatureError(f"{link.lineage.owner} did not sign this link", reason="link_signature")
    _check(link)
    return link


def _check(link: WeightsLink) -> None:
    if link.kind is LinkKind.ANCHOR:
        fits = link.base_version == link.policy_version
    else:
        fits = link.base_version < link.policy_version
    if not fits:
        raise DecodeError(
            f"{link.kind.value} of version {link.policy_version} starts from {link.base_version}",
            reason="link_version",
        )
    chunk_count(link.blob)


def _signed(swarm_id: Digest, payload: bytes) -> bytes:
    return framed("link", bytes.fromhex(swarm_id), payload)
