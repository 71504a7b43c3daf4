"""Byte pipes of the in-memory network: ordered, reliable, with a window, and breakable from outside.

A `MemoryChannel` is one end; its writes wait while `WINDOW_BYTES` are unread at the other end, so a peer that
never reads blocks its sender, as TCP would.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from node.transport.streams import ByteChannel
from protocol.errors import TransportError

__all__ = ["WINDOW_BYTES", "MemoryChannel", "Pipe"]

WINDOW_BYTES = 256 * 1024


class Pipe:
    """One direction of a channel."""

    def __init__(self) -> None:
        self.last_at_s = 0.0
        self._buffer = bytearray()
        self._underway_bytes = 0
        self._ended = False
        self._broken = False
        self._changed = asyncio.Event()

    def announce(self, count: int) -> None:
        """`count` bytes were sent and will be fed later."""
        self._underway_bytes += count

    def feed(self, data: bytes) -> None:
        self._underway_bytes -= len(data)
        if not self._broken:
            self._buffer += data
        self._changed.set()

    def end(self) -> None:
        """No more bytes follow; what is there can still be read."""
        self._ended = True
        self._changed.set()

    def break_off(self) -> None:
        """Nothing can be read or written any more."""
        self._broken = True
        self._buffer.clear()
        self._changed.set()

    async def read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if self._broken or self._ended:
                raise TransportError(f"the stream ended {count - len(self._buffer)} bytes early")
            await self._change()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._changed.set()
        return data

    async def wait_for_room(self, count: int) -> None:
        while not self._broken and self._underway_bytes + len(self._buffer) + count > WINDOW_BYTES:
            await self._change()
        if self._broken or self._ended:
            raise TransportError("the stream is closed by the other side")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryChannel(ByteChannel):
    """One end of a pair of pipes. `carry(pipe, count, arrive)` calls `arrive` when `count` bytes have passed
    the link, in order."""

    def __init__(
        self, inbound: Pipe, outbound: Pipe, carry: Callable[[Pipe, int, Callable[[], None]], None]
    ) -> None:
        self.on_close: Callable[[MemoryChannel], object] | None = None
        self._inbound = inbound
        self._outbound = outbound
        self._carry = carry
        self._closed = False

    async def read_exactly(self, count: int) -> bytes:
        # In pieces of half a window: a whole large frame would never fit into the window.
        pieces = []
        while count > 0:
            piece = await self._inbound.read_exactly(min(count, WINDOW_BYTES // 2))
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), WINDOW_BYTES // 4):
            piece = data[start : start + WINDOW_BYTES // 4]
            await self._outbound.wait_for_room(len(piece))
            if self._closed:
                raise TransportError("the stream is closed")
            self._outbound.announce(len(piece))
            self._carry(self._outbound, len(piece), functools.partial(self._outbound.feed, piece))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.on_close is not None:
            self.on_close(self)
        self._carry(self._outbound, 0, self._outbound.end)
        self._inbound.break_off()

    def unplug(self) -> None:
        """Whatever this end does from now on, closing included, is not noticed at the other one."""
        self._inbound, self._outbound = Pipe(), Pipe()

    def reset(self) -> None:
        """The link is gone: both directions break at once."""
        self._closed = True
        if self.on_close is not None:
            self.on_close(self)
        self._outbound.break_off()
        self._inbound.break_off()
