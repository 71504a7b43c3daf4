"""Others' groups come in: choose among announcements by need, fetch the bodies, hand them to verification.

`Collector` consumes what gossip heard, keeps the offers that still make sense (bounded per author), and
fetches while the pool has need. Chosen first: offers whose prompt this node answered too (they allow
capability-aware advantages), then authors with the fewest groups waiting, then the newest. Fetching is
bounded in bytes (the announced size, never what the sender streams), in time and in parallel; an author whose
bodies do not come rests, each time twice as long, so that stalling a few fetches does not stop all of them.
Judging is not done here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from node.clock import Clock
from node.share.gossip import Gossip, Heard
from node.supervise import StageGauge
from node.transport.base import Transport
from protocol.codec import decode, encode
from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import DecodeError, RemoteProtocolError, TransportError
from protocol.messages import BlobReply, BlobRequest, PeerId, PromptRef
from protocol.topics import BLOB_PROTOCOL

__all__ = ["Collector", "Fetched", "fetch_body"]

log = logging.getLogger(__name__)
OFFERS_PER_AUTHOR = 64
AUTHORS = 256
REST_S, MAX_REST_S = 2.0, 30.0
"""How long an author is left alone after a fetch that failed."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An announcement with its body, unverified. share.collect -> verify."""

    heard: Heard
    body: bytes


async def fetch_body(transport: Transport, peer_id: PeerId, heard: Heard, timeout_s: float) -> bytes:
    """The announced blob from `peer_id`. Raises DecodeError when the size differs, TransportError or
    TimeoutError."""
    blob = heard.announcement.body
    async with asyncio.timeout(timeout_s):
        stream = await transport.open_stream(peer_id, BLOB_PROTOCOL)
        try:
            await stream.send(encode(BlobRequest(digest=blob.digest)))
            reply = decode(await stream.receive(max_bytes=1024), BlobReply, max_bytes=1024)
            if reply.size == 0:
                raise TransportError(f"{peer_id} no longer has blob {blob.digest[:12]}")
            if reply.size != blob.size:
                raise DecodeError(f"announced {blob.size} bytes, offered {reply.size}", reason="size")
            frames: list[bytes] = []
            for left in range(blob.size, 0, -MAX_FRAME_BYTES):
                frame = await stream.receive(max_bytes=min(MAX_FRAME_BYTES, left))
                if len(frame) < min(MAX_FRAME_BYTES, left):  # a body in a million frames costs us, not them
                    raise DecodeError(f"a frame of {len(frame)} bytes in the middle", reason="frame_size")
                frames.append(frame)
            return b"".join(frames)
        finally:
            await stream.close()


class Collector:
    """Keeps offers, fetches by need. `fetched` is the bounded queue that verification reads."""

    def __init__(
        self,
        transport: Transport,
        gossip: Gossip,
        *,
        queue: asyncio.Queue[Fetched],
        gauge: StageGauge,
        parallel: int,
        timeout_s: float,
        clock: Clock,
        wanted: Callable[[], int],
        waiting_of: Callable[[PeerId], int],
        answered: Callable[[PromptRef], bool],
        worth_keeping: Callable[[Heard], bool],
        still_fresh: Callable[[Heard], bool],
        failed: Callable[[PeerId, str], None],
    ) -> None:
        self._transport = transport
        self._gossip = gossip
        self._queue = queue
        self._gauge = gauge
        self._parallel = parallel
        self._timeout_s = timeout_s
        self._clock = clock
        self._wanted = wanted
        self._waiting_of = waiting_of
        self._answered = answered
        self._worth_keeping = worth_keeping
        self._still_fresh = still_fresh
        self._failed = failed
        self._offers: OrderedDict[PeerId, deque[Heard]] = OrderedDict()
        self._changed = asyncio.Event()
        self._fetching: dict[PeerId, int] = {}
        self._rests: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Authors whose last fetch failed: how long they rest, and until when."""
        self.bodies_fetched = 0

    async def run(self) -> None:
        """Listen and fetch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="share.collect.listen")
            for number in range(self._parallel):
                group.create_task(self._fetch_loop(), name=f"share.collect.fetch{number}")

    def nudge(self) -> None:
        """Need may have changed (a draw, an own answer): look again."""
        self._changed.set()

    async def _listen(self) -> None:
        async for heard in self._gossip.heard():
            if not self._worth_keeping(heard) or not heard.announcement.mixed:
                continue
            self._offers.setdefault(heard.sender, deque(maxlen=OFFERS_PER_AUTHOR)).append(heard)
            self._offers.move_to_end(heard.sender)
            while len(self._offers) > AUTHORS:
                self._offers.popitem(last=False)
            self._changed.set()

    async def _fetch_loop(self) -> None:
        while True:
            heard = self._choose()
            if heard is None:
                with self._gauge.waiting("need" if any(self._offers.values()) else "offers"):
                    await self._changed.wait()
                self._changed.clear()
                continue
            author = heard.sender
            self._fetching[author] = self._fetching.get(author, 0) + 1
            try:
                with self._gauge.working():
                    body = await fetch_body(self._transport, author, heard, self._timeout_s)
            except TimeoutError:
                self._failed(author, "deadline")
                self._rest(author)
            except TransportError as error:
                log.debug("fetch from %s failed: %s", author, error)
                self._rest(author)
            except RemoteProtocolError as error:
                self._failed(author, error.reason)
                self._rest(author)
            else:
                self.bodies_fetched += 1
                self._rests.pop(author, None)
                with self._gauge.waiting("room in verify"):
                    await self._queue.put(Fetched(heard, body))
            finally:
                self._fetching[author] -= 1
                if not self._fetching[author]:
                    del self._fetching[author]

    def _rest(self, author: PeerId) -> None:
        """Leave an author alone for a while after a failure."""
        rest_s, _ = self._rests.pop(author, (REST_S / 2, 0.0))
        rest_s = min(2 * rest_s, MAX_REST_S)
        self._rests[author] = (rest_s, self._clock.monotonic_s() + rest_s)
        while len(self._rests) > AUTHORS:
            self._rests.popitem(last=False)
        asyncio.get_running_loop().call_later(rest_s, self._changed.set)

    def _choose(self) -> Heard | None:
        if self._wanted() <= sum(self._fetching.values()) + self._queue.qsize():
            return None
        now_s = self._clock.monotonic_s()
        best: tuple[tuple[bool, int, int], Heard] | None = None
        for author in list(self._offers):
            if now_s < self._rests.get(author, (0.0, 0.0))[1]:
                continue  # before its offers are looked at: those of 256 authors take 25 ms
            offers = self._fresh_offers(author)
            load = self._waiting_of(author) + self._fetching.get(author, 0)
            for heard in offers:
                key = (not self._answered(heard.announcement.prompt), load, -heard.arrived_at)
                if best is None or key < best[0]:
                    best = (key, heard)
        if best is None:
            return None
        self._offers[best[1].sender].remove(best[1])
        return best[1]

    def _fresh_offers(self, author: PeerId) -> deque[Heard]:
        """What this author offers and is still young enough; the rest is forgotten."""
        offers = self._offers[author]
        fresh = deque((heard for heard in offers if self._still_fresh(heard)), maxlen=OFFERS_PER_AUTHOR)
        if fresh:
            self._offers[author] = fresh
        else:
            del self._offers[author]
        return fresh
