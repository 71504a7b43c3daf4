"""Byte channels over sockets: what happens to bytes that are not flushed when a channel is closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from node.transport._sockets import SocketChannel

SENT = b"x" * 1_000_000
"""More than the buffers of a socket hold."""


class Ends:
    """A channel, the bare socket at its other end, and the timers that closing has set; nothing waits for
    them."""

    def __init__(self, channel: SocketChannel, other: socket.socket) -> None:
        self.channel = channel
        self.other = other
        self.timers: list[Callable[[], object]] = []
        self.errors: list[dict[str, Any]] = []

    async def expire(self) -> None:
        for timer in self.timers:
            timer()
        for _ in range(5):
            await asyncio.sleep(0)

    async def read_all(self) -> int:
        """Until the end of the stream."""
        loop, count = asyncio.get_running_loop(), 0
        while data := await loop.sock_recv(self.other, 1 << 16):
            count += len(data)
        return count


@pytest.fixture
async def ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        channel = SocketChannel(await asyncio.open_unix_connection(sock=ours), set())
        ends = Ends(channel, theirs)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: ends.errors.append(context))
        monkeypatch.setattr(
            loop, "call_later", lambda delay_s, call, *given: ends.timers.append(lambda: call(*given))
        )
        yield ends
        channel.abort()
        await asyncio.sleep(0)


async def close_while_writing(channel: SocketChannel) -> asyncio.Task[None]:
    """The write that is still under way."""
    writing = asyncio.create_task(channel.write(SENT))
    await asyncio.sleep(0)
    channel.close()
    return writing


async def test_what_is_read_in_time_arrives_and_the_timer_finds_nothing_to_do(ends):
    writing = await close_while_writing(ends.channel)
    assert len(ends.timers) == 1
    assert await ends.read_all() == len(SENT)
    await writing
    await ends.expire()
    assert ends.errors == []


async def test_what_is_not_read_in_time_is_discarded(ends):
    writing = await close_while_writing(ends.channel)
    await ends.expire()
    await writing
    assert 0 < await ends.read_all() < len(SENT)
    assert ends.errors == []
