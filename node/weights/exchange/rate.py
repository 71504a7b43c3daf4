"""How fast bytes go and may go: caps from the configuration, and measured rates and round trips.

`RateLimit` says how long to wait before the next piece; `Flow` measures what one direction of one link does
and derives from it how many bytes may be on their way. Time is an argument in seconds. Not for who sends
what: `schedule.py`.
"""

from __future__ import annotations

import math
from collections import Counter

from node.transport.limits import OTHER_PEERS
from protocol.messages import PeerId

__all__ = ["Flow", "RateLimit", "tally"]

_WIRE_OVERHEAD = 1.04
"""Bytes on the wire per byte of a chunk: frames, encryption, TCP/IP headers with 1,460-byte segments."""
_BURST_S = 0.1
_COUNTED_PEERS = 1024
_RATE_OVER_S = 1.0
_PEAK_OVER_S = 10.0
_QUEUE_S = 0.2
"""How long bytes may lie in queues between two peers: enough to bridge the jitter of an answer, short enough
that a request behind them is not late."""


def tally(counter: Counter[PeerId], peer_id: PeerId, count: int) -> None:
    """Add to a peer's count; a stranger beyond 1,024 peers is counted among the others."""
    known = peer_id in counter or len(counter) < _COUNTED_PEERS
    counter[peer_id if known else OTHER_PEERS] += count


class RateLimit:
    """A token bucket of `mbit` million bits per second (0: none) that may go into debt, so that pieces of any
    size pass; saves up at most 0.1 s. Over a span it lets through at most its rate and that."""

    def __init__(self, mbit: float) -> None:
        self._bytes_per_s = mbit * 1e6 / 8 / _WIRE_OVERHEAD
        self._tokens = self._bytes_per_s * _BURST_S
        self._updated_s: float | None = None

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next piece may go; 0 now."""
        if not self._bytes_per_s:
            return 0.0
        self._refill(now_s)
        # Less than a byte of debt is a rounding error; a wait for it would never end on a virtual clock.
        return -self._tokens / self._bytes_per_s if self._tokens <= -1.0 else 0.0

    def take(self, count: int, now_s: float) -> None:
        """`count` bytes go now; negative ones come back, unused."""
        if self._bytes_per_s:
            self._refill(now_s)
            self._tokens = min(self._tokens - count, self._bytes_per_s * _BURST_S)

    def _refill(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._updated_s is None else max(0.0, now_s - self._updated_s)
        self._updated_s = now_s
        self._tokens = min(self._tokens + elapsed_s * self._bytes_per_s, self._bytes_per_s * _BURST_S)


class Flow:
    """Rate and shortest round trip of what was delivered."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._updated_s = now_s
        self._decayed = 0.0
        self._peak = 0.0
        self.round_trip_s = math.inf
        """Shortest time from asking for a chunk (or sending it) to its arrival (or its acknowledgement)."""

    def delivered(self, count: int, now_s: float, round_trip_s: float | None = None) -> None:
        """`count` bytes arrived."""
        self._peak *= math.exp(-max(now_s - self._updated_s, 0.0) / _PEAK_OVER_S)
        self._decayed = self._decayed_at(now_s) + count
        self._updated_s = max(self._updated_s, now_s)
        self._peak = max(self._peak, self.bytes_per_s(now_s))
        if round_trip_s is not None:
            self.round_trip_s = min(self.round_trip_s, max(round_trip_s, 0.0))

    def bytes_per_s(self, now_s: float) -> float:
        """Mean over about the last second, or since the start if that was later."""
        span_s = _RATE_OVER_S * -math.expm1(-max(now_s - self._started_s, 0.0) / _RATE_OVER_S)
        return self._decayed_at(now_s) / max(span_s, _RATE_OVER_S / 4)

    def window_bytes(self) -> float:
        """Bytes that keep the link busy: what it delivers at its best in a round trip and 0.2 s. Grows while
        more bytes make a higher rate, and settles with queues of 0.2 s in all. 0 before the first
        delivery."""
        if math.isinf(self.round_trip_s):
            return 0.0
        return self._peak * (self.round_trip_s + _QUEUE_S)

    def _decayed_at(self, now_s: float) -> float:
        return self._decayed * math.exp(-max(now_s - self._updated_s, 0.0) / _RATE_OVER_S)
