"""The replay pool: peers' accepted groups, waiting to be trained on.

Bounded in groups, in uses and in age. Draws choose the peer first and the group second, so that a peer which
sends a hundred groups gets no more weight than one which sends five. Holds only what verification accepted;
rewards in it are the ones that this node computed (with verification off: the claimed ones). Nothing here
knows about tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from protocol.messages import Digest, PeerId, RolloutGroup

__all__ = ["PooledGroup", "ReplayPool"]


@dataclass(frozen=True, slots=True)
class PooledGroup:
    """One accepted group. `rewards` has one entry per rollout, in order."""

    digest: Digest
    group: RolloutGroup
    rewards: tuple[float, ...]
    arrived_at: int
    """Swarm time of arrival, ms."""
    uses: int = 0
    """How often it was drawn before this draw."""


class ReplayPool:
    """At most `capacity` groups; each drawn at most `max_uses` times; when full, the oldest arrival goes."""

    def __init__(self, capacity: int, max_uses: int, rng: random.Random) -> None:
        self.capacity = capacity
        self._max_uses = max_uses
        self._rng = rng
        self._groups: dict[Digest, PooledGroup] = {}
        self._uses: dict[Digest, int] = {}

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

    def add(self, pooled: PooledGroup) -> None:
        """Take a group in, unless it is there; the oldest one leaves when the pool is full."""
        if pooled.digest in self._groups:
            return
        self._groups[pooled.digest] = pooled
        self._uses[pooled.digest] = 0
        while len(self._groups) > self.capacity:
            self._drop(next(iter(self._groups)))

    def discard(self, unfit: Callable[[PooledGroup], bool]) -> list[PooledGroup]:
        """Remove and return the groups for which `unfit` holds (too old, author in quarantine)."""
        gone = [pooled for pooled in self._groups.values() if unfit(pooled)]
        for pooled in gone:
            self._drop(pooled.digest)
        return gone

    def draw(self, count: int) -> list[PooledGroup]:
        """Up to `count` different groups: a random peer, then its least used and newest group, peers in
        turn."""
        by_peer: dict[PeerId, list[PooledGroup]] = {}
        for pooled in self._groups.values():
            by_peer.setdefault(pooled.group.author, []).append(pooled)
        for groups in by_peer.values():
            groups.sort(key=lambda pooled: (self._uses[pooled.digest], -pooled.arrived_at, pooled.digest))
        drawn: list[PooledGroup] = []
        peers = sorted(by_peer)
        self._rng.shuffle(peers)
        while peers and len(drawn) < count:
            for peer in list(peers):
                if len(drawn) == count:
                    break
                drawn.append(by_peer[peer].pop(0))
                if not by_peer[peer]:
                    peers.remove(peer)
        used = [replace(pooled, uses=self._uses[pooled.digest]) for pooled in drawn]
        for pooled in drawn:
            self._uses[pooled.digest] += 1
            if self._uses[pooled.digest] >= self._max_uses:
                self._drop(pooled.digest)
        return used

    def _drop(self, digest: Digest) -> None:
        del self._groups[digest]
        del self._uses[digest]
