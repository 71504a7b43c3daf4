"""The DHT records that a node of the in-memory network keeps for others: validated, rate-limited, bounded."""

from __future__ import annotations

import asyncio

from node.transport.base import RecordValidator, TransportLimits
from node.transport.limits import KeyedTokenBuckets, Refusals
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.errors import RemoteProtocolError
from protocol.messages import PeerId

__all__ = ["DhtRecords"]


class DhtRecords:
    """Value and expiry (ms) by key."""

    def __init__(self, validate: RecordValidator | None, limits: TransportLimits, refusals: Refusals) -> None:
        self._validate = validate
        self._capacity = limits.dht_records
        self._refusals = refusals
        self._records: dict[str, tuple[bytes, int]] = {}
        self._buckets = KeyedTokenBuckets(
            limits.dht_keys_per_s,
            limits.dht_burst,
            newcomers_per_s=limits.newcomers_per_s,
            newcomer_burst=limits.newcomer_burst,
        )

    def __len__(self) -> int:
        return len(self._records)

    def put_own(self, key: str, value: bytes, expires_at: int) -> None:
        self._records[key] = (value, expires_at)

    def get_own(self, key: str) -> tuple[bytes, int] | None:
        return self._records.get(key)

    def asked(self, peer_id: PeerId, key: str) -> tuple[bytes, int] | None:
        """What a peer's request finds here."""
        return self._records.get(key) if self._within_rate(peer_id) else None

    def offered(self, peer_id: PeerId, key: str, value: bytes, expires_at: int) -> None:
        """A peer asks this node to keep a record. The later expiry wins; the first to expire makes room."""
        if not self._within_rate(peer_id):
            return
        known = self._records.get(key)
        if (known is not None and known[1] >= expires_at) or not self.is_valid(
            peer_id, key, value, expires_at
        ):
            return
        self._records[key] = (value, expires_at)
        if len(self._records) > self._capacity:
            del self._records[min(self._records, key=lambda each: self._records[each][1])]

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

    def clear(self) -> None:
        self._records.clear()

    def _within_rate(self, peer_id: PeerId) -> bool:
        if self._buckets.take(peer_id, asyncio.get_running_loop().time()):
            return True
        self._refusals.add(peer_id, "dht_rate")
        return False
