"""Framed streams and the gate for incoming ones, shared by all transports.

A transport brings a `ByteChannel` (exact reads, writes with backpressure); `Stream` puts capped frames and
deadlines on it, and `StreamGate` runs the handlers of incoming streams: caps and token bucket before a
byte is read, one deadline per handler, whatever it raises ends that stream only. Data passes peer -> channel
-> frame -> handler. Weights come in tens of frames a second and stream, so a frame costs little: frames sent
together are one write, a write that need not wait has no timer, and the deadline of reading is one timer that
moves on when it fires. Not for the content of frames.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable

from node.transport.limits import FirstTimes, Refusals, TransportLimits
from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import DeadlineError, RemoteProtocolError, TransportError
from protocol.frames import FRAME_PREFIX_BYTES, encode_frames, frame_length
from protocol.messages import PeerId

__all__ = ["ByteChannel", "Stream", "StreamGate", "StreamHandler"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class ByteChannel(ABC):
    """Bytes in both directions between two peers. Failures are `TransportError`."""

    @abstractmethod
    async def read_exactly(self, count: int) -> bytes:
        """Exactly `count` bytes; memory grows only with what arrives. An early end is a `TransportError`."""

    @property
    def ready(self) -> bool:
        """Whether `write_now` may be called: nothing that was written before is still waiting here."""
        return False

    def write_now(self, data: bytes) -> None:
        """Send without waiting."""
        raise TransportError("this channel is never ready")

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send, waiting while the other side does not read."""

    @abstractmethod
    def close(self) -> None:
        """Close both directions; never raises."""

    def abort(self) -> None:
        """Close without waiting for what was written; whoever reads fails at once."""
        self.close()


class Stream:
    """Length-prefixed frames both ways between us and one peer, each within `timeout_s`. After any error the
    stream is closed. One task at a time may receive, and one may send."""

    def __init__(self, peer_id: PeerId, channel: ByteChannel, timeout_s: float) -> None:
        self.peer_id = peer_id
        self.channel = channel
        """The bytes below the frames: what a hostile peer can write to."""
        self._timeout_s = timeout_s
        self._closed = False
        self._due_s: float | None = None
        """When the frame that is being received must be here, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._late = False

    @property
    def ready(self) -> bool:
        """Whether the next `send` is known not to wait."""
        return not self._closed and self.channel.ready

    async def send(self, *frames: bytes) -> None:
        """Send these frames, in one write. Raises `LocalProtocolError` for one above MAX_FRAME_BYTES,
        `TransportError` when closed."""
        data = encode_frames(frames)
        self._raise_if_closed()
        if self.channel.ready:
            self.channel.write_now(data)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.channel.write(data)
        except TimeoutError:
            await self.close()
            raise DeadlineError(f"sending a frame to {self.peer_id}", self._timeout_s) from None
        except TransportError:
            await self.close()
            raise

    async def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """Receive one frame. A declared length above `max_bytes` raises `LimitError` before any allocation;
        a stream that ends early raises `TransportError`."""
        self._raise_if_closed()
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._due_s, self._look_at_the_time)
        try:
            prefix = await self.channel.read_exactly(FRAME_PREFIX_BYTES)
            return await self.channel.read_exactly(frame_length(prefix, max_bytes))
        except (TransportError, RemoteProtocolError):
            await self.close()
            if self._late:
                raise DeadlineError(f"receiving a frame from {self.peer_id}", self._timeout_s) from None
            raise
        finally:
            self._due_s = None

    def _look_at_the_time(self) -> None:
        """Move the timer on to the end of the frame that is being received now, or break the stream off."""
        self._timer = None
        if self._due_s is None or self._closed:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:
            self._timer = loop.call_at(self._due_s, self._look_at_the_time)
            return
        self._late = True
        self.channel.abort()

    async def close(self) -> None:
        """Close both directions; never raises."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.channel.close()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise TransportError(f"the stream with {self.peer_id} is closed; open another one")


StreamHandler = Callable[[Stream], Awaitable[None]]


class StreamGate:
    """Admits incoming streams and runs their handlers."""

    def __init__(self, limits: TransportLimits, refusals: Refusals) -> None:
        self._limits = limits
        self._refusals = refusals
        self._opens = limits.buckets(limits.stream_opens_per_s, limits.stream_burst)
        self._open_by_peer: Counter[PeerId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bugs = FirstTimes()
        self._closed = False

    def accept(
        self, peer_id: PeerId, channel: ByteChannel, handler: StreamHandler, deadline_s: float | None = None
    ) -> None:
        """Start the handler of a new incoming stream, or close it at once when its peer is above a cap.
        The handler ends after `deadline_s` seconds (without: `stream_timeout_s`)."""
        reason = self._refusal(peer_id)
        if reason is not None:
            self._refusals.add(peer_id, reason)
            channel.close()
            return
        if deadline_s is None:
            deadline_s = self._limits.stream_timeout_s
        task = asyncio.create_task(self._handle(peer_id, channel, handler, deadline_s))
        self._open_by_peer[peer_id] += 1
        self._tasks.add(task)

        def finished(task: asyncio.Task[None]) -> None:
            # Not in the handler's `finally`, which does not run when the task is cancelled before it began.
            channel.close()
            self._tasks.discard(task)
            self._open_by_peer[peer_id] -= 1
            if self._open_by_peer[peer_id] <= 0:
                del self._open_by_peer[peer_id]

        task.add_done_callback(finished)

    async def reset(self) -> None:
        """End all handlers; new streams are still welcome."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    async def close(self) -> None:
        """End all handlers and refuse new streams."""
        self._closed = True
        await self.reset()

    def _refusal(self, peer_id: PeerId) -> str | None:
        if self._closed:
            return "closed"
        if not self._opens.take(peer_id, asyncio.get_running_loop().time()):
            return "stream_rate"
        if self._open_by_peer[peer_id] >= self._limits.streams_per_peer:
            return "streams"
        if self._open_by_peer.total() >= self._limits.streams:
            return "streams"
        return None

    async def _handle(
        self, peer_id: PeerId, channel: ByteChannel, handler: StreamHandler, deadline_s: float
    ) -> None:
        stream = Stream(peer_id, channel, self._limits.stream_timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                await handler(stream)
        except (TimeoutError, DeadlineError):
            self._refusals.add(peer_id, "deadline")
        except RemoteProtocolError as error:
            self._refusals.add(peer_id, error.reason)
        except TransportError as error:
            logger.debug("stream of %s ended early: %s", peer_id, error)
        except Exception as error:
            # The boundary between a peer and us: a bug of ours ends one stream and is told once.
            self._refusals.add(peer_id, "handler")
            kind = f"{type(error).__name__} in {getattr(handler, '__qualname__', 'a handler')}"
            if self._bugs.is_new(kind):
                logger.warning("a stream handler failed; that stream is closed: %s", kind, exc_info=error)
        finally:
            await stream.close()
