"""Who is asked for which chunk, and which chunks a source shows to whom: pure choices, without time or I/O.

`Plan` is a receiver's picture of one blob: what is missing, who has it, who was asked. It picks the rarest
chunk that a peer has, and near the end lets a second peer be asked. `Reveal` is what the owner of a new blob
shows to its receivers: different chunks to different receivers, until each was sent once. Peers are any
hashable keys. Not for windows, deadlines and frames: `session.py`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterable

import numpy as np

__all__ = ["Plan", "Reveal"]

_MAX_SOURCES = 2
"""Peers asked for one chunk at a time near the end."""
_MAX_UNSPREAD = 4
"""Chunks that one receiver got from the source and has not passed on: one with a slow uplink gets no more."""


class Plan:
    """What a receiver lacks of `count` chunks and from whom it may come. `rng` decides between chunks that
    are equally rare."""

    def __init__(self, count: int, missing: Iterable[int], rng: random.Random) -> None:
        self._count = count
        order = list(range(count))
        rng.shuffle(order)
        self._score = np.array(order, np.float64) / count
        """Peers that have a chunk, plus a fraction of its own that breaks ties."""
        self._open = np.zeros(count, np.bool_)
        """Missing and not asked for."""
        self._open[list(missing)] = True
        self.missing = int(self._open.sum())
        """Chunks that are not here."""
        self._has: dict[Hashable, np.ndarray] = {}
        self._asked: dict[int, list[Hashable]] = {}

    def join(self, peer: Hashable) -> None:
        """A peer that may have chunks."""
        self._has[peer] = np.zeros(self._count, np.bool_)

    def leave(self, peer: Hashable) -> None:
        """It is gone; what it was asked for is open again."""
        self._score -= self._has.pop(peer)
        for index in [index for index, peers in self._asked.items() if peer in peers]:
            self.release(peer, index)

    def has(self, peer: Hashable, indices: Iterable[int]) -> bool:
        """The peer has these chunks; False if it had one of them already."""
        held, new = self._has[peer], True
        for index in indices:
            new = new and not held[index]
            self._score[index] += not held[index]
            held[index] = True
        return new

    def choose(self, peer: Hashable) -> int | None:
        """The rarest chunk that the peer has and nobody was asked for; notes that this peer is asked."""
        useful = np.flatnonzero(self._has[peer] & self._open)
        if not len(useful):
            return None
        index = int(useful[np.argmin(self._score[useful])])
        self._open[index] = False
        self._asked[index] = [peer]
        return index

    def choose_late(self, peer: Hashable, late: Iterable[int] = ()) -> int | None:
        """A chunk that another peer was asked for: any when all that is missing was asked for, before that
        one of `late`. The one asked for longest, with few sources, first."""
        held = self._has[peer]
        among = self._asked if len(self._asked) == self.missing else late
        best: int | None = None
        fewest = _MAX_SOURCES
        for index in among:
            peers = self._asked.get(index)
            if peers is not None and held[index] and len(peers) < fewest and peer not in peers:
                best, fewest = index, len(peers)
        if best is not None:
            self._asked[best].append(peer)
        return best

    def release(self, peer: Hashable, index: int) -> None:
        """The peer is not waited for any more."""
        peers = self._asked.get(index)
        if peers is None or peer not in peers:
            return
        peers.remove(peer)
        if not peers:
            del self._asked[index]
            self._open[index] = True

    def arrived(self, index: int) -> None:
        """The chunk is here."""
        if self._asked.pop(index, None) is not None or self._open[index]:
            self._open[index] = False
            self.missing -= 1


class Reveal:
    """A source's chunks, shown to one receiver each until all were sent. Receivers that join with chunks, or
    get them from each other, tell so."""

    def __init__(self, count: int, rng: random.Random) -> None:
        order = list(range(count))
        rng.shuffle(order)
        self._hidden: deque[int] = deque(order)
        self._unsent = set(order)
        self._shown: dict[Hashable, dict[int, float]] = {}
        """Per receiver: chunks shown only to it and not sent, with the time of showing."""
        self._unspread: dict[Hashable, set[int]] = {}
        """Per receiver: chunks sent to it of which no other is known to have a copy."""
        self._sent_to: dict[int, Hashable] = {}
        self._lazy: set[Hashable] = set()

    @property
    def done(self) -> bool:
        """Whether every chunk was sent once or is with a receiver."""
        return not self._unsent

    def join(self, receiver: Hashable) -> None:
        self._shown[receiver] = {}
        self._unspread[receiver] = set()

    def leave(self, receiver: Hashable) -> None:
        """It is gone; what was shown to it is for others, first."""
        self._hidden.extendleft(self._shown.pop(receiver))
        del self._unspread[receiver]
        self._lazy.discard(receiver)

    def got(self, receiver: Hashable, index: int) -> None:
        """A receiver says that it has a chunk, from wherever."""
        self._shown[receiver].pop(index, None)
        sent_to = self._sent_to.get(index)
        if sent_to is None:
            self._unsent.discard(index)
        elif sent_to != receiver and sent_to in self._unspread:
            self._unspread[sent_to].discard(index)

    def sent(self, receiver: Hashable, index: int) -> None:
        """A chunk went out to a receiver."""
        self._shown[receiver].pop(index, None)
        self._lazy.discard(receiver)
        self._unsent.discard(index)
        if index not in self._sent_to:
            self._sent_to[index] = receiver
            if len(self._shown) > 1:
                self._unspread[receiver].add(index)

    def show(self, receiver: Hashable, now_s: float, ahead: int, *, idle: bool) -> list[int]:
        """Chunks to show to this receiver now, so that `ahead` are shown and not sent, and not many more are
        waiting to be passed on. `idle`: nobody has asked for anything, so that a receiver which passes on
        slowly is better than none."""
        if receiver in self._lazy and len(self._lazy) < len(self._shown):
            return []
        shown = self._shown[receiver]
        ahead -= len(shown)
        if not idle:
            ahead = min(ahead, ahead + _MAX_UNSPREAD - len(self._unspread[receiver]))
        new = []
        while ahead > 0 and self._hidden:
            index = self._hidden.popleft()
            if index in self._unsent:
                shown[index] = now_s
                new.append(index)
                ahead -= 1
        return new

    def linger(self, before_s: float, asked: Iterable[tuple[Hashable, int]]) -> None:
        """What was shown before `before_s` and is not among `asked` may be shown to others too; whoever let
        it lie is shown nothing until it takes something, as long as there are others."""
        waiting = set(asked)
        for receiver, shown in self._shown.items():
            for index in [index for index, at_s in shown.items() if at_s < before_s]:
                if (receiver, index) not in waiting:
                    del shown[index]
                    self._hidden.append(index)
                    self._lazy.add(receiver)

    def lost(self, receiver: Hashable, indices: Iterable[int]) -> None:
        """A receiver fell silent, and what went out to it may not have arrived: what nobody else is known to
        have is for others, first."""
        self._lazy.add(receiver)
        for index in indices:
            if index in self._unspread[receiver]:
                self._unspread[receiver].discard(index)
                del self._sent_to[index]
                self._unsent.add(index)
                self._hidden.appendleft(index)

    def load(self, receiver: Hashable) -> int:
        """Chunks at this receiver that it has not passed on."""
        return len(self._unspread[receiver]) + len(self._shown[receiver])
