"""Byte channels over the unix sockets through which the daemon hands us streams."""

from __future__ import annotations

import asyncio

from node.transport._control import SocketPair
from node.transport.streams import ByteChannel
from protocol.errors import TransportError

__all__ = ["SocketChannel"]

_FLUSH_TIMEOUT_S = 5.0


class SocketChannel(ByteChannel):
    """One stream, in the set of open ones until it is closed.

    What a peer does not read is discarded 5 s after closing, so that it cannot hold the socket.
    """

    def __init__(self, pair: SocketPair, open_channels: set[SocketChannel]) -> None:
        self._reader, self._writer = pair
        self._open_channels = open_channels
        open_channels.add(self)

    async def read_exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except (EOFError, OSError) as error:
            raise TransportError(f"the stream ended early: {error}") from None

    @property
    def ready(self) -> bool:
        transport = self._writer.transport
        return not transport.is_closing() and not transport.get_write_buffer_size()

    def write_now(self, data: bytes) -> None:
        self._writer.write(data)

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: the transport was closed meanwhile
            raise TransportError(f"the stream is closed by the other side: {error}") from None

    def close(self) -> None:
        transport = self._writer.transport
        self._open_channels.discard(self)
        if transport.is_closing():
            return
        transport.close()
        if transport.get_write_buffer_size() > 0:
            asyncio.get_running_loop().call_later(_FLUSH_TIMEOUT_S, self.abort)

    def abort(self) -> None:
        """Close without flushing."""
        transport = self._writer.transport
        self._open_channels.discard(self)
        # asyncio's abort fails on a transport that has flushed and closed by itself.
        if not transport.is_closing() or transport.get_write_buffer_size() > 0:
            transport.abort()
