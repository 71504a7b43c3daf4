"""Announcements that reach everybody: gossip as a hint, reconciliation as the repair.

    announce --> seal --> store --> push to a few neighbours (`push.py`)

    pushed ----+--> size, membership, envelope, schema, replay --> store --> heard() --> share.collect
    asked for -+                                                    |    +-> pushed on
               <---- what a neighbour lacks, on its request --------+

What is pushed may be lost, and a late joiner has missed it. So every node stores the unexpired envelopes, and
on connecting and every 10 s sends a neighbour the short digests of what it stores; the neighbour answers
with what is missing. An envelope counts once, however many peers relay it, also over a restart: then it is
stored again for others, and not heard again. For its content answers its author, for bytes that are no
envelope of this swarm the neighbour that sent them. Not for bodies
(`share/collect.py`) and not for what an announcement claims (`node/verify`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cachetools import FIFOCache

from node.durable import durable
from node.membership import Membership
from node.peers.book import PeerBook
from node.runtime import Runtime
from node.share.heard import Heard
from node.share.push import STREAM_LIFE_S, Push
from node.share.store import SHORT_DIGEST_BYTES, AnnouncementStore, StoredAnnouncement, short_digest
from node.state.stores import ReplayGuard, SequenceSource
from node.supervise import run_endless
from node.transport.base import Stream, Transport
from node.transport.limits import KeyedTokenBuckets
from protocol.codec import decode, digest, encode
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.envelope import open_envelope, seal
from protocol.errors import (
    DecodeError,
    FreshnessError,
    LimitError,
    RemoteProtocolError,
    ReplayError,
    SignatureError,
    TransportError,
)
from protocol.messages import Announcement, Digest, PeerId, ReconcileReply, ReconcileRequest
from protocol.replay import ReplayCache
from protocol.topics import ANNOUNCE_PROTOCOL, RECONCILE_PROTOCOL, announcement_topic

__all__ = ["Gossip", "GossipLimits"]

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = SHORT_DIGEST_BYTES * 65_536 + 1024
_MAX_REPLY_BYTES = 64
_MAX_BAD_ENVELOPES = 16
"""Refused envelopes in one reconciliation after which the neighbour is left until the next round."""
_MAX_USELESS_ENVELOPES = 1024
"""The same for envelopes that we had told it we have; some arrive by gossip meanwhile."""
_YIELD_EVERY = 16
"""Envelopes (0.3 ms each) between two chances for other tasks: buffered reads do not suspend."""


@dataclass(frozen=True, slots=True)
class GossipLimits:
    """What announcements may cost this node. `max_count + refused_count` must fit a `ReconcileRequest`."""

    max_count: int = 32_768
    max_bytes: int = 32 * 1024 * 1024
    author_count: int = 4096
    author_bytes: int = 4 * 1024 * 1024
    refused_count: int = 8192
    """Digests of refused envelopes that are remembered, so that neighbours do not send them again."""
    pushed_per_s: float = 50.0
    """Envelopes of one author that are pushed on, a second; what is above it is left to reconciliation."""
    push_burst: float = 200.0
    reconcile_interval_s: float = 10.0
    reconcile_neighbours: int = 8
    """Neighbours asked in one interval, drawn at random; new connections are asked at once besides."""
    peer_poll_s: float = 1.0
    session_timeout_s: float = 60.0
    """Deadline of one reconciliation; what is still missing then comes in the next round."""
    batch_count: int = 512
    batch_bytes: int = 1024 * 1024
    served_bytes_per_s: float = 512 * 1024
    served_burst_bytes: float = 48 * 1024 * 1024
    """Per neighbour, for what it asks of us; each request costs its own size and `request_bytes` besides."""
    request_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        if self.max_count + self.refused_count > 65_536:
            raise ValueError(f"{self.max_count} stored and {self.refused_count} refused digests exceed 65536")


class Gossip:
    """One node's view of the announcement topic of one swarm. `run()` works until it is cancelled."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        peers: PeerBook,
        transport: Transport,
        sequence: SequenceSource,
        *,
        replay: ReplayGuard | None = None,
        limits: GossipLimits = GossipLimits(),
    ) -> None:
        """`sequence` numbers this node's envelopes, `replay` remembers those that were counted."""
        self.listening = asyncio.Event()
        """Set while neighbours can push to this node, and ask it."""
        self._runtime = runtime
        self._membership = membership
        self._peers = peers
        self.transport = transport
        self.first_neighbour_at: int | None = None
        """Swarm time at which the first neighbour was seen, ms."""
        self._sequence = sequence
        self._replay = ReplayCache() if replay is None else replay  # an empty one is false
        self._limits = limits
        self._topic = announcement_topic(membership.swarm_id)
        self.store = AnnouncementStore(
            max_count=limits.max_count,
            max_bytes=limits.max_bytes,
            author_count=limits.author_count,
            author_bytes=limits.author_bytes,
        )
        """The unexpired announcements of everybody, own ones included."""
        self._refused: FIFOCache[bytes, None] = FIFOCache(limits.refused_count)
        """Short digests of refused envelopes."""
        self._served = KeyedTokenBuckets(
            limits.served_bytes_per_s,
            limits.served_burst_bytes,
            newcomers_per_s=10.0,
            newcomer_burst=256,
        )
        self._arrived = asyncio.Event()
        self._push = Push(runtime, transport, self._take_pushed)
        self._pushed_on = KeyedTokenBuckets(limits.pushed_per_s, limits.push_burst)
        self._disk_told = False

    async def run(self) -> None:
        """Take, answer, push and ask. Ends only by cancellation."""
        self.transport.serve(RECONCILE_PROTOCOL, self._answer)
        self.transport.serve(ANNOUNCE_PROTOCOL, self._hear, deadline_s=STREAM_LIFE_S)
        self.listening.set()
        await run_endless(push=self._push.run(), ask=self._ask_neighbours())

    async def announce(self, announcement: Announcement, ttl_ms: int) -> Digest:
        """Sign and store an announcement of ours; returns its envelope's digest.

        Never waits for the network: what cannot be pushed now neighbours get by reconciliation. Waits for the
        disk where that does not take that numbers are used.
        """
        sequence = await durable(self._runtime, "sequence numbers", self._sequence.next)
        now_ms = self._runtime.now_ms()
        data = seal(
            self._membership.identity,
            swarm_id=self._membership.swarm_id,
            topic=self._topic,
            sequence=sequence,
            payload=encode(announcement),
            now_ms=now_ms,
            ttl_ms=ttl_ms,
        )
        heard = Heard(self._membership.peer_id, announcement, now_ms, digest(data))
        self.store.add(StoredAnnouncement(heard, data, now_ms + ttl_ms), unread=False)
        self._push.push(data)
        return heard.envelope

    async def heard(self) -> AsyncIterator[Heard]:
        """Announcements of other peers, each once, in order of arrival; for one reader.

        A slow reader loses nothing that is still stored and unexpired.
        """
        while True:
            heard = self.store.next_unread(self._runtime.now_ms())
            if heard is not None:
                yield heard
                continue
            self._arrived.clear()
            await self._arrived.wait()

    # --- what others send ---

    async def _hear(self, stream: Stream) -> None:
        """A neighbour pushes."""
        self._require_member(stream.peer_id)
        await self._push.receive(stream)

    def _take_pushed(self, data: bytes, neighbour: PeerId) -> None:
        """Raises RemoteProtocolError for what an honest neighbour would not push."""
        try:
            heard = self._take(data)
        except ReplayError as error:
            logger.debug("%s pushes what was counted before: %s", neighbour, error)
        except (FreshnessError, LimitError) as error:  # its clock or our disk: it may have meant well
            self._peers.refused(neighbour, error.reason)
        else:
            if heard is not None and self._pushed_on.take(heard.sender, self._runtime.monotonic_s()):
                self._push.push(data, came_from=neighbour)

    def _require_member(self, peer_id: PeerId) -> None:
        if not self._membership.is_member(peer_id):
            raise SignatureError(f"{peer_id} is no member of this swarm", reason="stranger")

    def _take(self, data: bytes) -> Heard | None:
        """Store an envelope that is new and valid. Returns what is new in it, raises when it is invalid.

        A neighbour cannot know what we counted, for instance before a restart. What was counted is stored for
        others while there is room, and heard by nobody here.
        """
        envelope_digest = digest(data)
        short = short_digest(envelope_digest)
        if short in self.store or short in self._refused:
            return None
        now_ms = self._runtime.now_ms()
        counts = True
        try:
            swarm_id = self._membership.swarm_id
            envelope = open_envelope(data, swarm_id=swarm_id, topic=self._topic, now_ms=now_ms)
            announcement = decode(envelope.payload, Announcement, max_bytes=MAX_ENVELOPE_BYTES)
            if not self._membership.admit(envelope.sender, announcement.token):
                raise SignatureError(f"{envelope.sender} is no member of this swarm", reason="stranger")
            try:
                self._replay.admit(
                    envelope.sender, envelope.sequence, envelope.created_at, envelope.expires_at, now_ms
                )
            except ReplayError:
                if not self.store.has_room(envelope.sender, len(data)):
                    raise
                counts = False
            except OSError as error:
                self._tell_disk(error)
                raise LimitError("the disk does not take what was counted", reason="disk") from error
        except FreshnessError:
            raise  # and not remembered: an envelope from a clock ahead of ours is welcome later
        except RemoteProtocolError:
            self._refused[short] = None
            raise
        heard = Heard(envelope.sender, announcement, now_ms, envelope_digest)
        unread = counts and envelope.sender != self._membership.peer_id
        self.store.add(StoredAnnouncement(heard, data, envelope.expires_at), unread=unread)
        self._arrived.set()
        return heard

    def _tell_disk(self, error: OSError) -> None:
        if not self._disk_told:
            self._disk_told = True
            logger.warning(
                "announcements are refused, because the replay memory cannot be written: %s", error
            )

    # --- reconciliation ---

    async def _answer(self, stream: Stream) -> None:
        """neighbour -> us: send what it lacks, batch by batch, until it closes the stream."""
        self._require_member(stream.peer_id)
        while True:
            frame = await stream.receive(_MAX_REQUEST_BYTES)
            request = decode(frame, ReconcileRequest, max_bytes=_MAX_REQUEST_BYTES)
            if request.topic != self._topic:
                raise SignatureError("the neighbour reconciles another topic", reason="topic")
            if len(request.held) % SHORT_DIGEST_BYTES:
                raise DecodeError(
                    f"{len(request.held)} bytes are no row of {SHORT_DIGEST_BYTES}-byte digests"
                )
            envelopes = self._lacking(stream.peer_id, request.held)
            await stream.send(encode(ReconcileReply(len(envelopes))))
            for envelope in envelopes:
                await stream.send(envelope)

    def _lacking(self, peer_id: PeerId, held: bytes) -> list[bytes]:
        now_s = self._runtime.monotonic_s()
        if not self._served.take(peer_id, now_s, len(held) + self._limits.request_bytes):
            raise LimitError(f"{peer_id} reconciles more often than it may", reason="reconcile_rate")
        elsewhere = {held[at : at + SHORT_DIGEST_BYTES] for at in range(0, len(held), SHORT_DIGEST_BYTES)}
        envelopes = self.store.missing(
            elsewhere,
            max_count=self._limits.batch_count,
            max_bytes=self._limits.batch_bytes,
            now_ms=self._runtime.now_ms(),
        )
        if not self._served.take(peer_id, now_s, sum(map(len, envelopes))):
            raise LimitError(f"{peer_id} was sent more than it may ask for", reason="reconcile_rate")
        return envelopes

    async def _ask_neighbours(self) -> None:
        """New neighbours at once, a random few of all every interval; each in its own task, one at a time."""
        sessions: dict[PeerId, asyncio.Task[None]] = {}
        connected: dict[PeerId, None] = {}
        next_round_s = self._runtime.monotonic_s() + self._limits.reconcile_interval_s
        async with asyncio.TaskGroup() as group:
            while True:
                before = connected
                try:
                    connected = {peer.peer_id: None for peer in await self.transport.peers()}
                except TransportError:
                    connected = {}
                self._push.choose([each for each in connected if self._membership.is_member(each)])
                if connected and self.first_neighbour_at is None:
                    self.first_neighbour_at = self._runtime.now_ms()
                due = [peer_id for peer_id in connected if peer_id not in before]
                if self._runtime.monotonic_s() >= next_round_s:
                    next_round_s = self._runtime.monotonic_s() + self._limits.reconcile_interval_s
                    self.store.expire(self._runtime.now_ms())
                    count = min(self._limits.reconcile_neighbours, len(connected))
                    drawn = self._runtime.rng.sample(list(connected), count)
                    due += [peer_id for peer_id in drawn if peer_id not in due]
                for peer_id in due:
                    idle = peer_id not in sessions or sessions[peer_id].done()
                    if idle and self._membership.is_member(peer_id):
                        sessions[peer_id] = group.create_task(self._ask(peer_id))
                sessions = {peer_id: task for peer_id, task in sessions.items() if not task.done()}
                await asyncio.sleep(self._limits.peer_poll_s)

    async def _ask(self, peer_id: PeerId) -> None:
        """us -> neighbour: fetch what we lack. Its faults are counted, its absence is not."""
        try:
            async with asyncio.timeout(self._limits.session_timeout_s):
                stream = await self.transport.open_stream(peer_id, RECONCILE_PROTOCOL)
                try:
                    while await self._fetch_batch(stream):
                        pass
                finally:
                    await stream.close()
        except TimeoutError:
            self._peers.refused(peer_id, "deadline")
        except RemoteProtocolError as error:
            self._peers.refused(peer_id, error.reason)
        except TransportError as error:
            logger.debug("reconciliation with %s ended: %s", peer_id, error)

    async def _fetch_batch(self, stream: Stream) -> bool:
        """One request and its reply; returns whether to ask again."""
        held = b"".join([*self.store.short_digests(), *self._refused])
        await stream.send(encode(ReconcileRequest(self._topic, held)))
        reply = decode(await stream.receive(_MAX_REPLY_BYTES), ReconcileReply, max_bytes=_MAX_REPLY_BYTES)
        new = refused = 0
        for number in range(reply.count):
            data = await stream.receive(MAX_ENVELOPE_BYTES)
            try:
                new += self._take(data) is not None
            except ReplayError as error:  # no fault of an honest neighbour, and it will not send this again
                logger.debug("%s relays what was counted before: %s", stream.peer_id, error)
            except RemoteProtocolError as error:
                self._peers.refused(stream.peer_id, error.reason)
                refused += 1
            if refused > _MAX_BAD_ENVELOPES or number + 1 - new > _MAX_USELESS_ENVELOPES:
                return False
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return new > 0
