"""Bounds on what strangers can make us do: token buckets and counters that cannot grow.

For every transport, for gossip and for the book about peers. Each structure is keyed by values that a peer
can invent for free, so each is bounded itself: buckets of newcomers cost a token of a shared bucket, counters
fold the least recent entries into one line. Time is an argument. Not for limits of the protocol (sizes on the
wire): those are in `protocol/constants.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from cachetools import LRUCache

from protocol.messages import PeerId

__all__ = [
    "OTHER_PEERS",
    "FirstTimes",
    "KeyedTokenBuckets",
    "Refusals",
    "TokenBucket",
    "TransportLimits",
]

OTHER_PEERS: PeerId = "others"
"""Stands for all peers whose counters were folded together."""


class TokenBucket:
    """`rate_per_s` tokens per second, at most `burst` saved up; full at first."""

    __slots__ = ("_burst", "_rate_per_s", "_tokens", "_updated_s")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = float(burst)
        self._updated_s = 0.0

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Whether `amount` tokens were there; takes them if so, and nothing otherwise."""
        elapsed_s = max(0.0, now_s - self._updated_s)
        self._updated_s = now_s
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True


class KeyedTokenBuckets:
    """One token bucket per key, for at most `capacity` keys.

    A key seen for the first time takes a token of the newcomers' bucket as well. So a flood of invented keys
    drains that one only: keys already known keep their full rate, and cannot be pushed out faster than
    newcomers are let in. The least recently used key is forgotten first.
    """

    def __init__(
        self,
        rate_per_s: float,
        burst: float,
        *,
        newcomers_per_s: float = 50.0,
        newcomer_burst: float = 1000.0,
        capacity: int = 4096,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._newcomers = TokenBucket(newcomers_per_s, newcomer_burst)
        self._buckets: LRUCache[Hashable, TokenBucket] = LRUCache(capacity)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable, now_s: float, amount: float = 1.0) -> bool:
        """Whether `key` may spend `amount` tokens now."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if not self._newcomers.take(now_s):
                return False
            bucket = self._buckets[key] = TokenBucket(self._rate_per_s, self._burst)
        return bucket.take(now_s, amount)


class Refusals:
    """Counts by (peer, reason), for at most `capacity` pairs; the least recent ones fold into `OTHER_PEERS`,
    so the total stays right while invented senders come and go."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[tuple[PeerId, str], int] = OrderedDict()

    def add(self, peer_id: PeerId, reason: str, count: int = 1) -> None:
        """Count one refusal. `reason` is one of our own short words, never a peer's bytes."""
        key = (peer_id, reason)
        self._counts[key] = self._counts.get(key, 0) + count
        self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            (_, folded_reason), folded = self._counts.popitem(last=False)
            others = (OTHER_PEERS, folded_reason)
            self._counts[others] = self._counts.get(others, 0) + folded
            self._counts.move_to_end(others)

    def counters(self) -> dict[tuple[PeerId, str], int]:
        """A copy of the counts."""
        return dict(self._counts)


class FirstTimes:
    """Which things happened before, for what is told once; after `most` of them nothing is new any more."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._seen: set[Hashable] = set()

    def is_new(self, what: Hashable) -> bool:
        """Whether this did not happen before."""
        if what in self._seen or len(self._seen) >= self._most:
            return False
        self._seen.add(what)
        return True


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Caps that hold per remote peer, before any decoding."""

    streams_per_peer: int = 8
    """Streams one peer may have open towards us at a time; a further one is closed at once."""
    streams: int = 256
    """The same over all peers, so that invented identities cannot exhaust file descriptors."""
    stream_opens_per_s: float = 50.0
    stream_burst: int = 100
    newcomers_per_s: float = 50.0
    """Peers never seen before that are let in per second: identities are free, attention is not."""
    newcomer_burst: int = 1000
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

    def buckets(self, rate_per_s: float, burst: float) -> KeyedTokenBuckets:
        """A token bucket per peer."""
        return KeyedTokenBuckets(
            rate_per_s, burst, newcomers_per_s=self.newcomers_per_s, newcomer_burst=self.newcomer_burst
        )
