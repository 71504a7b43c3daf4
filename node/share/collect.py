"""Others' groups come in: choose among announcements by need, fetch the bodies, hand them to verification.

    gossip --Heard--> known already as refused? --> offers --need--> fetch --Candidate--> `fetched`

`Collector` decides what this node needs and whom to ask. Need is what is missing in the pool for the next
steps; while it lasts, the author with the fewest groups waiting is asked for its newest. Fetching is bounded
in bytes (the announced size, never what the sender streams), in time and in parallel; an author whose bodies
do not come rests, each time twice as long, so that stalling a few fetches does not stop all of them. Judging
bodies is not done here, nor is learning who is where (`node/peers/presence.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import Protocol

from cachetools import FIFOCache

from node.config import NodeConfig
from node.peers.backoff import Backoff
from node.peers.book import PeerBook
from node.peers.trust import Hardness
from node.runtime import Runtime
from node.share.gossip import Gossip
from node.share.heard import Candidate, Heard
from node.share.own import Sharing
from node.share.pool import ReplayPool
from node.supervise import StageGauge, run_endless
from node.transport.base import Transport
from protocol.codec import decode, encode
from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import DecodeError, RemoteProtocolError, TransportError
from protocol.messages import BlobReply, BlobRequest, PeerId
from protocol.topics import BLOB_PROTOCOL

__all__ = ["Collector", "fetch_body"]

log = logging.getLogger(__name__)
OFFERS_PER_AUTHOR = 64
AUTHORS = 256
REST_S, MAX_REST_S = 2.0, 30.0
"""How long an author is left alone after a fetch that failed."""
STOCK_STEPS = 2
"""Unused groups kept in the pool, in steps' worth of external groups: enough to choose, little to grow
stale."""
SETTLE_MS = 3000
"""After its first connection a node hears the past by reconciliation, in no order: of a copy and its original
either may come first. What is heard until then is evidence for the copy check, and not fetched."""


class _Verdict(Protocol):
    @property
    def reason(self) -> str: ...
    @property
    def found(self) -> Hardness | None: ...


class _Observer(Protocol):
    """`node.verify.pipeline.Verifier`, which knows what is in this folder."""

    def observe(self, heard: Heard) -> _Verdict: ...
    def is_fresh(self, heard: Heard) -> bool: ...


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
    """Keeps offers, fetches by need. Verification reads the bounded queue `fetched`."""

    def __init__(
        self,
        runtime: Runtime,
        peers: PeerBook,
        gossip: Gossip,
        pool: ReplayPool,
        verifier: _Observer,
        sharing: Sharing,
        config: NodeConfig,
    ) -> None:
        self._runtime = runtime
        self._peers = peers
        self._gossip = gossip
        self._pool = pool
        self._verifier = verifier
        self._sharing = sharing
        self._stock = STOCK_STEPS * config.train.external_groups
        self._parallel = config.share.fetch_parallel
        self._timeout_s = config.share.fetch_timeout_s
        self.fetched: asyncio.Queue[Candidate] = asyncio.Queue(config.verify.queue)
        self.gauge = StageGauge("share", runtime.clock, "offers", pool.capacity, lambda: len(pool))
        self.bodies_fetched = 0
        self._offers: FIFOCache[PeerId, deque[Heard]] = FIFOCache(AUTHORS)
        """In order of arrival."""
        self._changed = asyncio.Event()
        self._under_way: list[Heard] = []
        """What is being fetched, until verification has it."""
        self._rests = Backoff[PeerId](REST_S, MAX_REST_S, max_keys=AUTHORS)
        pool.after_draw = self._changed.set

    @property
    def need(self) -> int:
        """Bodies to fetch now: what the pool lacks for the next steps and is not on its way."""
        if self._sharing.not_sharing:
            return 0
        return self._stock - self._pool.unused() - len(self._under_way) - self.fetched.qsize()

    async def run(self) -> None:
        """Listen and fetch until cancelled."""
        fetches = {f"fetch{number}": self._fetch_loop() for number in range(self._parallel)}
        await run_endless(listen=self._listen(), **fetches)

    async def _listen(self) -> None:
        async for heard in self._gossip.heard():
            if self._is_worth_keeping(heard):
                offers = self._offers.get(heard.sender) or deque(maxlen=OFFERS_PER_AUTHOR)
                offers.append(heard)
                self._offers[heard.sender] = offers
                self._changed.set()

    def _is_worth_keeping(self, heard: Heard) -> bool:
        """Enter an announcement into the book, for or against its author. False when nothing is to be
        fetched: it is refused for what it says, its author is in quarantine, or it came too early."""
        verdict = self._verifier.observe(heard)
        if verdict.reason:
            self._peers.rejected(heard.sender, verdict.reason, verdict.found)
            return False
        self._peers.announced(heard.sender, heard.announcement)
        first_at = self._gossip.first_neighbour_at
        settled = first_at is not None and self._runtime.now_ms() - first_at >= SETTLE_MS
        return settled and heard.announcement.mixed and not self._peers.quarantined(heard.sender)

    async def _fetch_loop(self) -> None:
        while True:
            heard = self._choose()
            if heard is None:
                with self.gauge.waiting("need" if self._offers else "offers"):
                    await self._changed.wait()
                self._changed.clear()
                continue
            author = heard.sender
            self._under_way.append(heard)
            try:
                with self.gauge.working():
                    body = await fetch_body(self._gossip.transport, author, heard, self._timeout_s)
            except TimeoutError:
                self._peers.refused(author, "deadline")
                self._rest(author)
            except TransportError as error:
                log.debug("fetch from %s failed: %s", author, error)
                self._rest(author)
            except RemoteProtocolError as error:
                self._peers.refused(author, error.reason)
                self._rest(author)
            else:
                self.bodies_fetched += 1
                self._rests.succeeded(author)
                with self.gauge.waiting("room in verify"):
                    await self.fetched.put(Candidate(heard, body))
            finally:
                self._under_way.remove(heard)
                self._changed.set()  # later answers to that prompt may be fetched now

    def _rest(self, author: PeerId) -> None:
        """Leave an author alone for a while after a failure."""
        rest_s = self._rests.failed(author, self._runtime.monotonic_s())
        asyncio.get_running_loop().call_later(rest_s, self._changed.set)

    def _choose(self) -> Heard | None:
        """The newest offer of the author with the fewest groups waiting, while there is need; first whoever
        answered that prompt before, since of a copy and its original both must be here to be told apart."""
        if self.need <= 0:
            return None
        now_s = self._runtime.monotonic_s()
        newest = {
            author: heard
            for author in tuple(self._offers)
            if not self._rests.ready_in_s(author, now_s)
            and (heard := self._newest(author)) is not None
            and not any(_answers_the_same(each, heard) for each in self._under_way)
        }
        if not newest:
            return None

        fetching = Counter(each.sender for each in self._under_way)

        def load(author: PeerId) -> tuple[int, int]:
            return self._pool.unused(author) + fetching[author], -newest[author].arrived_at

        chosen = newest[min(newest, key=load)]
        same = [each for author in newest for each in self._offers[author] if _answers_the_same(each, chosen)]
        first = min([chosen, *same], key=lambda heard: heard.arrived_at)
        self._offers[first.sender].remove(first)
        return first

    def _newest(self, author: PeerId) -> Heard | None:
        """What this author offered last of what is still fresh; the rest behind it is forgotten."""
        offers = self._offers[author]
        while offers and not self._verifier.is_fresh(offers[-1]):
            offers.pop()
        if offers:
            return offers[-1]
        del self._offers[author]
        return None


def _answers_the_same(left: Heard, right: Heard) -> bool:
    """Whether two authors announce answers to one prompt in one window."""
    here, there = left.announcement.prompt, right.announcement.prompt
    return left.sender != right.sender and (here.window, here.index) == (there.window, there.index)
