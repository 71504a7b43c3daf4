"""The taking side of an exchange: one blob, from every peer that has some of it.

    providers --(every second)--> a DownloadSession each --> Have, Piece --> Plan --> Pull, Cancel
    Piece --> checked by its hash, written to the store --> shown to those who download from here

Each peer is asked for as many chunks as it delivers in a round trip, two at least, the rarest first. A peer
that delivers nothing for a while is not waited for: what it was asked for goes to others. Not for whom to
ask at all (`suppliers.py`), what a blob means, nor for serving it (`upload.py`).
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from node.compute import Lane
from node.runtime import Runtime
from node.transport.base import Stream, Transport
from node.weights.exchange.rate import Flow, RateLimit
from node.weights.exchange.schedule import Plan
from node.weights.exchange.session import Session, news_wait_s
from node.weights.exchange.store import StoredBlob, WeightsStore
from node.weights.exchange.suppliers import Suppliers
from protocol.chunks import (
    HASH_BYTES,
    Cancel,
    Frame,
    Got,
    Have,
    Piece,
    Pull,
    Tell,
    chunk_count,
    chunk_size,
    decode_from_uploader,
    indices_of,
    max_frame_bytes,
)
from protocol.codec import decode, encode
from protocol.errors import (
    DeadlineError,
    DecodeError,
    LimitError,
    OurFault,
    TransportError,
)
from protocol.messages import ChunkedBlob, ChunksReply, ChunksRequest, Digest, PeerId
from protocol.topics import CHUNKS_PROTOCOL

__all__ = ["Download"]

_MIN_WINDOW, _MAX_WINDOW = 2, 128
"""Chunks that one peer is asked for at a time."""
_MAX_PEERS = 32
"""Peers that one blob is fetched from at a time."""
_TICK_S = 0.25
_PROVIDERS_EVERY_S = 1.0
_STALL_S = 5.0
"""A peer that was asked and delivers nothing for so long, and for four times as long as it usually takes, is
not waited for any more; after three times that its stream is closed."""
_LATE_S = 1.0
"""An idle peer may be asked for what another was asked for so long ago, and twice the usual time."""
_FREE_NEWS = 50
"""Frames of an uploader without a piece that are accepted, besides one per second and three per piece."""


class DownloadSession(Session):
    """One uploader of one blob."""

    def __init__(self, runtime: Runtime, stream: Stream, download: Download) -> None:
        super().__init__(runtime, stream, max_frame_bytes(download.blob))
        self.asked: dict[int, float] = {}
        """Chunks asked for and not received, with the time of asking; oldest first."""
        self.latency_s = 0.0
        """Usual time from asking to arrival."""
        self.delivered_s = runtime.monotonic_s()
        """When it delivered last, or was asked for something after a time without."""
        self.stalled = False
        self.flow = Flow(self.delivered_s)
        self._download = download
        self._cancelled: Counter[int] = Counter()
        self._received = 0
        self._pulls: list[int] = []
        self._cancels: list[int] = []
        self._got: list[int] | None = None
        self._acknowledge = False
        self._waited_s: float | None = None
        self._opened_s = self.delivered_s
        self._news = 0
        self._pieces = 0

    @property
    def window(self) -> int:
        """Chunks it may be asked for at a time now."""
        if self.stalled:
            return 0
        chunks = self.flow.window_bytes() / self._download.blob.chunk_bytes
        return min(max(math.ceil(chunks), _MIN_WINDOW), _MAX_WINDOW)

    def ask(self, index: int, now_s: float) -> None:
        """Ask for a chunk."""
        if not self.asked:
            self.delivered_s = now_s
        if len(self.asked) > len(self._pulls):
            # It may travel with the acknowledgement of what is on its way.
            self.later(news_wait_s(len(self._download.sessions)) / 9)
        else:
            self.poke()
        self.asked[index] = now_s
        self._pulls.append(index)

    def cancel(self, index: int) -> None:
        """Take an asked chunk back; it may come nevertheless."""
        if self.asked.pop(index, None) is None:
            return
        if index in self._pulls:
            self._pulls.remove(index)
            return
        self._cancelled[index] += 1
        self._cancels.append(index)
        self.poke()

    def got(self, index: int) -> None:
        """A chunk is here, for a peer that wants to be told."""
        if self._got is not None:
            self._got.append(index)
            # It may travel with the acknowledgement of what is on its way.
            self.later(news_wait_s(len(self._download.sessions)))

    def give_up(self, waited_s: float) -> None:
        """End the session: what it was asked for did not come."""
        self._waited_s = waited_s
        self.poke()

    def _act_on(self, data: bytes) -> None:
        frame = decode_from_uploader(data, self._download.blob)
        match frame:
            case Piece(index, piece):
                self._piece(index, piece)
            case Have(indices):
                self._count_news()
                self._download.offered(self, indices)
            case Tell():
                if self._got is not None:
                    raise DecodeError("a second Tell", reason="frame_kind")
                stored = self._download.stored
                self._got = [] if stored is None else stored.here()
                self.poke()

    def _count_news(self) -> None:
        self._news += 1
        allowed = _FREE_NEWS + 3 * self._pieces + self._runtime.monotonic_s() - self._opened_s
        # News of chunks cannot be more than there are chunks; signs of life are what is bounded here.
        if self._news > allowed + self._download.count:
            raise LimitError(f"{self._news} frames without a piece", reason="flood")

    def _piece(self, index: int, piece: bytes | memoryview) -> None:
        now_s = self._runtime.monotonic_s()
        asked_s = self.asked.pop(index, None)
        if asked_s is not None:
            took_s = now_s - asked_s
            self.latency_s += (took_s - self.latency_s) * (0.25 if self.latency_s else 1.0)
            self.flow.delivered(len(piece), now_s, took_s)
        elif self._cancelled[index] > 0:
            self._cancelled[index] -= 1
            self.flow.delivered(len(piece), now_s)
        else:
            raise DecodeError(f"chunk {index} came without being asked for", reason="unrequested")
        self.delivered_s = now_s
        self.stalled = False
        self._pieces += 1
        self._received += 1
        self._acknowledge = True
        self.poke()
        self._download.piece(self, index, piece)

    def _take_due(self) -> list[Frame]:
        if self._waited_s is not None:
            raise DeadlineError(f"a chunk from {self.peer_id}", self._waited_s)
        frames: list[Frame] = []
        if self._cancels:
            frames.append(Cancel(self._cancels))
            self._cancels = []
        if self._pulls or self._acknowledge:
            frames.append(Pull(self._received, self._pulls))
            self._pulls, self._acknowledge = [], False
        if self._got:
            frames.append(Got(self._got))
            self._got = []
        return frames

    def _sign_of_life(self) -> Frame:
        return Pull(self._received, ())


class Download:
    """One blob on its way here. `run` ends when it is complete and durable."""

    def __init__(
        self,
        runtime: Runtime,
        blob: ChunkedBlob,
        transport: Transport,
        store: WeightsStore,
        suppliers: Suppliers,
        limit: RateLimit,
        verified: Callable[[Digest, int], None],
    ) -> None:
        self.blob = blob
        self.count = chunk_count(blob)
        self.stored: StoredBlob | None = None
        self.sessions: dict[PeerId, DownloadSession] = {}
        self.downloaded: Counter[PeerId] = Counter()
        """Bytes of verified chunks, by peer."""
        self.flow = Flow(runtime.monotonic_s())
        self._runtime = runtime
        self._transport = transport
        self._store = store
        self._suppliers = suppliers
        self._limit = limit
        self._verified = verified
        self._plan: Plan | None = None
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._late: list[int] = []
        self._paused = False
        self._changed = asyncio.Event()
        self._fault: OurFault | None = None

    @property
    def have(self) -> int:
        """How many chunks are here."""
        return 0 if self.stored is None else self.count - self.stored.missing

    # --- life ---

    async def run(self) -> StoredBlob:
        """Fetch what is missing. Raises OurFault when the store cannot take it, LimitError when the blob is
        larger than the store; never for a peer's fault."""
        leftover = self._store.leftover(self.blob.root)
        if leftover is not None:
            self._begin(await self._runtime.run(Lane.DISK, self._store.open, self.blob, leftover.hashes))
        elif (known := self._store.get(self.blob.root)) is not None:
            self._begin(known)
        try:
            stored = await self._until_complete()
            await self._runtime.run(Lane.DISK, stored.seal)
            return stored
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.stored is not None:
                self.stored.users -= 1

    async def _until_complete(self) -> StoredBlob:
        ask_again_s = 0.0
        while self.stored is None or not self.stored.complete:
            if self._fault is not None:
                raise self._fault
            now_s = self._runtime.monotonic_s()
            if now_s >= ask_again_s:
                ask_again_s = now_s + _PROVIDERS_EVERY_S
                self._open_sessions()
            self._tick(now_s)
            self._changed.clear()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return self.stored

    def _begin(self, stored: StoredBlob) -> None:
        self.stored = stored
        stored.users += 1
        self._plan = Plan(stored.count, stored.missing_indices(), self._runtime.rng)

    # --- sessions ---

    def _open_sessions(self) -> None:
        new = [peer_id for peer_id in self._suppliers.willing(self.blob.root) if peer_id not in self._tasks]
        for peer_id in new[: max(0, _MAX_PEERS - len(self._tasks))]:
            self._suppliers.opened(peer_id)
            task = self._tasks[peer_id] = asyncio.create_task(self._session(peer_id))
            task.add_done_callback(functools.partial(self._session_ended, peer_id))

    def _session_ended(self, peer_id: PeerId, _: asyncio.Task[None]) -> None:
        # Not at the end of the session, which does not come when the task is cancelled before it began.
        self._suppliers.closed(peer_id)
        del self._tasks[peer_id]

    async def _session(self, peer_id: PeerId) -> None:
        """One attempt at one peer, whatever comes of it."""
        began_s = self._runtime.monotonic_s()
        try:
            await self._exchange(peer_id)
            self._suppliers.succeeded(self.blob.root, peer_id)
        except Exception as error:
            # The boundary between a peer and us: whatever it is costs one session.
            if isinstance(error, OurFault) and not isinstance(error, TransportError):
                self._fault = error
                self._changed.set()
                return
            lived_s = self._runtime.monotonic_s() - began_s
            self._suppliers.failed(self.blob.root, peer_id, error, lived_s)

    async def _exchange(self, peer_id: PeerId) -> None:
        """Returns when the peer has nothing of the blob yet, or is gone after it delivered."""
        stream = await self._transport.open_stream(peer_id, CHUNKS_PROTOCOL)
        try:
            await self._exchange_over(stream, peer_id)
        finally:
            await stream.close()

    async def _exchange_over(self, stream: Stream, peer_id: PeerId) -> None:
        await stream.send(encode(ChunksRequest(root=self.blob.root)))
        max_bytes = self.count * HASH_BYTES + self.count // 8 + 64
        reply = decode(await stream.receive(max_bytes), ChunksReply, max_bytes=max_bytes)
        if not reply.hashes:
            return
        self._use_hashes(reply.hashes)
        offered = indices_of(reply.have, self.count)
        session = DownloadSession(self._runtime, stream, self)
        plan = self._require_plan()
        plan.join(peer_id)
        self.sessions[peer_id] = session
        try:
            self.offered(session, offered)
            await session.run()
        except TransportError as error:
            if isinstance(error, DeadlineError) or not self.downloaded[peer_id]:
                raise
        finally:
            del self.sessions[peer_id]
            for index in session.asked:
                self._limit.take(-chunk_size(self.blob, index), self._runtime.monotonic_s())
            plan.leave(peer_id)
            self._fill_all()

    def _use_hashes(self, hashes: bytes) -> None:
        if self.stored is None:
            self._begin(self._store.open(self.blob, hashes))
        elif hashes != self.stored.hashes:
            raise DecodeError(
                f"hashes that are not those of blob {self.blob.root[:12]}", reason="chunk_hashes"
            )

    # --- from sessions ---

    def offered(self, session: DownloadSession, indices: Sequence[int]) -> None:
        """A peer has these chunks. Raises DecodeError when it had said so of one before."""
        if not self._require_plan().has(session.peer_id, indices):
            raise DecodeError("a chunk was offered twice", reason="have_twice")
        self._fill(session)

    def piece(self, session: DownloadSession, index: int, data: bytes | memoryview) -> None:
        """A peer sent a chunk. Raises DecodeError when it is not the right one."""
        stored, plan = self.stored, self._require_plan()
        if stored is None:
            return
        if not stored.write(index, data):
            plan.release(session.peer_id, index)
        else:
            now_s = self._runtime.monotonic_s()
            self.downloaded[session.peer_id] += len(data)
            self.flow.delivered(len(data), now_s)
            plan.arrived(index)
            for each in self.sessions.values():
                if index in each.asked:
                    each.cancel(index)
                    self._limit.take(-chunk_size(self.blob, index), now_s)
                each.got(index)
            self._verified(self.blob.root, index)
            if stored.complete:
                self._changed.set()
                return
        self._fill(session)

    # --- choices ---

    def _tick(self, now_s: float) -> None:
        """Notice who does not deliver."""
        self._late = []
        for session in list(self.sessions.values()):
            patience_s = max(_STALL_S, 4 * session.latency_s)
            waited_s = now_s - session.delivered_s if session.asked else 0.0
            if waited_s > 3 * patience_s:
                session.give_up(waited_s)
            elif waited_s > patience_s and not session.stalled:
                session.stalled = True
                for index in session.asked:
                    self._require_plan().release(session.peer_id, index)
            late_s = max(_LATE_S, 2 * session.latency_s)
            self._late += [index for index, at_s in session.asked.items() if now_s - at_s > late_s]
        self._fill_all()

    def _fill_all(self) -> None:
        for session in list(self.sessions.values()):
            self._fill(session)

    def _fill(self, session: DownloadSession) -> None:
        """Ask a peer for as much as it may be asked for now."""
        plan, peer_id = self._require_plan(), session.peer_id
        if peer_id not in self.sessions or self._paused:
            return
        now_s = self._runtime.monotonic_s()
        window = session.window
        while len(session.asked) < window:
            delay_s = self._limit.delay_s(now_s)
            if delay_s > 0:
                self._pause(delay_s)
                return
            index = plan.choose(peer_id)
            if index is None and not session.asked:
                index = plan.choose_late(peer_id, self._late)
            if index is None:
                return
            if index in session.asked:
                # Asked for before a stall, and still to come.
                continue
            self._limit.take(chunk_size(self.blob, index), now_s)
            session.ask(index, now_s)

    def _pause(self, delay_s: float) -> None:
        self._paused = True

        def resume() -> None:
            self._paused = False
            self._fill_all()

        asyncio.get_running_loop().call_later(delay_s, resume)

    def _require_plan(self) -> Plan:
        if self._plan is None:
            raise TransportError("the exchange has not begun")
        return self._plan
