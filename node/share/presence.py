"""Who is here: this node's own record, handshakes with neighbours, and the way to the first peer.

Three duties. `run` keeps trying the bootstrap addresses until a neighbour is there (a node can always start
alone), exchanges `Hello` with every new neighbour and puts this node's signed record into the DHT again
before it expires. The handshake is where another protocol version, another swarm or a closed door is told in
one sentence. The charter is served to anyone who asks, so that `swarm join <address>` needs nothing but an
address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from statistics import median

from node.clock import Clock
from node.transport.base import Stream, Transport
from protocol.charter import charter_bytes, decode_charter, is_member, swarm_id
from protocol.codec import decode, encode
from protocol.constants import PROTOCOL_VERSION
from protocol.errors import CharterError, RemoteProtocolError, TransportError, VersionError
from protocol.identity import Identity
from protocol.messages import Charter, Hello, HelloReply, PeerId, PeerRecord
from protocol.records import seal_record
from protocol.topics import CHARTER_PROTOCOL, HELLO_PROTOCOL

__all__ = ["TOLERATED_SKEW_MS", "Presence", "ask_clock", "clock_skew_ms", "fetch_charter", "say_hello"]

log = logging.getLogger(__name__)
MAX_HELLO_BYTES = 8 * 1024
MAX_CHARTER_BYTES = 1024 * 1024
KNOWN_PEERS = 1024
ROUND_S = 1.0
RECORD_TTL_MS = 10 * 60 * 1000
MAX_BACKOFF_S = 30.0
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
    """Median over neighbours of (their clock - ours), ms; 0 without neighbours. A minority of liars cannot
    move it."""
    return int(median(skews_ms)) if skews_ms else 0


class Presence:
    """Handshakes and bootstrapping of one node. `known` maps neighbours to their last record."""

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
        notice: Callable[[str, str], None],
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
        self._skews_ms: dict[PeerId, int] = {}
        self._skew_told = False
        transport.serve(HELLO_PROTOCOL, self._answer_hello)
        transport.serve(CHARTER_PROTOCOL, self._answer_charter)

    async def run(self) -> None:
        """Greet, bootstrap and renew the record until cancelled."""
        backoff_s, next_try_s, told, next_store_s = 0.5, 0.0, False, 0.0
        while True:
            now_s = self._clock.monotonic_s()
            try:
                self.connected = frozenset(peer.peer_id for peer in await self._transport.peers())
            except TransportError:
                self.connected = frozenset()
            for peer_id in sorted(self.connected - self.known.keys()):
                await self._greet(peer_id)
            missing = [a for a in self._bootstraps if a.rpartition("/p2p/")[2] not in self.connected]
            if missing and now_s >= next_try_s:
                failure = await self._connect(missing)
                if failure and not self.connected and not told and backoff_s > 4:
                    self._notice(
                        "warning", f"no bootstrap answers yet ({failure}); training alone, still trying"
                    )
                    told = True
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                next_try_s = self._clock.monotonic_s() + backoff_s
            if self.connected and now_s >= next_store_s:
                await self._store_record()
                next_store_s = now_s + RECORD_TTL_MS / 2000
            await asyncio.sleep(ROUND_S)

    async def _connect(self, addresses: Sequence[str]) -> str:
        """Try each address; the last failure as text, "" when all answered."""
        failure = ""
        for address in addresses:
            try:
                await self._transport.connect(address)
            except TransportError as error:
                failure = str(error)
                log.debug("bootstrap %s: %s", address, error)
        return failure

    async def _store_record(self) -> None:
        now_ms = self._clock.now_ms()
        key, value = seal_record(
            self._identity,
            self._record(),
            swarm_id=self._swarm_id,
            sequence=self._next_sequence(),
            now_ms=now_ms,
            ttl_ms=RECORD_TTL_MS,
        )
        try:
            await self._transport.store(key, value, now_ms + RECORD_TTL_MS)
        except TransportError as error:
            log.debug("own record not stored: %s", error)

    async def _greet(self, peer_id: PeerId) -> None:
        try:
            reply, skew_ms = await say_hello(
                self._transport, peer_id, Hello(swarm_id=self._swarm_id, peer=self._record()), self._clock
            )
            self._skews_ms[peer_id] = skew_ms
        except TransportError as error:
            log.debug("no handshake with %s: %s", peer_id, error)
            return
        except RemoteProtocolError as error:
            self._refused(peer_id, error.reason)
            return
        self._tell_skew()
        if reply.peer is None:
            self._notice("warning", f"{peer_id} refuses this node: {reply.refusal}")
            self._remember(peer_id, None)
        else:
            self._remember(peer_id, reply.peer)

    async def _answer_hello(self, stream: Stream) -> None:
        hello = decode(await stream.receive(max_bytes=MAX_HELLO_BYTES), Hello, max_bytes=MAX_HELLO_BYTES)
        refusal = self._refusal(stream.peer_id, hello)
        if refusal:
            await stream.send(encode(HelloReply(peer=None, clock_at=self._clock.now_ms(), refusal=refusal)))
            raise (
                VersionError(refusal)
                if hello.peer.protocol_version != PROTOCOL_VERSION
                else RemoteProtocolError(refusal, reason="other_swarm")
            )
        self._remember(stream.peer_id, hello.peer)
        await stream.send(encode(HelloReply(peer=self._record(), clock_at=self._clock.now_ms())))

    async def _answer_charter(self, stream: Stream) -> None:
        await stream.send(charter_bytes(self._charter))

    def _tell_skew(self) -> None:
        """Say once that this clock is off, when most neighbours agree that it is."""
        skew_ms = clock_skew_ms(list(self._skews_ms.values()))
        if abs(skew_ms) > TOLERATED_SKEW_MS and not self._skew_told:
            direction = "behind" if skew_ms > 0 else "ahead of"
            self._notice(
                "warning",
                f"this clock is {abs(skew_ms) / 1000:.0f} s {direction} the neighbours'; others refuse "
                "what they cannot date. Switch on time synchronisation",
            )
            self._skew_told = True

    def _refusal(self, peer_id: PeerId, hello: Hello) -> str:
        if hello.peer.protocol_version != PROTOCOL_VERSION:
            theirs = hello.peer.protocol_version
            return f"this node speaks protocol {PROTOCOL_VERSION}, yours is {theirs}; update the older"
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
