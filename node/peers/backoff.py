"""When to try again what failed: one back-off by key.

    failed(key) -> seconds to wait;  succeeded(key) forgets;  ready_in_s(key) is 0 when it may be tried

The wait grows by `growth` with each failure in a row, up to `max_s`. Time is an argument, nothing sleeps
here. Keys may be a peer's invention, so at most `max_keys` are remembered: the one that failed longest ago is
forgotten first. Not for rates (`node/transport/limits.py`).
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Generic, TypeVar

from cachetools import FIFOCache

__all__ = ["Backoff"]

Key = TypeVar("Key", bound=Hashable)


class Backoff(Generic[Key]):
    """Waits `first_s` seconds after the first failure of a key, at most `max_s` after the later ones. With
    `jitter_rng` each wait is multiplied by a random factor of 0.5 to 1.5."""

    def __init__(
        self,
        first_s: float,
        max_s: float,
        *,
        max_keys: int,
        growth: float = 2.0,
        jitter_rng: random.Random | None = None,
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._growth = growth
        self._jitter_rng = jitter_rng
        self._failed: FIFOCache[Key, tuple[float, float]] = FIFOCache(max_keys)
        """By key: the wait without jitter, and when it is over."""

    def failed(self, key: Key, now_s: float) -> float:
        """Count one more failure in a row; how long to wait now, in seconds."""
        before = self._failed.get(key)
        wait_s = self._first_s if before is None else min(before[0] * self._growth, self._max_s)
        jittered_s = wait_s if self._jitter_rng is None else wait_s * self._jitter_rng.uniform(0.5, 1.5)
        self._failed[key] = (wait_s, now_s + jittered_s)
        return jittered_s

    def succeeded(self, key: Key) -> None:
        """The next failure of this key is its first again."""
        self._failed.pop(key, None)

    def ready_in_s(self, key: Key, now_s: float) -> float:
        """Seconds until this key may be tried, 0.0 when it may be now."""
        failed = self._failed.get(key)
        return max(0.0, failed[1] - now_s) if failed is not None else 0.0
