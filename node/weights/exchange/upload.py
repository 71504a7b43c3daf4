"""The giving side of an exchange: who is served next, and what each downloader is shown.

    stream --> ChunksRequest --> Uploads.serve --> UploadSession: asked chunks in a queue
    Uploads: round robin over sessions that have asked, as long as few enough bytes are on their way
        --> session's writer --> Piece --> acknowledged by the downloader's next Pull

Bytes on their way are counted from here to the acknowledgement, and kept to what the uplink delivers in a
round trip: a queue in the operating system or a home router would delay requests, and whatever a downloader
does not need any more could not be taken back from it. A chunk that is acknowledged late no longer counts, so
that slow downloaders do not hold up others. A blob that this node made is shown by `Reveal` first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

from cachetools import LRUCache

from node.runtime import Runtime
from node.transport.base import Stream
from node.transport.limits import TokenBucket
from node.weights.exchange.rate import Flow, RateLimit, tally
from node.weights.exchange.schedule import Reveal
from node.weights.exchange.session import Session, news_wait_s
from node.weights.exchange.store import StoredBlob, WeightsStore
from protocol.chunks import (
    MAX_ASKED,
    Cancel,
    Frame,
    Got,
    Have,
    Piece,
    Pull,
    Tell,
    bitmap_of,
    chunk_size,
    decode_from_downloader,
    max_frame_bytes,
)
from protocol.codec import decode, encode
from protocol.errors import (
    DeadlineError,
    DecodeError,
    LimitError,
    OurFault,
    RemoteProtocolError,
    TransportError,
)
from protocol.messages import ChunksReply, ChunksRequest, Digest, PeerId

__all__ = ["SESSION_S", "Uploads"]

log = logging.getLogger(__name__)

SESSION_S = 3600.0
"""A session ends after so long and is opened again by the downloader."""
_APPEAR_S = 2.0
"""A request for a blob that is not here waits so long for it: downloaders of one blob begin together."""
_APPEAR_STEP_S = 0.1
_LATE_S = 0.5
_LINGER_S = 3.0
_MIN_AHEAD = 2
_FIRST_SLOTS, _MIN_SLOTS = 4, 2
"""Chunks that may be on their way before the first acknowledgement, and always."""
_SEEDED = 8
"""Blobs that are shown piece by piece at a time; an older one is shown as a whole."""
_COPIES = 4
"""Copies of one blob that one peer may take in all; more is an attack on the uplink."""
_REMEMBERED = 4096
_FRAMES_PER_S, _FRAME_BURST = 50.0, 200
_FRAMES_PER_ANSWER = 3


class UploadSession(Session):
    """One downloader of one blob."""

    def __init__(
        self,
        runtime: Runtime,
        stream: Stream,
        stored: StoredBlob,
        uploads: Uploads,
        reveal: Reveal | None,
    ) -> None:
        super().__init__(runtime, stream, max_frame_bytes(stored.blob))
        self.stored = stored
        self.queue: deque[int] = deque()
        """Chunks asked for, not being sent yet."""
        self.sending: int | None = None
        self.reveal = reveal
        """Decides what it is shown, while not every chunk of a new blob was sent."""
        self.on_the_way: deque[tuple[int, int, float]] = deque()
        """(chunk, bytes, sent at) of pieces that are not acknowledged, oldest first."""
        self._uploads = uploads
        self.shown: set[int] = set(stored.here()) if reveal is None else set()
        """What it was told to be here, by its ChunksReply at first."""
        self._got: set[int] | None = None if reveal is None else set()
        """What it says it has; None when it is not asked to tell."""
        self._news: list[int] = []
        self._tell = reveal is not None
        self._leaving: int | None = None
        """The chunk among the frames that are being sent."""
        self._acknowledged = 0
        self._round_trip_s = 0.0
        self._times_sent = bytearray(stored.count)
        self._frames = TokenBucket(_FRAMES_PER_S, _FRAME_BURST)
        self._earned = 0
        if self._tell:
            self.poke()

    def show(self, indices: Iterable[int]) -> None:
        """Tell it that these can be asked for, unless it knows or has them."""
        news = [index for index in indices if index not in self.shown]
        self.shown.update(news)
        if self._got is not None:
            news = [index for index in news if index not in self._got]
        if not news:
            return
        self._news += news
        busy = self.queue or self.sending is not None or self.on_the_way
        wait_s = news_wait_s(len(self._uploads.sessions))
        self.later(wait_s if busy else wait_s / 3)

    def begin(self, index: int, now_s: float) -> int:
        """Send this chunk next; returns its bytes."""
        size = chunk_size(self.stored.blob, index)
        self.queue.remove(index)
        self.sending = index
        self.on_the_way.append((index, size, now_s))
        self.poke()
        return size

    def late_bytes(self, now_s: float) -> int:
        """Bytes on their way for so long that they must be waiting for something else than our uplink."""
        before_s = now_s - max(_LATE_S, 4 * self._round_trip_s)
        return sum(size for _, size, at_s in self.on_the_way if at_s < before_s)

    def is_silent(self, now_s: float) -> bool:
        """Whether it has not acknowledged for so long that it may be gone."""
        return bool(self.on_the_way) and now_s - self.on_the_way[0][2] > max(
            _LINGER_S, 4 * self._round_trip_s
        )

    def _act_on(self, data: bytes) -> None:
        if self._earned:
            self._earned -= 1
        elif not self._frames.take(self._runtime.monotonic_s()):
            raise LimitError(f"more than {_FRAMES_PER_S:g} frames per second", reason="flood")
        frame = decode_from_downloader(data, self.stored.blob)
        match frame:
            case Pull(received, indices):
                self._acknowledge(received)
                self._ask(indices)
            case Cancel(indices):
                for index in indices:
                    if index in self.queue:
                        self.queue.remove(index)
            case Got(indices):
                self._tell_got(indices)
        self._uploads.pump()

    def _acknowledge(self, received: int) -> None:
        fresh = (received - self._acknowledged) & 0xFFFFFFFF
        if fresh > len(self.on_the_way):
            raise DecodeError(
                f"{fresh} pieces acknowledged while {len(self.on_the_way)} are on their way", reason="ack"
            )
        self._acknowledged += fresh
        now_s = self._runtime.monotonic_s()
        for _ in range(fresh):
            _, size, sent_at_s = self.on_the_way.popleft()
            round_trip_s = now_s - sent_at_s
            self._round_trip_s = min(self._round_trip_s or round_trip_s, round_trip_s)
            self._uploads.arrived(size, sent_at_s)

    def _ask(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in self.shown:
                raise DecodeError(f"chunk {index} was asked for and never offered", reason="chunk_unknown")
            if index in self.queue:
                raise DecodeError(f"chunk {index} was asked for twice", reason="asked_twice")
            if self._times_sent[index] >= 2:
                raise LimitError(f"chunk {index} was asked for a third time", reason="greedy")
            if len(self.queue) >= MAX_ASKED:
                raise LimitError(f"more than {MAX_ASKED} chunks asked for", reason="asked")
            self.queue.append(index)

    def _tell_got(self, indices: Iterable[int]) -> None:
        if self._got is None:
            raise DecodeError("a Got that was not asked for", reason="frame_kind")
        for index in indices:
            if index in self._got:
                raise DecodeError(f"chunk {index} was told twice", reason="told_twice")
            self._got.add(index)
            if self.reveal is not None:
                self.reveal.got(self, index)

    def _take_due(self) -> list[Frame]:
        frames: list[Frame] = []
        if self._tell:
            self._tell = False
            frames.append(Tell())
        if self._news:
            self._earned += _FRAMES_PER_ANSWER
            frames.append(Have(self._news))
            self._news = []
        if self.sending is not None:
            self._earned += _FRAMES_PER_ANSWER
            self._times_sent[self.sending] += 1
            frames.append(Piece(self.sending, self.stored.read(self.sending)))
        self._leaving = self.sending
        return frames

    def _went_out(self) -> None:
        if self._leaving is not None:
            self.sending = None
            self._uploads.given(self, self._leaving)

    def _sign_of_life(self) -> Frame:
        return Have(())


class Uploads:
    """All upload sessions of this node. `failed(peer, reason)` hears what downloaders do wrong."""

    def __init__(
        self,
        runtime: Runtime,
        store: WeightsStore,
        limit: RateLimit,
        failed: Callable[[PeerId, str], None],
    ) -> None:
        self.uploaded: Counter[PeerId] = Counter()
        """Bytes of chunks sent, by peer."""
        self._runtime = runtime
        self._store = store
        self._limit = limit
        self._failed = failed
        self.sessions: list[UploadSession] = []
        self._turns = 0
        self._turn_of: dict[PeerId, int] = {}
        """When a peer was served last. The one served longest ago is next, however many streams it has."""
        self._reveals: dict[Digest, Reveal] = {}
        self._bytes_on_the_way = 0
        self._flow: Flow | None = None
        self._copies: LRUCache[tuple[PeerId, Digest], int] = LRUCache(_REMEMBERED)
        """Bytes of a blob that a peer took."""
        self._timer: asyncio.TimerHandle | None = None

    def seed(self, stored: StoredBlob) -> None:
        """Show this blob's chunks to one receiver each first."""
        while len(self._reveals) >= _SEEDED:
            self._show_all(next(iter(self._reveals)))
        self._reveals[stored.blob.root] = Reveal(stored.count, self._runtime.rng)

    def arrived_here(self, root: Digest, index: int) -> None:
        """A chunk was verified: whoever downloads this blob from here may ask for it."""
        for session in self._of(root):
            session.show((index,))

    # --- a stream ---

    async def serve(self, stream: Stream) -> None:
        """Handler of CHUNKS_PROTOCOL."""
        try:
            await self._serve(stream)
        except RemoteProtocolError as error:
            self._failed(stream.peer_id, error.reason)
            raise
        except DeadlineError:
            self._failed(stream.peer_id, "deadline")
            raise
        except TransportError:
            raise
        except OurFault as error:  # the disk does not give it: this receiver gets it elsewhere, or later
            log.debug("a blob is not passed on: %s", error)

    async def _serve(self, stream: Stream) -> None:
        request = decode(await stream.receive(max_bytes=256), ChunksRequest, max_bytes=256)
        stored = await self._appears(request.root)
        if stored is None:
            await stream.send(encode(ChunksReply(hashes=b"", have=b"")))
            return
        taken = self._copies.get((stream.peer_id, request.root), 0)
        if taken > _COPIES * stored.blob.size:
            raise LimitError(f"{taken} bytes taken of a blob of {stored.blob.size}", reason="greedy")
        with stored.used():
            reveal = self._reveals.get(request.root)
            session = UploadSession(self._runtime, stream, stored, self, reveal)
            have = bitmap_of(session.shown, stored.count)
            # From here on, so that no chunk that arrives while the reply is sent is missed.
            self.sessions.append(session)
            if reveal is not None:
                reveal.join(session)
            try:
                await stream.send(encode(ChunksReply(stored.hashes, have)))
                self.pump()
                async with asyncio.timeout(SESSION_S):
                    await session.run()
            except TimeoutError:
                return
            finally:
                self._left(session)

    async def _appears(self, root: Digest) -> StoredBlob | None:
        waited_s = 0.0
        while (stored := self._store.get(root)) is None and waited_s < _APPEAR_S:
            await asyncio.sleep(_APPEAR_STEP_S)
            waited_s += _APPEAR_STEP_S
        return stored

    def _left(self, session: UploadSession) -> None:
        self.sessions.remove(session)
        self._bytes_on_the_way -= sum(size for _, size, _ in session.on_the_way)
        if session.reveal is not None:
            session.reveal.leave(session)
        if all(each.peer_id != session.peer_id for each in self.sessions):
            self._turn_of.pop(session.peer_id, None)
        if self._timer is not None and not self.sessions:
            self._timer.cancel()
            self._timer = None
        self.pump()

    # --- from sessions ---

    def given(self, session: UploadSession, index: int) -> None:
        """A chunk was handed to the network."""
        size = chunk_size(session.stored.blob, index)
        tally(self.uploaded, session.peer_id, size)
        key = (session.peer_id, session.stored.blob.root)
        self._copies[key] = self._copies.get(key, 0) + size
        self.pump()

    def arrived(self, size: int, sent_at_s: float) -> None:
        """A downloader acknowledged a piece."""
        now_s = self._runtime.monotonic_s()
        self._bytes_on_the_way -= size
        if self._flow is None:
            self._flow = Flow(sent_at_s)
        self._flow.delivered(size, now_s, now_s - sent_at_s)

    def pump(self) -> None:
        """Begin to send what may be sent now. Called after whatever may allow for more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._runtime.monotonic_s()
        self._reveal(now_s)
        while (session := self._next(now_s)) is not None:
            delay_s = self._limit.delay_s(now_s)
            if delay_s > 0:
                self._pump_in(delay_s)
                return
            self._turns += 1
            self._turn_of[session.peer_id] = self._turns
            self.sessions.remove(session)
            self.sessions.append(session)
            index = session.queue[0]
            size = session.begin(index, now_s)
            self._limit.take(size, now_s)
            self._bytes_on_the_way += size
            if session.reveal is not None:
                session.reveal.sent(session, index)
                self._reveal(now_s)
        if any(session.queue or session.reveal is not None for session in self.sessions):
            self._pump_in(_LATE_S / 2)

    def _next(self, now_s: float) -> UploadSession | None:
        late_of = {each: each.late_bytes(now_s) for each in self.sessions}
        ready = [each for each, late in late_of.items() if each.queue and each.sending is None and not late]
        if not ready:
            return None
        late = sum(late_of.values())
        chunk_bytes = ready[0].stored.blob.chunk_bytes
        if self._flow is None:
            allowed: float = _FIRST_SLOTS * chunk_bytes
        else:
            allowed = max(self._flow.window_bytes(), _MIN_SLOTS * chunk_bytes)
        if self._bytes_on_the_way - late >= allowed:
            return None
        return min(ready, key=lambda each: self._turn_of.get(each.peer_id, 0))

    def _pump_in(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.pump)

    # --- showing ---

    def _reveal(self, now_s: float) -> None:
        for root, reveal in list(self._reveals.items()):
            if reveal.done:
                self._show_all(root)
                continue
            sessions = sorted((each for each in self._of(root) if each.reveal is reveal), key=reveal.load)
            if not sessions:
                continue
            heard = [each for each in sessions if not each.is_silent(now_s)]
            for session in sessions:
                if session not in heard:
                    reveal.lost(session, [index for index, _, _ in session.on_the_way])
            reveal.linger(now_s - _LINGER_S, ((each, index) for each in heard for index in each.queue))
            ahead = self._ahead(sessions[0].stored.blob.chunk_bytes, len(sessions))
            for session in sessions:
                session.show(reveal.show(session, now_s, ahead, idle=False))
            if not any(session.queue or session.sending is not None for session in heard):
                for session in sessions:
                    session.show(reveal.show(session, now_s, ahead, idle=True))

    def _show_all(self, root: Digest) -> None:
        del self._reveals[root]
        for session in self._of(root):
            session.reveal = None
            session.show(range(session.stored.count))

    def _ahead(self, chunk_bytes: int, receivers: int) -> int:
        """Chunks to show to each receiver before they are sent: to all of them together what is sent in twice
        the time in which they are asked for."""
        if self._flow is None:
            return _MIN_AHEAD
        return max(_MIN_AHEAD, math.ceil(2 * self._flow.window_bytes() / chunk_bytes / receivers))

    def _of(self, root: Digest) -> list[UploadSession]:
        return [session for session in self.sessions if session.stored.blob.root == root]
