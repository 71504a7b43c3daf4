"""The DHT records that a node of the in-memory network keeps for others: validated, rate-limited, bounded."""

from __future__ import annotations

import asyncio

from node.transport.base import RecordValidator, TransportLimits
from node.transport.limits import Refusals
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.errors import RemoteProtocolError
from protocol.messages import PeerId

__all__ = ["DhtRecords"]


class DhtRecords:
    """What is `kept`, own records among it, and what peers may do with it."""

    def __init__(self, validate: RecordValidator | None, limits: TransportLimits, refusals: Refusals) -> None:
        self._validate = validate
        self._capacity = limits.dht_records
        self._refusals = refusals
        self.kept: dict[str, tuple[bytes, int]] = {}
        """Value and expiry (ms) by key."""
        self._buckets = limits.buckets(limits.dht_keys_per_s, limits.dht_burst)

    def asked(self, peer_id: PeerId, key: str) -> tuple[bytes, int] | None:
        """What a peer's request finds here."""
        return self.kept.get(key) if self._within_rate(peer_id) else None

    def offered(self, peer_id: PeerId, key: str, value: bytes, expires_at: int) -> None:
        """A peer asks this node to keep a record. The later expiry wins; the first to expire makes room."""
        if not self._within_rate(peer_id):
            return
        known = self.kept.get(key)
        if (known is not None and known[1] >= expires_at) or not self.is_valid(
            peer_id, key, value, expires_at
        ):
            return
        self.kept[key] = (value, expires_at)
        if len(self.kept) > self._capacity:
            del self.kept[min(self.kept, key=lambda each: self.kept[each][1])]

    def is_valid(self, peer_id: PeerId, key: str, value: bytes, expires_at: int) -> bool:
        """Whether a record that came from a peer may be kept or returned; counts it otherwise."""
        if len(value) > MAX_DHT_RECORD_BYTES:
            self._refusals.add(peer_id, "oversize")
            return False
        if self._validate is not None:
            try:
                self._validate(key, value, expires_at)
            except RemoteProtocolError as error:
                self._refusals.add(peer_id, error.reason)
                return False
        return True

    def _within_rate(self, peer_id: PeerId) -> bool:
        if self._buckets.take(peer_id, asyncio.get_running_loop().time()):
            return True
        self._refusals.add(peer_id, "dht_rate")
        return False
