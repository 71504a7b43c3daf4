"""Who is here: this node's own record, handshakes with neighbours, and the way to further peers.

    bootstraps --> first neighbour --> DHT: own record in, records of heard authors out --> more neighbours

A node can always start alone: `run` keeps trying the bootstrap addresses, exchanges `Hello` with every new
neighbour and keeps this node's signed record in the DHT. Whoever is heard and not connected is looked up
there (`seek`). The handshake is where another protocol version, another swarm or a closed door is told in one
sentence. The charter is served to anyone who asks, so that `swarm join <address>` needs nothing but an
address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

from node.clock import Clock
from node.events import NoticeLevel, inert
from node.transport.base import Stream, Transport
from node.transport.limits import FirstTimes
from protocol.charter import MAX_CHARTER_BYTES, charter_bytes, decode_charter, is_member, swarm_id
from protocol.codec import decode, encode
from protocol.constants import PROTOCOL_VERSION
from protocol.errors import CharterError, RemoteProtocolError, TransportError, VersionError
from protocol.identity import Identity
from protocol.messages import Charter, Hello, HelloReply, Lineage, PeerId, PeerRecord
from protocol.preamble import MAX_PREAMBLE_BYTES, PREAMBLE, require_same_version
from protocol.records import open_record, seal_record
from protocol.topics import CHARTER_PROTOCOL, HELLO_PROTOCOL, peer_key

__all__ = ["TOLERATED_SKEW_MS", "Presence", "ask_clock", "clock_skew_ms", "fetch_charter", "say_hello"]

log = logging.getLogger(__name__)
MAX_HELLO_BYTES = 8 * 1024
KNOWN_PEERS = 1024
ROUND_S = 1.0
HELLO_TIMEOUT_S = 5.0
"""Deadline of one handshake. Those of a round run together: one silent neighbour delays no other."""
REFUSALS_TOLD = 8
"""Neighbours whose refusal is shown: identities are free, and no peer may fill the screen."""
RECORD_TTL_MS = 10 * 60 * 1000
STORE_AGAIN_S = 10.0
"""Pause before a record that could not be stored, or has changed meanwhile, is stored again."""
MAX_BACKOFF_S = 30.0
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


@dataclass(slots=True)
class _Sought:
    """A peer that was heard and is not connected."""

    next_try_s: float
    failures: int = 0


class Presence:
    """Handshakes, bootstrapping and search of one node. `known` maps neighbours to their last record."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        charter: Charter,
        clock: Clock,
        *,
        record: Callable[[], PeerRecord],
        next_sequence: Callable[[], int],
        bootstraps: Sequence[str],
        refused: Callable[[PeerId, str], None],
        notice: Callable[[NoticeLevel, str], None],
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._charter = charter
        self._swarm_id = swarm_id(charter)
        self._clock = clock
        self._record = record
        self._next_sequence = next_sequence
        self._bootstraps = tuple(bootstraps)
        self._refused = refused
        self._notice = notice
        self.known: OrderedDict[PeerId, PeerRecord] = OrderedDict()
        self.connected: frozenset[PeerId] = frozenset()
        self.first_connected_at: int | None = None
        """Swarm time at which the first neighbour was seen, ms."""
        self._skews_ms: dict[PeerId, int] = {}
        self._skew_told = False
        self._told = FirstTimes(REFUSALS_TOLD)
        self._sought: OrderedDict[PeerId, _Sought] = OrderedDict()
        self._stored: PeerRecord | None = None
        self._said: Lineage | None = None
        """The lineage in the last round of handshakes."""
        transport.serve(HELLO_PROTOCOL, self._answer_hello)
        transport.serve(CHARTER_PROTOCOL, self._answer_charter)

    def seek(self, peer_id: PeerId) -> None:
        """Find this member of the swarm, unless it is a neighbour. Cheap: for every sender that is heard."""
        if peer_id in self._sought or peer_id in self.connected or peer_id == self._identity.peer_id:
            return
        self._sought[peer_id] = _Sought(self._clock.monotonic_s())
        while len(self._sought) > SOUGHT_PEERS:
            self._sought.popitem(last=False)

    async def run(self) -> None:
        """Greet, bootstrap, seek and renew the record until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._meet())
            group.create_task(self._search())

    async def _meet(self) -> None:
        backoff_s, next_try_s, told, next_store_s, soon_s = 0.5, 0.0, False, 0.0, 0.0
        while True:
            now_s = self._clock.monotonic_s()
            try:
                self.connected = frozenset(peer.peer_id for peer in await self._transport.peers())
            except TransportError:
                self.connected = frozenset()
            if self.connected and self.first_connected_at is None:
                self.first_connected_at = self._clock.now_ms()
            lineage = self._record().lineage
            # Whoever has the lineage is asked for its weights: a follower with another owner says so at once.
            known = self.known.keys() if lineage == self._said else frozenset[PeerId]()
            self._said = lineage
            await asyncio.gather(*map(self._greet, sorted(self.connected - known)))
            missing = [a for a in self._bootstraps if a.rpartition("/p2p/")[2] not in self.connected]
            if missing and now_s >= next_try_s:
                failure = await self._connect(missing)
                if failure and not self.connected and not told and backoff_s > 4:
                    self._notice(
                        NoticeLevel.WARNING,
                        f"no bootstrap answers yet ({failure}); training alone, still trying",
                    )
                    told = True
                backoff_s = min(MAX_BACKOFF_S, backoff_s * BACKOFF_GROWTH)
                next_try_s = self._clock.monotonic_s() + backoff_s
            changed = self._stored is not None and self._stored != self._record()
            if self.connected and now_s >= (soon_s if changed else next_store_s):
                stored = await self._store_record()
                soon_s = now_s + STORE_AGAIN_S
                next_store_s = now_s + RECORD_TTL_MS / 2000 if stored else soon_s
            await asyncio.sleep(ROUND_S)

    async def _search(self) -> None:
        """Look up a few of those who were heard and are not connected, each ever more rarely."""
        while True:
            await asyncio.sleep(ROUND_S)
            for peer_id in self._sought.keys() & self.connected:
                del self._sought[peer_id]
            if not 0 < len(self.connected) < ENOUGH_NEIGHBOURS:
                continue
            now_s = self._clock.monotonic_s()
            due = [each for each in self._sought.items() if each[1].next_try_s <= now_s]
            due.sort(key=lambda each: each[1].next_try_s)
            await asyncio.gather(*(self._find(*each) for each in due[:SEEK_PER_ROUND]))

    async def _find(self, peer_id: PeerId, sought: _Sought) -> None:
        """Connect to `peer_id` at an address from its own DHT record, or try again later."""
        try:
            async with asyncio.timeout(SEEK_TIMEOUT_S):
                for address in (await self._look_up(peer_id))[:SEEK_PER_ROUND]:
                    # Its signature stands for its own address only, never for somebody else's.
                    if address.endswith(f"/p2p/{peer_id}") and not await self._connect_one(address):
                        break
        except (TimeoutError, TransportError, RemoteProtocolError) as error:
            log.debug("%s is not found: %s", peer_id, error)
        pause_s = min(MAX_SEEK_BACKOFF_S, SEEK_BACKOFF_S * 2.0 ** min(sought.failures, 20))
        sought.failures += 1
        sought.next_try_s = self._clock.monotonic_s() + pause_s

    async def _look_up(self, peer_id: PeerId) -> tuple[str, ...]:
        key = peer_key(self._swarm_id, peer_id)
        value = await self._transport.get(key)
        if value is None:
            return ()
        record = open_record(key, value, swarm_id=self._swarm_id, now_ms=self._clock.now_ms())
        return record.addresses

    async def _connect(self, addresses: Sequence[str]) -> str:
        """Try all addresses at once; the last failure as text, "" when all answered."""
        failures = await asyncio.gather(*map(self._connect_one, addresses))
        return next(filter(None, reversed(failures)), "")

    async def _connect_one(self, address: str) -> str:
        try:
            await self._transport.connect(address)
        except TransportError as error:
            log.debug("%s: %s", address, error)
            return str(error)
        return ""

    async def _store_record(self) -> bool:
        now_ms, record = self._clock.now_ms(), self._record()
        key, value = seal_record(
            self._identity,
            record,
            swarm_id=self._swarm_id,
            sequence=self._next_sequence(),
            now_ms=now_ms,
            ttl_ms=RECORD_TTL_MS,
        )
        try:
            await self._transport.store(key, value, now_ms + RECORD_TTL_MS)
        except TransportError as error:
            log.debug("own record not stored: %s", error)
            self._stored = None
            return False
        self._stored = record
        return True

    async def _greet(self, peer_id: PeerId) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                reply, skew_ms = await say_hello(
                    self._transport, peer_id, Hello(swarm_id=self._swarm_id, peer=self._record()), self._clock
                )
        except TimeoutError:
            self._refused(peer_id, "deadline")
            return
        except TransportError as error:
            log.debug("no handshake with %s: %s", peer_id, error)
            return
        except VersionError as error:
            self._refused(peer_id, error.reason)
            self._tell(peer_id, f"no handshake with {peer_id}: {error}")
            self._remember(peer_id, None)
            return
        except RemoteProtocolError as error:
            self._refused(peer_id, error.reason)
            return
        self._skews_ms[peer_id] = skew_ms
        self._tell_skew()
        if reply.peer is None:
            one_line = " ".join(inert(reply.refusal, 256).split())
            self._tell(peer_id, f"{peer_id} refuses this node: {one_line}")
            self._remember(peer_id, None)
        else:
            self._remember(peer_id, reply.peer)

    async def _answer_hello(self, stream: Stream) -> None:
        preamble = await stream.receive(max_bytes=MAX_PREAMBLE_BYTES)
        await stream.send(PREAMBLE)  # whatever theirs is, so that they can say it too
        try:
            require_same_version(preamble)
        except VersionError as error:
            self._tell(stream.peer_id, f"no handshake with {stream.peer_id}: {error}")
            raise
        hello = decode(await stream.receive(max_bytes=MAX_HELLO_BYTES), Hello, max_bytes=MAX_HELLO_BYTES)
        refusal = self._refusal(stream.peer_id, hello)
        if refusal:
            await stream.send(encode(HelloReply(peer=None, clock_at=self._clock.now_ms(), refusal=refusal)))
            raise RemoteProtocolError(refusal, reason="other_swarm")
        self._remember(stream.peer_id, hello.peer)
        await stream.send(encode(HelloReply(peer=self._record(), clock_at=self._clock.now_ms())))

    async def _answer_charter(self, stream: Stream) -> None:
        await stream.send(charter_bytes(self._charter))

    def _tell(self, peer_id: PeerId, text: str) -> None:
        """Warn once about a peer that we do not get along with, and about a few only."""
        if self._told.is_new(peer_id):
            self._notice(NoticeLevel.WARNING, text)

    def _tell_skew(self) -> None:
        """Say once that this clock is off, when most neighbours agree that it is."""
        skew_ms = clock_skew_ms(list(self._skews_ms.values()))
        if abs(skew_ms) > TOLERATED_SKEW_MS and not self._skew_told:
            direction = "behind" if skew_ms > 0 else "ahead of"
            self._notice(
                NoticeLevel.WARNING,
                f"this clock is {abs(skew_ms) / 1000:.0f} s {direction} the neighbours'; others refuse "
                "what they cannot date. Switch on time synchronisation",
            )
            self._skew_told = True

    def _refusal(self, peer_id: PeerId, hello: Hello) -> str:
        if hello.swarm_id != self._swarm_id:
            other = hello.swarm_id[:12]
            return f"this node belongs to swarm {self._swarm_id[:12]} ({self._charter.name}), not {other}"
        if not is_member(self._charter, peer_id):
            return f"swarm {self._charter.name} is closed and {peer_id} is not a member; ask its founder"
        return ""

    def _remember(self, peer_id: PeerId, record: PeerRecord | None) -> None:
        unknown = PeerRecord(name="unknown", protocol_version=0, addresses=(), lineage=None)
        self.known[peer_id] = record or unknown
        self.known.move_to_end(peer_id)
        while len(self.known) > KNOWN_PEERS:
            gone, _ = self.known.popitem(last=False)
            self._skews_ms.pop(gone, None)
