"""The replay pool: peers' accepted groups, waiting to be trained on.

Bounded in groups, in uses and in age. Draws choose the peer first and the group second, so that a peer which
sends a hundred groups gets no more weight than one which sends five. Holds only what verification accepted.
Nothing here knows about tensors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import chain, islice, zip_longest

from node.share.accepted import Accepted
from protocol.messages import Digest, PeerId

__all__ = ["ReplayPool"]


class ReplayPool:
    """At most `capacity` groups; each drawn at most `max_uses` times; when full, the oldest arrival goes."""

    def __init__(self, capacity: int, max_uses: int, rng: random.Random) -> None:
        self.capacity = capacity
        self._max_uses = max_uses
        self._rng = rng
        self._groups: dict[Digest, Accepted] = {}
        self._uses: dict[Digest, int] = {}
        self.arrived = asyncio.Event()
        """Set by every group that comes in; whoever waits for the next one clears it."""
        self.after_draw: Callable[[], None] = lambda: None
        """Called when groups have left, so that there may be room for others."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._groups

    def unused(self, author: PeerId | None = None) -> int:
        """Groups never drawn so far, of one author or of all."""
        return sum(
            1
            for digest, pooled in self._groups.items()
            if self._uses[digest] == 0 and (author is None or pooled.group.author == author)
        )

    def add(self, pooled: Accepted) -> None:
        """Take a group in, unless it is there; the oldest one leaves when the pool is full."""
        if pooled.digest in self._groups:
            return
        self._groups[pooled.digest] = pooled
        self._uses[pooled.digest] = 0
        while len(self._groups) > self.capacity:
            self._drop(next(iter(self._groups)))
        self.arrived.set()

    def discard(self, unfit: Callable[[Accepted], bool]) -> list[Accepted]:
        """Remove and return the groups for which `unfit` holds (too old, author in quarantine)."""
        gone = [pooled for pooled in self._groups.values() if unfit(pooled)]
        for pooled in gone:
            self._drop(pooled.digest)
        return gone

    def draw(self, count: int) -> list[tuple[Accepted, int]]:
        """Up to `count` different groups, each with the number of its earlier draws: a random peer, then its
        least used and newest group, peers in turn."""
        by_peer: dict[PeerId, list[Accepted]] = {}
        for pooled in self._groups.values():
            by_peer.setdefault(pooled.group.author, []).append(pooled)
        for groups in by_peer.values():
            groups.sort(key=lambda pooled: (self._uses[pooled.digest], -pooled.arrived_at, pooled.digest))
        peers = sorted(by_peer)
        self._rng.shuffle(peers)
        rounds = zip_longest(*(by_peer[peer] for peer in peers))
        drawn = list(islice(filter(None, chain.from_iterable(rounds)), count))
        used = [(pooled, self._uses[pooled.digest]) for pooled in drawn]
        for pooled in drawn:
            self._uses[pooled.digest] += 1
            if self._uses[pooled.digest] >= self._max_uses:
                self._drop(pooled.digest)
        self.after_draw()
        return used

    def _drop(self, digest: Digest) -> None:
        del self._groups[digest]
        del self._uses[digest]
