"""The fast way of gossip: a new envelope goes at once, and once, to a few neighbours over streams of our own.

    push(envelope) --> outboxes of those chosen, and of those that chose us --> one stream each, while needed
    neighbour's stream --> size, rate --> take(envelope): the caller opens it --> what is new is pushed on

Each node chooses CHOSEN random neighbours and says so by opening a stream; an envelope that is new to it goes
to those and to whoever has chosen it, but for the one it came from. Such a graph is connected from two
choices on, with a probability that tends to 1 (Fenner and Frieze 1982; proven), so everybody hears, also who
has few links to neighbours with many, whom eight random ones a message would rarely hit. One choice changes
every ROTATE_S, so nobody stays with neighbours that pass nothing on. Who pushes is known and answers for what
it pushes, which GossipSub does not give, and nothing that a neighbour sends here makes anybody dial:
GossipSub's peer exchange does. Figures: docs/decisions/01-network.md.

Lossy by design: an outbox that is full, a neighbour that does not read or is gone lose what they lose. Not
for the content of envelopes, nor for the repair (`gossip.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cachetools import TTLCache

from node.peers.backoff import Backoff
from node.runtime import Runtime
from node.transport.base import Stream, Transport
from node.transport.limits import KeyedTokenBuckets
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.errors import LimitError, TransportError
from protocol.messages import PeerId
from protocol.topics import ANNOUNCE_PROTOCOL

__all__ = ["STREAM_LIFE_S", "Push"]

logger = logging.getLogger(__name__)

CHOSEN = 4
CHOSEN_BY = 12
"""Neighbours that chose us and are pushed to; more are drawn from."""
ROTATE_S = 60.0
REMEMBERED_S = 600.0
"""How long a neighbour counts as one that chose us after it last opened a stream; longer than CHOSEN times
ROTATE_S, after which an honest one has opened another."""
OUTBOX_COUNT = 256
"""Envelopes that wait for one neighbour; the oldest goes first."""
BATCH_COUNT = 32
"""Envelopes in one write."""
IDLE_S = 5.0
"""After which a stream without work is closed; shorter than what a frame may take (`stream_timeout_s`)."""
SENDER_LIFE_S, STREAM_LIFE_S = 300.0, 600.0
"""After which a sender opens another stream, and after which a receiver waits for that no longer."""
ENVELOPE_BYTES = 1024
"""What an envelope costs its neighbour's bucket besides its own bytes: a signature is looked at."""
BYTES_PER_S, BURST_BYTES = 256 * 1024, 4 * 1024 * 1024
"""Of the bucket: about 180 envelopes of a usual size a second, 5 % of a core."""


@dataclass(slots=True)
class _Link:
    outbox: deque[bytes] = field(default_factory=lambda: deque(maxlen=OUTBOX_COUNT))
    work: asyncio.Event = field(default_factory=asyncio.Event)


class Push:
    """One node's end of it. `take(envelope, neighbour)` is called with what neighbours push, in order; a
    `RemoteProtocolError` of it ends the stream and counts against the neighbour."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        take: Callable[[bytes, PeerId], None],
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._take = take
        self._neighbours: frozenset[PeerId] = frozenset()
        self._chosen: dict[PeerId, None] = {}
        """The oldest choice first."""
        self._chosen_by: TTLCache[PeerId, None] = TTLCache(1024, REMEMBERED_S, timer=runtime.monotonic_s)
        self._rotated_s = runtime.monotonic_s()
        self._links: dict[PeerId, _Link] = {}
        self._group: asyncio.TaskGroup | None = None
        self._backoff: Backoff[PeerId] = Backoff(1.0, 30.0, max_keys=1024)
        self._allowed = KeyedTokenBuckets(BYTES_PER_S, BURST_BYTES)

    async def run(self) -> None:
        """Works until it is cancelled; what is pushed while it does not run is left to reconciliation."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None
            self._links.clear()

    def choose(self, neighbours: Collection[PeerId]) -> None:
        """These members are connected now; to be called every second or so."""
        self._neighbours = frozenset(neighbours)
        now_s = self._runtime.monotonic_s()
        if now_s - self._rotated_s >= ROTATE_S and len(neighbours) > len(self._chosen) >= CHOSEN:
            self._rotated_s = now_s
            del self._chosen[next(iter(self._chosen))]
        able = {peer_id: None for peer_id in neighbours if self._is_able(peer_id, now_s)}
        self._chosen = {peer_id: None for peer_id in self._chosen if peer_id in able}
        free = [peer_id for peer_id in able if peer_id not in self._chosen]
        for peer_id in self._runtime.rng.sample(free, min(len(free), CHOSEN - len(self._chosen))):
            self._chosen[peer_id] = None
            self._link(peer_id)

    def push(self, envelope: bytes, came_from: PeerId | None = None) -> None:
        """To those chosen and those that chose us. Never waits."""
        now_s = self._runtime.monotonic_s()
        by = [each for each in self._chosen_by if each in self._neighbours and each not in self._chosen]
        by = by if len(by) <= CHOSEN_BY else self._runtime.rng.sample(by, CHOSEN_BY)
        for peer_id in (*self._chosen, *by):
            if peer_id != came_from and self._is_able(peer_id, now_s):
                link = self._link(peer_id)
                link.outbox.append(envelope)
                link.work.set()

    def _is_able(self, peer_id: PeerId, now_s: float) -> bool:
        return not self._backoff.ready_in_s(peer_id, now_s)

    def _link(self, peer_id: PeerId) -> _Link:
        """The one to this neighbour, with a stream that stands or is on its way."""
        link = self._links.get(peer_id)
        if link is None:
            link = _Link()
            if self._group is not None:
                self._links[peer_id] = link
                self._group.create_task(self._serve(peer_id, link))
        return link

    async def _serve(self, peer_id: PeerId, link: _Link) -> None:
        """us -> neighbour, until there is nothing more to say for a while."""
        began_s, stream = self._runtime.monotonic_s(), None
        try:
            stream = await self._transport.open_stream(peer_id, ANNOUNCE_PROTOCOL)
            self._backoff.succeeded(peer_id)
            while await _has_work(link):
                while link.outbox:
                    count = min(BATCH_COUNT, len(link.outbox))
                    await stream.send(*[link.outbox.popleft() for _ in range(count)])
                if self._runtime.monotonic_s() - began_s > SENDER_LIFE_S:
                    break
        except TransportError as error:
            self._backoff.failed(peer_id, self._runtime.monotonic_s())
            logger.debug("pushing to %s ended: %s", peer_id, error)
        finally:
            del self._links[peer_id]  # before anything waits: the next push finds no link, and makes one
            if stream is not None:
                await stream.close()

    async def receive(self, stream: Stream) -> None:
        """neighbour -> us: take what it pushes, until it closes the stream."""
        self._chosen_by[stream.peer_id] = None
        while True:
            envelope = await stream.receive(MAX_ENVELOPE_BYTES)
            cost = ENVELOPE_BYTES + len(envelope)
            if not self._allowed.take(stream.peer_id, self._runtime.monotonic_s(), cost):
                raise LimitError(f"{stream.peer_id} pushes more than it may", reason="rate")
            self._take(envelope, stream.peer_id)
            await asyncio.sleep(0)  # buffered reads do not suspend


async def _has_work(link: _Link) -> bool:
    """Wait for some, IDLE_S at most."""
    link.work.clear()
    if link.outbox:
        return True
    try:
        async with asyncio.timeout(IDLE_S):
            await link.work.wait()
    except TimeoutError:
        return False
    return True
