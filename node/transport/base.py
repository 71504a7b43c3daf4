"""The seam between the node and any network: what every transport offers, and nothing more.

Participants: this node (one `Transport`), its connected peers, and strangers. Goals: a node can start alone;
every call has a deadline; every byte from a peer is bounded before it is decoded; a dead network is an error,
never a hang. Non-goals: gossip (that is streams, `node/share/gossip.py`), large values in the DHT (bodies go
over streams), and trust (nothing here reads a payload, except DHT record validators).

Implementations: `hivemind.py` (the real one), `memory.py` (seeded, for simulation and speed). One contract
suite, `tests/node/transport/test_contract.py`, runs over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from node.transport.limits import Refusals, TransportLimits
from node.transport.streams import Stream, StreamHandler
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.messages import PeerId

__all__ = [
    "ConnectedPeer",
    "RecordValidator",
    "Stream",
    "StreamHandler",
    "Transport",
    "TransportLimits",
    "require_storable",
]


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """A peer with a live connection."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()


RecordValidator = Callable[[str, bytes, int], None]
"""`(key, value, expires_at_ms)`: raises RemoteProtocolError to refuse a DHT record."""


class Transport(ABC):
    """A node's network. One event loop owns it; all methods are called from that loop."""

    peer_id: PeerId
    refusals: Refusals
    """What was refused so far, by peer and reason; the node's book about peers counts on in it."""
    restarts: int
    """How often the network stack died and was rebuilt."""
    dials_unguarded: str = ""
    """Why this machine cannot hold the network stack to what `may_dial` allows; "" where it can."""

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
    def may_dial(self, address: str) -> bool:
        """Whether an address that a stranger gave is one that `connect` should be asked for."""

    @abstractmethod
    async def connect(self, address: str) -> PeerId:
        """Connect to a peer and join its DHT. Raises `AddressError` (malformed, unreachable in time).
        From then on the transport keeps the connection: a lost one is dialled again with back-off."""

    @abstractmethod
    async def peers(self) -> tuple[ConnectedPeer, ...]:
        """Peers with a live connection."""

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


def require_storable(validate: RecordValidator | None, key: str, value: bytes, expires_at: int) -> None:
    """Raise `LocalProtocolError` for a record that other nodes would refuse."""
    if len(value) > MAX_DHT_RECORD_BYTES:
        raise LocalProtocolError(
            f"the DHT record {key} has {len(value)} bytes, the cap is {MAX_DHT_RECORD_BYTES}; "
            "large values go over streams"
        )
    if validate is None:
        return
    try:
        validate(key, value, expires_at)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"other nodes would refuse our DHT record {key}: {error}") from error
