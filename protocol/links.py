"""Links of a lineage's chain, signed by its owner so that anybody can pass them on.

    WeightsLink + identity --sign_link--> SignedLink          SignedLink --open_link--> WeightsLink

A signature says who made a link and in which swarm. Which links form a chain is `node/broadcast/chain.py`'s.
"""

from __future__ import annotations

from protocol.codec import decode, encode, framed
from protocol.errors import DecodeError, LocalProtocolError, SignatureError
from protocol.identity import Identity, verify
from protocol.messages import Digest, LinkKind, SignedLink, WeightsLink

__all__ = ["open_link", "sign_link"]

MAX_LINK_BYTES = 2048


def sign_link(identity: Identity, swarm_id: Digest, link: WeightsLink) -> SignedLink:
    """Raises LocalProtocolError for a link of another owner, or one that breaks its own bounds."""
    if link.lineage.owner != identity.peer_id:
        raise LocalProtocolError(f"{identity.peer_id} cannot sign a link of {link.lineage.owner}")
    payload = encode(link)
    return SignedLink(link=payload, signature=identity.sign(_signed(swarm_id, payload)))


def open_link(signed: SignedLink, swarm_id: Digest) -> WeightsLink:
    """The link inside. Raises SignatureError when its owner did not sign it for this swarm, DecodeError when
    it contradicts itself."""
    link = decode(signed.link, WeightsLink, max_bytes=MAX_LINK_BYTES)
    if not verify(link.lineage.owner, _signed(swarm_id, signed.link), signed.signature):
        raise SignatureError(f"{link.lineage.owner} did not sign this link", reason="link_signature")
    before = link.policy_version if link.kind is LinkKind.ANCHOR else link.policy_version - 1
    if link.base_version != before:
        raise DecodeError(
            f"{link.kind.value} of version {link.policy_version} starts from {link.base_version}",
            reason="link_version",
        )
    return link


def _signed(swarm_id: Digest, payload: bytes) -> bytes:
    return framed("link", bytes.fromhex(swarm_id), payload)
