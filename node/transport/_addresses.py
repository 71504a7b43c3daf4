"""Multiaddrs as people give them: what to dial, where to listen. TCP only.

TCP, because the daemon embeds quic-go 0.40.0 (CVE-2023-49295, CVE-2024-22189).
"""

from __future__ import annotations

import re
import socket

from hivemind.utils.multiaddr import Multiaddr

from protocol.errors import AddressError, SignatureError
from protocol.identity import public_key
from protocol.messages import PeerId

__all__ = ["parse_address", "require_free", "tcp_port", "with_port"]

_LISTEN = re.compile(r"(/ip[46]/([0-9a-fA-F.:]+)/tcp/)([0-9]{1,5})")


def parse_address(address: str) -> tuple[PeerId, Multiaddr]:
    """Peer id and dialable part of `.../p2p/<peer id>`. Raises `AddressError`."""
    where, _, peer_id = address.rpartition("/p2p/")
    try:
        public_key(peer_id)
        target = Multiaddr(where)
    except (SignatureError, ValueError):
        target = None
    if target is None or not where:
        raise AddressError(
            f"{address[:200]!r} is no address of the form /ip4/<address>/tcp/<port>/p2p/<peer id>"
        )
    return peer_id, target


def tcp_port(address: str) -> str | None:
    """Port of a plain `/ip4/<address>/tcp/<port>`; None for any other address."""
    match = _LISTEN.fullmatch(address)
    return match.group(3) if match is not None else None


def with_port(address: str, port: str) -> str:
    """The same listening address with another port."""
    match = _LISTEN.fullmatch(address)
    return match.group(1) + port if match is not None else address


def require_free(listen: str) -> None:
    """Raise `AddressError` unless we can listen there.

    libp2p sets SO_REUSEPORT: a second node on the same port would start without an error and take half of the
    first one's connections.
    """
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match.group(3)) > 65_535:
        raise AddressError(f"{listen!r} is no listening address of the form /ip4/<address>/tcp/<port>")
    family = socket.AF_INET if listen.startswith("/ip4") else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((match.group(2), int(match.group(3))))
        except OSError as error:
            raise AddressError(
                f"cannot listen on {listen}: {error.strerror or error}; choose another port, or 0"
            ) from None
