"""One stream of an exchange, from either end: a reader, a writer that sends what is due, and signs of life.

A subclass says what a frame means (`_read`) and what is due (`_write`); `poke` wakes the writer now, `later`
soon. Whichever side fails ends both. Not for deciding what to send: `download.py`, `upload.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from node.clock import Clock
from node.transport.base import Stream
from protocol.chunks import Frame, encode_frame
from protocol.errors import SwarmError

__all__ = ["LIFE_S", "Session", "news_wait_s"]

LIFE_S = 5.0
"""A side that has sent nothing for so long says that it lives."""


_NEWS_WAIT_S, _MAX_NEWS_WAIT_S = 0.1, 0.3
_NEWS_PER_S = 50.0


def news_wait_s(sessions: int) -> float:
    """How long news of chunks may wait for more of it, or for a frame to travel with. Every chunk is news to
    every session: the more there are, the rarer each hears, so that frames do not cost more than chunks."""
    return min(max(sessions / _NEWS_PER_S, _NEWS_WAIT_S), _MAX_NEWS_WAIT_S)


class Session(ABC):
    """See the module's first lines."""

    def __init__(self, stream: Stream, clock: Clock) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._clock = clock
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Exchange frames until an end fails. Raises what ended it: RemoteProtocolError for what the peer did
        wrong, DeadlineError, TransportError when the stream ended."""
        writer = asyncio.create_task(self._keep_writing())
        try:
            while True:
                await self._read()
        except SwarmError:
            # A failed writer closes the stream, which the reader sees only as a closed one.
            if writer.done() and not writer.cancelled() and writer.exception() is not None:
                await writer
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._stream.close()

    def poke(self) -> None:
        """Something is due now."""
        self._due.set()

    def later(self, delay_s: float) -> None:
        """Something is due in `delay_s` at the latest."""
        if self._timer is None and not self._due.is_set():
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.poke)

    async def _keep_writing(self) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(LIFE_S):
                        await self._due.wait()
                except TimeoutError:
                    await self._send(self._sign_of_life())
                    continue
                self._due.clear()
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                await self._write()
        finally:
            await self._stream.close()

    async def _send(self, frame: Frame) -> None:
        await self._stream.send(encode_frame(frame))

    @abstractmethod
    async def _read(self) -> None:
        """Receive one frame and act on it."""

    @abstractmethod
    async def _write(self) -> None:
        """Send all that is due."""

    @abstractmethod
    def _sign_of_life(self) -> Frame: ...
