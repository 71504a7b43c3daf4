"""Who is here: this node's own record, handshakes with neighbours, and the way to further peers.

    bootstraps --> first neighbour --> DHT: own record in, records of heard authors out --> more neighbours

A node can always start alone: `run` keeps trying the bootstrap addresses, exchanges `Hello` with every new
neighbour, again with one that has been silent (`links.py`), and keeps this node's signed record in the DHT.
Whoever the book knows as active, or `seek` names, and is not connected is looked up there. The handshake is
where another protocol version, another swarm or a closed door is told in one sentence. The charter is served
to anyone who asks, so that `swarm join <address>` needs nothing but an address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from statistics import median_high, median_low

from cachetools import FIFOCache

from node.clock import Clock
from node.durable import LeftOut, durable
from node.events import NoticeLevel, inert
from node.membership import Membership
from node.peers.backoff import Backoff
from node.peers.book import PeerBook
from node.peers.greeting import differences, hello, knows_newer, refusal, welcome
from node.peers.links import Links
from node.runtime import Runtime
from node.state.stores import SequenceSource
from node.supervise import run_endless
from node.transport.base import Stream, Transport
from node.transport.limits import FirstTimes
from protocol.annex import MAX_ANNEX_BYTES
from protocol.charter import MAX_CHARTER_BYTES, charter_bytes, decode_charter
from protocol.codec import decode, encode
from protocol.constants import MAX_ADDRESSES as MAX_ANNEX_ADDRESSES
from protocol.constants import PROTOCOL_VERSION
from protocol.errors import CharterError, RemoteProtocolError, TransportError, VersionError
from protocol.messages import Annex, AnnexReply, Charter, Hello, HelloReply, Lineage, PeerId, PeerRecord
from protocol.preamble import MAX_PREAMBLE_BYTES, PREAMBLE, require_same_version
from protocol.records import open_record, seal_record
from protocol.topics import CHARTER_PROTOCOL, HELLO_PROTOCOL, peer_key

__all__ = [
    "TOLERATED_SKEW_MS",
    "Presence",
    "ask_clock",
    "clock_skew_ms",
    "fetch_annex",
    "fetch_charter",
    "say_hello",
]

log = logging.getLogger(__name__)
MAX_HELLO_BYTES = 8 * 1024
KNOWN_PEERS = 1024
ROUND_S = 1.0
HELLO_TIMEOUT_S = 5.0
"""Deadline of one handshake. Each has a task of its own: one silent neighbour delays no other."""
REFUSALS_TOLD = 8
"""Neighbours whose refusal is shown: identities are free, and no peer may fill the screen."""
ALONE_TOLD_S = 4.0
"""The operator is told that no bootstrap answers once the pause between tries is longer."""
MAX_ADDRESSES = 16
"""Own addresses in a record."""
RECORD_TTL_MS = 10 * 60 * 1000
STORE_AGAIN_S = 10.0
"""Pause before a record that could not be stored, or has changed meanwhile, is stored again."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.65, 30.0
BACKOFF_GROWTH = 1.3
"""Doubling let a node that started seconds before its bootstrap train alone for a third of a demo."""
ENOUGH_NEIGHBOURS = 32
"""With so many, nobody is sought: gossip and reconciliation reach everybody through fewer."""
SOUGHT_PEERS = 256
SEEK_PER_ROUND = 4
"""Peers looked up at a time, and addresses of one record that are tried."""
SEEK_TIMEOUT_S = 20.0
SEEK_BACKOFF_S = 2.0
MAX_SEEK_BACKOFF_S = 300.0
TOLERATED_SKEW_MS = 3000
"""The network daemons themselves demand clocks within 3 s."""


async def fetch_charter(transport: Transport, peer_id: PeerId) -> Charter:
    """The charter that `peer_id` serves, its signature checked. Raises CharterError or TransportError."""
    stream = await transport.open_stream(peer_id, CHARTER_PROTOCOL)
    try:
        return decode_charter(await stream.receive(max_bytes=MAX_CHARTER_BYTES))
    except RemoteProtocolError as error:
        raise CharterError(f"the charter served by {peer_id} is refused: {error}") from error
    finally:
        await stream.close()


async def fetch_annex(transport: Transport, peer_id: PeerId) -> Annex | None:
    """The newest annex that `peer_id` knows, unchecked. Raises TransportError or RemoteProtocolError."""
    stream = await transport.open_stream(peer_id, CHARTER_PROTOCOL)
    try:
        await stream.receive(max_bytes=MAX_CHARTER_BYTES)
        data = await stream.receive(max_bytes=MAX_ANNEX_BYTES)
        return decode(data, AnnexReply, max_bytes=MAX_ANNEX_BYTES).annex
    finally:
        await stream.close()


async def say_hello(
    transport: Transport, peer_id: PeerId, hello: Hello, clock: Clock
) -> tuple[HelloReply, int]:
    """The answer of `peer_id`, and its clock minus ours in ms. Raises TransportError or
    RemoteProtocolError."""
    stream = await transport.open_stream(peer_id, HELLO_PROTOCOL)
    try:
        await stream.send(PREAMBLE)
        require_same_version(await stream.receive(max_bytes=MAX_PREAMBLE_BYTES))
        sent_at = clock.now_ms()
        await stream.send(encode(hello))
        reply = decode(await stream.receive(max_bytes=MAX_HELLO_BYTES), HelloReply, max_bytes=MAX_HELLO_BYTES)
        return reply, reply.clock_at - (sent_at + clock.now_ms()) // 2
    finally:
        await stream.close()


async def ask_clock(transport: Transport, peer_id: PeerId, clock: Clock) -> int:
    """The clock of `peer_id`, whatever its swarm, minus ours in ms. Raises TransportError."""
    nobody = PeerRecord(name="doctor", protocol_version=PROTOCOL_VERSION, addresses=(), lineage=None)
    try:
        _, skew_ms = await say_hello(transport, peer_id, Hello(swarm_id="0" * 64, peer=nobody), clock)
    except RemoteProtocolError as error:
        raise TransportError(f"{peer_id} answers, but not as a node of this protocol: {error}") from error
    return skew_ms


def clock_skew_ms(skews_ms: Sequence[int]) -> int:
    """Median over neighbours of (their clock - ours), ms; 0 without neighbours. Of two in the middle the one
    nearer to us, so that half of the neighbours cannot move it by lying."""
    return min(median_low(skews_ms), median_high(skews_ms), key=abs) if skews_ms else 0


class Presence:
    """Handshakes, bootstrapping and search of one node."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        peers: PeerBook,
        transport: Transport,
        sequence: SequenceSource,
        *,
        name: str,
        bootstraps: Sequence[str],
    ) -> None:
        """`sequence` numbers this node's envelopes; `name` is shown to others."""
        self._runtime = runtime
        self._membership = membership
        self._peers = peers
        self._transport = transport
        self._sequence = sequence
        self._name = name
        self._bootstraps = tuple(bootstraps)
        self.lineage: Lineage | None = None
        """Whose policy this node generates with, as its record says; the node changes it."""
        self.known: FIFOCache[PeerId, PeerRecord] = FIFOCache(KNOWN_PEERS)
        """The last record of each neighbour."""
        self.links = Links(runtime.clock)
        """Who has a link, and whose application answers."""
        self.stored: PeerRecord | None = None
        """This node's record as it was last put into the DHT."""
        self._dials = Backoff[str](
            FIRST_BACKOFF_S,
            MAX_BACKOFF_S,
            max_keys=len(self._bootstraps) + MAX_ANNEX_ADDRESSES,
            growth=BACKOFF_GROWTH,
        )
        self._skews_ms: FIFOCache[PeerId, int] = FIFOCache(KNOWN_PEERS)
        self._skew_told = False
        self._told = FirstTimes(REFUSALS_TOLD)
        self._annex = LeftOut(runtime, "the annex")
        self._sought: FIFOCache[PeerId, None] = FIFOCache(SOUGHT_PEERS)
        """Peers that were heard and are not connected, the one looked up last at the end."""
        self._searches = Backoff[PeerId](SEEK_BACKOFF_S, MAX_SEEK_BACKOFF_S, max_keys=SOUGHT_PEERS)
        self._said: tuple[Lineage | None, Annex | None] = (None, None)
        """Lineage and annex as all neighbours were told them last."""
        transport.serve(HELLO_PROTOCOL, self.answer_hello)
        transport.serve(CHARTER_PROTOCOL, self._answer_charter)

    def seek(self, peer_id: PeerId) -> None:
        """Find this member of the swarm, unless it is a neighbour. Cheap."""
        if peer_id not in self._sought and peer_id not in {*self.links.peers, self._membership.peer_id}:
            self._sought[peer_id] = None

    @property
    def connected(self) -> frozenset[PeerId]:
        """Neighbours whose application answered within a stated time: who may be asked for something."""
        return self.links.connected

    @property
    def sought(self) -> tuple[PeerId, ...]:
        """Peers that are looked for, the next one first."""
        return tuple(self._sought)

    def record(self) -> PeerRecord:
        """This node's own, as it is now."""
        return PeerRecord(
            name=self._name,
            protocol_version=PROTOCOL_VERSION,
            addresses=self._transport.addresses()[:MAX_ADDRESSES],
            lineage=self.lineage,
        )

    async def run(self) -> None:
        """Greet, bootstrap, seek and renew the record until cancelled."""
        await run_endless(meet=self._meet(), keep_up=self._keep_up(), search=self._search())

    async def _meet(self) -> None:
        """See which links stand, and greet: new neighbours, those that fell silent, and all when there is
        news."""
        greetings: dict[PeerId, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    self.links.standing([peer.peer_id for peer in await self._transport.peers()])
                except TransportError:
                    self.links.standing(())
                # Whoever has the lineage is asked for its weights: one that changed is told at once.
                news = (self.lineage, self._membership.annex)
                due = self.links.due() if news == self._said else sorted(self.links.peers)
                self._said = news
                greetings = {peer_id: task for peer_id, task in greetings.items() if not task.done()}
                for peer_id in due:
                    if peer_id not in greetings:
                        greetings[peer_id] = group.create_task(self._greet(peer_id))
                await asyncio.sleep(ROUND_S)

    async def _keep_up(self) -> None:
        """Dial the bootstraps that are missing, and renew this node's record."""
        told, next_store_s, soon_s = False, 0.0, 0.0
        while True:
            now_s = self._runtime.monotonic_s()
            failure, pause_s = await self._dial_bootstraps(now_s)
            linked = bool(self.links.peers)
            if failure and not linked and not told and pause_s > ALONE_TOLD_S:
                text = f"no bootstrap answers yet ({failure}); training alone, still trying"
                self._runtime.notice(NoticeLevel.WARNING, text)
                told = True
            changed = self.stored is not None and self.stored != self.record()
            if linked and now_s >= (soon_s if changed else next_store_s):
                stored = await self._store_record()
                soon_s = now_s + STORE_AGAIN_S
                next_store_s = now_s + RECORD_TTL_MS / 2000 if stored else soon_s
            await asyncio.sleep(ROUND_S)

    async def _search(self) -> None:
        """Look up a few of those who were heard and are not connected, each ever more rarely."""
        while True:
            await asyncio.sleep(ROUND_S)
            for peer_id in self._peers.active():
                self.seek(peer_id)
            for peer_id in self._sought.keys() & self.links.peers:
                del self._sought[peer_id]
                self._searches.succeeded(peer_id)
            if not self.links.peers or len(self.connected) >= ENOUGH_NEIGHBOURS:
                continue
            now_s = self._runtime.monotonic_s()
            due = [peer_id for peer_id in self._sought if not self._searches.ready_in_s(peer_id, now_s)]
            await asyncio.gather(*map(self._find, due[:SEEK_PER_ROUND]))

    async def _find(self, peer_id: PeerId) -> None:
        """Connect to `peer_id` at an address from its own DHT record, or try again later."""
        try:
            async with asyncio.timeout(SEEK_TIMEOUT_S):
                for address in (await self.look_up(peer_id))[:SEEK_PER_ROUND]:
                    # Its signature stands for its own address only, never for somebody else's.
                    theirs = address.endswith(f"/p2p/{peer_id}") and self._transport.may_dial(address)
                    if theirs and not await self._connect_one(address):
                        break
        except (TimeoutError, TransportError, RemoteProtocolError) as error:
            log.debug("%s is not found: %s", peer_id, error)
        self._searches.failed(peer_id, self._runtime.monotonic_s())  # until it is seen as connected
        self._sought.pop(peer_id, None)
        self._sought[peer_id] = None

    async def look_up(self, peer_id: PeerId) -> tuple[str, ...]:
        """Addresses in the record that `peer_id` has signed, empty when the DHT has none. Raises
        TransportError or RemoteProtocolError."""
        key = peer_key(self._membership.swarm_id, peer_id)
        value = await self._transport.get(key)
        if value is None:
            return ()
        now_ms = self._runtime.now_ms()
        return open_record(key, value, swarm_id=self._membership.swarm_id, now_ms=now_ms).addresses

    async def _dial_bootstraps(self, now_s: float) -> tuple[str, float]:
        """Try the bootstraps that are not connected and due, all at once; the last failure as text, "" when
        all answered, and the longest pause until the next try in seconds."""
        due = []
        annex = self._membership.annex
        addresses = {*self._bootstraps, *(annex.bootstraps if annex is not None else ())}
        for address in sorted(addresses):
            if address.rpartition("/p2p/")[2] in self.links.peers:
                self._dials.succeeded(address)
            elif not self._dials.ready_in_s(address, now_s):
                due.append(address)
        failures = await asyncio.gather(*map(self._connect_one, due))
        now_s = self._runtime.monotonic_s()
        pauses_s = [self._dials.failed(address, now_s) for address in due]  # until it is seen as connected
        return next(filter(None, reversed(failures)), ""), max(pauses_s, default=0.0)

    async def _connect_one(self, address: str) -> str:
        try:
            await self._transport.connect(address)
        except TransportError as error:
            log.debug("%s: %s", address, error)
            return str(error)
        return ""

    async def _store_record(self) -> bool:
        sequence = await durable(self._runtime, "sequence numbers", self._sequence.next)
        now_ms, record = self._runtime.now_ms(), self.record()
        key, value = seal_record(
            self._membership.identity,
            record,
            swarm_id=self._membership.swarm_id,
            sequence=sequence,
            now_ms=now_ms,
            ttl_ms=RECORD_TTL_MS,
        )
        try:
            await self._transport.store(key, value, now_ms + RECORD_TTL_MS)
        except TransportError as error:
            log.debug("own record not stored: %s", error)
            self.stored = None
            return False
        self.stored = record
        return True

    async def _greet(self, peer_id: PeerId) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                said = hello(self._membership, self.record())
                reply, skew_ms = await say_hello(self._transport, peer_id, said, self._runtime.clock)
        except TimeoutError:
            self._peers.refused(peer_id, "deadline")
            self.links.unanswered(peer_id)
            return
        except TransportError as error:
            log.debug("no handshake with %s: %s", peer_id, error)
            self.links.unanswered(peer_id)
            return
        except VersionError as error:
            self._peers.refused(peer_id, error.reason)
            self._tell(peer_id, f"no handshake with {peer_id}: {error}")
            self._remember(peer_id, None)
            return
        except RemoteProtocolError as error:
            self._peers.refused(peer_id, error.reason)
            self.links.unanswered(peer_id)
            return
        self._skews_ms[peer_id] = skew_ms
        self._tell_skew()
        if reply.peer is None:
            one_line = " ".join(inert(reply.refusal, 256).split())
            self._tell(peer_id, f"{peer_id} refuses this node: {one_line}")
            self._remember(peer_id, None)
        else:
            await self._meet_peer(peer_id, reply, reply.peer)

    async def answer_hello(self, stream: Stream) -> None:
        """One greeting from elsewhere. Raises what the transport counts."""
        preamble = await stream.receive(max_bytes=MAX_PREAMBLE_BYTES)
        await stream.send(PREAMBLE)  # whatever theirs is, so that they can say it too
        try:
            require_same_version(preamble)
        except VersionError as error:
            self._tell(stream.peer_id, f"no handshake with {stream.peer_id}: {error}")
            raise
        said = decode(await stream.receive(max_bytes=MAX_HELLO_BYTES), Hello, max_bytes=MAX_HELLO_BYTES)
        why = refusal(self._membership, stream.peer_id, said)
        if why:
            await stream.send(encode(HelloReply(peer=None, clock_at=self._runtime.now_ms(), refusal=why)))
            raise RemoteProtocolError(why, reason="other_swarm")
        await stream.send(encode(welcome(self._membership, self.record(), self._runtime.now_ms())))
        await self._meet_peer(stream.peer_id, said, said.peer)

    async def _answer_charter(self, stream: Stream) -> None:
        await stream.send(charter_bytes(self._membership.charter))
        await stream.send(encode(AnnexReply(self._membership.annex)))

    async def _meet_peer(self, peer_id: PeerId, said: Hello | HelloReply, record: PeerRecord) -> None:
        """What a neighbour of this swarm says of itself: a member, with which environments and annex?"""
        if not self._membership.admit(peer_id, said.token):
            self._peers.refused(peer_id, "stranger")
            self._remember(peer_id, None)
            return
        self._remember(peer_id, record)
        if sentence := differences(self._membership, peer_id, said):
            self._peers.refused(peer_id, "environment_mismatch")
            self._tell(peer_id, sentence)
        if knows_newer(self._membership, said):
            await self._ask_annex(peer_id)

    async def _ask_annex(self, peer_id: PeerId) -> None:
        """Take over the annex of a peer that knows a newer one."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                annex = await fetch_annex(self._transport, peer_id)
            if annex is not None:
                self._membership.renew(annex)
        except (TimeoutError, TransportError) as error:
            log.debug("no annex from %s: %s", peer_id, error)
        except RemoteProtocolError as error:
            self._peers.refused(peer_id, error.reason)
            self._tell(peer_id, f"the annex of {peer_id} is refused: {error}")
        except OSError as error:  # it holds all the same, and is asked for again after a restart
            self._annex.failed(f"the annex cannot be kept: {error}")
        else:
            self._annex.worked()

    def _tell(self, peer_id: PeerId, text: str) -> None:
        """Warn once about a peer that we do not get along with, and about a few only."""
        if self._told.is_new(peer_id):
            self._runtime.notice(NoticeLevel.WARNING, text)

    def _tell_skew(self) -> None:
        """Say once that this clock is off, when most neighbours agree that it is."""
        skew_ms = clock_skew_ms(list(self._skews_ms.values()))
        if abs(skew_ms) > TOLERATED_SKEW_MS and not self._skew_told:
            direction = "behind" if skew_ms > 0 else "ahead of"
            self._runtime.notice(
                NoticeLevel.WARNING,
                f"this clock is {abs(skew_ms) / 1000:.0f} s {direction} the neighbours'; others refuse "
                "what they cannot date. Switch on time synchronisation",
            )
            self._skew_told = True

    def _remember(self, peer_id: PeerId, record: PeerRecord | None) -> None:
        """What it said of itself; None for a peer that has no place here, or where this node has none."""
        unknown = PeerRecord(name="unknown", protocol_version=0, addresses=(), lineage=None)
        self.known[peer_id] = record or unknown
        if record is None:
            self.links.parted(peer_id)
        else:
            self.links.answered(peer_id)
