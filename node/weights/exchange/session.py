"""One stream of an exchange, from either end: a reader, a writer that sends what is due, and signs of life.

A subclass says what a frame means (`_act_on`) and what is due (`_take_due`); `poke` has it sent now, `later`
soon. Whichever side fails ends both. Not for deciding what to send: `download.py`, `upload.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from node.runtime import Runtime
from node.transport.base import Stream
from protocol.chunks import Frame, encode_frame
from protocol.errors import SwarmError

__all__ = ["LIFE_S", "Session", "news_wait_s"]

LIFE_S = 5.0
"""A side that has sent nothing for so long says that it lives."""


_NEWS_WAIT_S, _MAX_NEWS_WAIT_S = 0.1, 0.3
_SESSIONS_PER_S = 27.0


def news_wait_s(sessions: int) -> float:
    """Seconds that news of chunks may wait for more of it, or for a frame to travel with. Every chunk is news
    to every session: the more there are, the rarer each hears, so that frames do not cost more than
    chunks."""
    return min(max(sessions / _SESSIONS_PER_S, _NEWS_WAIT_S), _MAX_NEWS_WAIT_S)


class Session(ABC):
    """See the module's first lines."""

    def __init__(self, runtime: Runtime, stream: Stream, max_bytes: int) -> None:
        self.peer_id = stream.peer_id
        self._stream = stream
        self._max_bytes = max_bytes
        self._runtime = runtime
        self._due = False
        self._reading = False
        """A frame is being acted on: what becomes due by it is sent after it."""
        self._writing = False
        self._wake = asyncio.Event()
        """Of the writer."""
        self._timer: asyncio.TimerHandle | None = None
        self._life: asyncio.TimerHandle | None = None
        self._quiet = True
        """Nothing was sent since the last look at it."""
        self._must_show_life = False

    async def run(self) -> None:
        """Exchange frames until an end fails. Raises what ended it: RemoteProtocolError for what the peer did
        wrong, DeadlineError, TransportError when the stream ended."""
        writer = asyncio.create_task(self._keep_writing())
        self._life = asyncio.get_running_loop().call_later(LIFE_S, self._show_life)
        try:
            while True:
                data = await self._stream.receive(self._max_bytes)
                self._reading = True
                self._act_on(data)
                self._reading = False
                if self._due:
                    await self._answer()
        except SwarmError:
            # A failed writer closes the stream, which the reader sees only as a closed one.
            if writer.done() and not writer.cancelled() and writer.exception() is not None:
                await writer
            raise
        finally:
            for timer in (self._timer, self._life):
                if timer is not None:
                    timer.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._stream.close()

    def poke(self) -> None:
        """Something is due now."""
        self._due = True
        if not self._reading:
            self._wake.set()

    def later(self, delay_s: float) -> None:
        """Something is due in `delay_s` seconds at the latest."""
        if self._due:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self.poke)

    def _show_life(self) -> None:
        if self._quiet:
            self._must_show_life = True
            self.poke()
        self._quiet = True
        self._life = asyncio.get_running_loop().call_later(LIFE_S, self._show_life)

    async def _keep_writing(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._due:
                    await self._write()
        finally:
            await self._stream.close()

    async def _answer(self) -> None:
        """Send what became due by a frame, if it can go at once: to wake the writer for it costs as much as
        to read the frame did. The reader never waits for the other side to read."""
        if self._writing or not self._stream.ready:
            self._wake.set()
        else:
            await self._write()

    async def _write(self) -> None:
        self._writing, self._due = True, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        frames = self._take_due()
        if not frames and self._must_show_life:
            frames = [self._sign_of_life()]
        self._must_show_life = False
        if frames:
            self._quiet = False
            await self._stream.send(*map(encode_frame, frames))
        self._writing = False
        if frames:
            self._went_out()

    @abstractmethod
    def _act_on(self, data: bytes) -> None:
        """Do what a frame asks for."""

    @abstractmethod
    def _take_due(self) -> list[Frame]:
        """All that is due now, to be sent at once."""

    @abstractmethod
    def _sign_of_life(self) -> Frame:
        """What is sent when nothing else was for long."""

    def _went_out(self) -> None:  # noqa: B027
        """Nothing by default. What `_take_due` returned was handed to the network."""
