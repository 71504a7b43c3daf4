"""The control protocol of the libp2p daemon: a connection per request, and one per stream.

hivemind's own client leaves sockets open when a request fails or is cancelled; this one closes whatever it
opens. The daemon is our own child, so its answers are trusted but still bounded. Every
failure is `OSError`, `EOFError` (an early end) or `ControlError`; deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.message import Message
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from node.transport.base import ConnectedPeer
from protocol.messages import PeerId

__all__ = ["Control", "ControlError", "SocketPair", "read_message"]

MAX_CONTROL_BYTES = 4 * 1024 * 1024
_MAX_VARINT_BYTES = 5

SocketPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ControlError(Exception):
    """The daemon refused a request; its own words."""


class Control:
    """Requests to the daemon that listens on the unix socket `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddrs the daemon believes it has, without the peer id."""
        response = await self._request(_request("IDENTIFY"))
        return tuple(str(Multiaddr(address)) for address in response.identify.addrs)

    async def connect(self, peer_id: PeerID, addresses: Sequence[Multiaddr], timeout_s: float) -> None:
        request = _request("CONNECT")
        request.connect.peer = peer_id.to_bytes()
        request.connect.addrs.extend(address.to_bytes() for address in addresses)
        request.connect.timeout = max(1, round(timeout_s))
        await self._request(request)

    async def peers(self) -> tuple[ConnectedPeer, ...]:
        response = await self._request(_request("LIST_PEERS"))
        addresses: dict[PeerId, list[str]] = {}
        for info in response.peers:
            known = addresses.setdefault(PeerID(info.id).to_base58(), [])
            known += [str(Multiaddr(address)) for address in info.addrs]
        return tuple(ConnectedPeer(peer_id, tuple(each)) for peer_id, each in addresses.items())

    async def handle(self, protocol: str, listener_path: str) -> None:
        """Pass incoming streams of `protocol` to the unix socket at `listener_path`."""
        request = _request("STREAM_HANDLER")
        request.streamHandler.addr = Multiaddr(f"/unix{listener_path}").to_bytes()
        request.streamHandler.proto.append(protocol)
        request.streamHandler.balanced = False
        await self._request(request)

    async def open_stream(self, peer_id: PeerID, protocol: str, timeout_s: float) -> SocketPair:
        """The connection that carries the new stream; the caller closes it."""
        request = _request("STREAM_OPEN")
        request.streamOpen.peer = peer_id.to_bytes()
        request.streamOpen.proto.append(protocol)
        request.streamOpen.timeout = max(1, round(timeout_s))
        return await self._open(request)

    async def _request(self, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            return await _exchange(reader, writer, request)
        finally:
            writer.transport.abort()

    async def _open(self, request: p2pd_pb2.Request) -> SocketPair:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            await _exchange(reader, writer, request)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def read_message(
    reader: asyncio.StreamReader, message: Message, max_bytes: int = MAX_CONTROL_BYTES
) -> None:
    """Read one length-delimited protobuf into `message`."""
    length = 0
    for position in range(_MAX_VARINT_BYTES):
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            break
    else:
        raise ControlError("the daemon sent an over-long message length")
    if length > max_bytes:
        raise ControlError(f"the daemon sent a message of {length} bytes, the cap is {max_bytes}")
    message.ParseFromString(await reader.readexactly(length))


def _request(kind: str) -> p2pd_pb2.Request:
    return p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind))


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: p2pd_pb2.Request
) -> p2pd_pb2.Response:
    await write_pbmsg(writer, request)
    response = p2pd_pb2.Response()
    await read_message(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise ControlError(response.error.msg[:300])
    return response
