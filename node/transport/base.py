"""The seam between the node and any network: what every transport offers, and nothing more.

Participants: this node (one `Transport`), its connected peers, and strangers. Goals: a node can start alone;
every call has a deadline; every byte from a peer is bounded before it is decoded; a dead network is an error,
never a hang. Non-goals: reliability of `publish` (gossip is a hint, `node/share/gossip.py` repairs it), large
values in the DHT (bodies go over streams), and trust (nothing here reads a payload, except DHT record
validators).

Implementations: `hivemind.py` (the real one), `memory.py` (seeded, for simulation and speed). One contract
suite, `tests/node/transport/test_contract.py`, runs over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from node.transport.limits import Refusals
from protocol.constants import MAX_FRAME_BYTES
from protocol.messages import PeerId

__all__ = [
    "ConnectedPeer",
    "Gossiped",
    "RecordValidator",
    "Stream",
    "StreamHandler",
    "Transport",
    "TransportLimits",
]


@dataclass(frozen=True, slots=True)
class Gossiped:
    """One gossip message as it arrived. `sender` is the peer that the transport says published it."""

    sender: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """A peer with a live connection."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Caps that hold per remote peer, before any decoding."""

    streams_per_peer: int = 8
    """Streams one peer may have open towards us at a time; a further one is closed at once."""
    streams: int = 256
    """The same over all peers, so that invented identities cannot exhaust file descriptors."""
    stream_opens_per_s: float = 50.0
    stream_burst: int = 100
    messages_per_s: float = 50.0
    """Gossip messages per second and sender (token bucket), dropped and counted above it."""
    message_burst: int = 200
    newcomers_per_s: float = 50.0
    """Senders never heard before that are let in per second: identities are free, attention is not."""
    newcomer_burst: int = 1000
    queue_messages: int = 1024
    """Messages one subscription keeps for a slow reader; the oldest are dropped and counted."""
    queue_bytes: int = 16 * 1024 * 1024
    dht_keys_per_s: float = 50.0
    """DHT keys per second that one peer may ask for or store (token bucket); refused and counted above it."""
    dht_burst: int = 1000
    dht_records: int = 4096
    """Records of other peers that this node keeps for the DHT; those that expire first leave first."""
    stream_timeout_s: float = 20.0
    """Deadline of one frame, and of one stream handler as a whole unless it was served with another: a peer
    that sends a byte per ten seconds ends here."""
    dht_timeout_s: float = 10.0
    connect_timeout_s: float = 10.0


class Stream(ABC):
    """A bidirectional stream of length-prefixed frames with one remote peer."""

    peer_id: PeerId

    @property
    def ready(self) -> bool:
        """Whether the next `send` is known not to wait."""
        return False

    @abstractmethod
    async def send(self, *frames: bytes) -> None:
        """Send these frames, in one write. Raises `LocalProtocolError` for one above MAX_FRAME_BYTES,
        `TransportError` when closed."""

    @abstractmethod
    async def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """Receive one frame. A declared length above `max_bytes` raises `LimitError` before any allocation;
        a stream that ends early raises `TransportError`."""

    @abstractmethod
    async def close(self) -> None:
        """Close both directions; never raises."""


StreamHandler = Callable[[Stream], Awaitable[None]]
RecordValidator = Callable[[str, bytes, int], None]
"""`(key, value, expires_at_ms)`: raises RemoteProtocolError to refuse a DHT record."""


class Transport(ABC):
    """A node's network. One event loop owns it; all methods are called from that loop."""

    peer_id: PeerId
    refusals: Refusals
    """What was refused so far, by peer and reason; the node's book about peers counts on in it."""

    @abstractmethod
    async def start(self) -> None:
        """Come up alone, without any peer. Raises `AddressError` (busy port) or `TransportError`."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything within 5 s, also with hostile peers attached. Idempotent."""

    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (with /p2p/<peer id>) under which others reach this node."""

    @abstractmethod
    async def connect(self, address: str) -> PeerId:
        """Connect to a peer and join its DHT. Raises `AddressError` (malformed, unreachable in time).
        From then on the transport keeps the connection: a lost one is dialled again with back-off."""

    @abstractmethod
    async def peers(self) -> tuple[ConnectedPeer, ...]:
        """Peers with a live connection."""

    @abstractmethod
    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data`. Best effort. Raises `LocalProtocolError` above MAX_ENVELOPE_BYTES."""

    @abstractmethod
    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[Gossiped]]:
        """Messages of a topic, own ones excluded, in no promised order. The queue behind it is bounded and
        drops the oldest; senders above their token bucket and messages above MAX_ENVELOPE_BYTES are dropped
        and counted. Survives a restart of the network stack."""

    @abstractmethod
    async def store(self, key: str, value: bytes, expires_at: int) -> None:
        """Put a record of at most MAX_DHT_RECORD_BYTES into the DHT until `expires_at` (ms). Stored again
        after a restart of the network stack. Raises `LocalProtocolError` when our own validator refuses
        it."""

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """The valid record under `key`, or None. Raises `DeadlineError`."""

    @abstractmethod
    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        """Open a stream to a handler at `peer_id`. Raises `TransportError` or `DeadlineError`."""

    @abstractmethod
    def serve(self, protocol: str, handler: StreamHandler, *, deadline_s: float | None = None) -> None:
        """Answer streams of `protocol`. Whatever the handler raises closes that stream only; a
        `RemoteProtocolError` is counted against the peer. The handler ends after `deadline_s` seconds, as
        does every one by default after `stream_timeout_s`, which each single frame must keep in any case."""

    def counters(self) -> dict[tuple[PeerId, str], int]:
        """Refusals so far by (peer, reason)."""
        return self.refusals.counters()

    @property
    @abstractmethod
    def restarts(self) -> int:
        """How often the network stack died and was rebuilt."""
