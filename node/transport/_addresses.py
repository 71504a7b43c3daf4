"""Multiaddrs as people give them: what to dial, where to listen. TCP only.

TCP, because the daemon embeds quic-go 0.40.0 (CVE-2023-49295, CVE-2024-22189); over ip4 and ip6, and over
names where a person wrote one, which are looked up here and not by the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from typing import TYPE_CHECKING

from protocol.errors import AddressError, SignatureError
from protocol.identity import public_key
from protocol.messages import PeerId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hivemind.utils.multiaddr import Multiaddr

__all__ = ["may_dial", "parse_address", "peer_id_of", "require_free", "resolve", "tcp_port", "with_port"]

_LISTEN = re.compile(r"(/ip[46]/([0-9a-fA-F.:]+)/tcp/)([0-9]{1,5})")
_DIAL = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([0-9A-Za-z_.:-]{1,253})/tcp/([0-9]{1,5})")
_FAMILIES = {
    "ip4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
    "dns4": socket.AF_INET,
    "dns6": socket.AF_INET6,
}
_MAX_RESOLVED = 8
"""Addresses of one name that are tried."""


def peer_id_of(address: str) -> PeerId:
    """Peer id of `.../p2p/<peer id>`; the rest is looked at when it is dialled. Raises `AddressError`."""
    where, _, peer_id = address.rpartition("/p2p/")
    if where.startswith("/"):
        with contextlib.suppress(SignatureError, ValueError):
            public_key(peer_id)
            return peer_id
    raise _malformed(address)


def parse_address(address: str) -> PeerId:
    """Peer id of an address to dial. Raises `AddressError` for what this node does not dial."""
    peer_id = peer_id_of(address)
    _, host, port = _parts(address)
    if not host or not 0 < int(port) <= 65_535:
        raise _malformed(address)
    return peer_id


async def resolve(address: str) -> list[Multiaddr]:
    """What the daemon is to dial for a parsed address: TCP on IP addresses, those of a name. The caller has
    a deadline. Raises `AddressError` for a name without any."""
    from hivemind.utils.multiaddr import Multiaddr  # loads torch

    kind, host, port = _parts(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host,
            int(port),
            family=_FAMILIES[kind],
            type=socket.SOCK_STREAM,
            flags=socket.AI_NUMERICHOST if kind.startswith("ip") else 0,
        )
    except OSError as error:
        raise AddressError(f"{host} of {address[:200]!r} has no address: {error.strerror or error}") from None
    hosts = list(dict.fromkeys((family, str(place[0]).partition("%")[0]) for family, *_, place in found))
    names = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return [Multiaddr(f"/{names[family]}/{each}/tcp/{port}") for family, each in hosts[:_MAX_RESOLVED]]


def _parts(address: str) -> tuple[str, str, str]:
    """Kind, host and port of an address that is dialled; empty for any other."""
    match = _DIAL.fullmatch(address.rpartition("/p2p/")[0])
    return (match.group(1), match.group(2), match.group(3)) if match is not None else ("", "", "0")


def may_dial(address: str, own: Sequence[str]) -> bool:
    """Whether an address that a stranger gave is one to dial: TCP on an IP address that is public, or of a
    kind (loopback, private) that one of this node's `own` addresses has, too. So nobody makes a node knock
    at the doors of its own network, of its provider's machines, or by a protocol that it does not speak."""
    kind = _kind(address)
    return kind == "public" or (kind in ("loopback", "private") and kind in map(_kind, own))


def _kind(address: str) -> str:
    """public | loopback | private, "" for what is never dialled."""
    match = _LISTEN.fullmatch(address.rpartition("/p2p/")[0] or address)
    if match is None or not 0 < int(match.group(3)) <= 65_535:
        return ""
    try:
        host = ipaddress.ip_address(match.group(2))
    except ValueError:
        return ""
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    if host.is_loopback:
        return "loopback"
    if host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved:
        return ""
    return "public" if host.is_global else "private"


def _malformed(address: str) -> AddressError:
    return AddressError(
        f"{address[:200]!r} is no address of the form /ip4/<address>/tcp/<port>/p2p/<peer id>, with ip6 or "
        "dns4 and a name in place of ip4"
    )


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
