"""Links of the network, and whether the application at the other end answers.

    transport's links --standing----------------------+
    handshakes, both ways --answered, parted, unanswered--> Links --> due, connected, frozen, since when

The network's daemon keeps a link alive while its application is stopped, so a link alone says nothing: a peer
is *connected* when its application answered within `ANSWER_S`, and *frozen* when its link has stood for so
long and it was asked in vain. Whoever said nothing for `ASK_AFTER_S` is asked again, ever more rarely while
it stays silent. Nothing waits here. Not for what is said (`greeting.py`, `presence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from node.clock import Clock
from node.peers.backoff import Backoff
from protocol.messages import PeerId

__all__ = ["ANSWER_S", "Links"]

ASK_AFTER_S = 12.0
"""An application that was silent for so long is asked again: two tries at least before `ANSWER_S`."""
ANSWER_S = 30.0
"""How long an answer stands for."""
PARTED_AGAIN_S = 300.0
"""Whoever has no place in this swarm is asked again so late."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
MAX_SILENT = 1024
"""Silent peers whose back-off is remembered."""


@dataclass(slots=True)
class _Link:
    """One link; seconds are monotonic."""

    since_s: float
    heard_s: float = -math.inf
    """When its application answered last."""
    heard_at: int = 0
    """The same in swarm time, ms."""
    ask_s: float = -math.inf
    """When to ask it again."""
    member: bool = False
    in_vain: bool = False
    """It was asked since, and did not answer."""


class Links:
    """Who has a link, and when each application answered. Bounded by the links that stand."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[PeerId, _Link] = {}
        self._silent = Backoff[PeerId](FIRST_BACKOFF_S, MAX_BACKOFF_S, max_keys=MAX_SILENT)

    def standing(self, peers: Iterable[PeerId]) -> None:
        """These links stand now, and no others."""
        now_s = self._clock.monotonic_s()
        self._links = {peer: self._links.get(peer) or _Link(now_s) for peer in peers}

    def answered(self, peer: PeerId) -> None:
        """Its application said something that only it can say, and belongs to this swarm."""
        self._heard(peer, ASK_AFTER_S, member=True)

    def parted(self, peer: PeerId) -> None:
        """Its application answered, and one of the two has no place in the other's swarm."""
        self._heard(peer, PARTED_AGAIN_S, member=False)

    def unanswered(self, peer: PeerId) -> None:
        """It was asked, and did not answer in time, or not as a node of ours does."""
        self._silent.failed(peer, self._clock.monotonic_s())
        if (link := self._links.get(peer)) is not None:
            link.in_vain = True

    def due(self) -> list[PeerId]:
        """Whom to ask now, sorted: silent for long enough, and not asked in vain a moment ago."""
        now_s = self._clock.monotonic_s()
        return sorted(
            peer
            for peer, link in self._links.items()
            if now_s >= link.ask_s and not self._silent.ready_in_s(peer, now_s)
        )

    @property
    def peers(self) -> frozenset[PeerId]:
        """Whoever has a link."""
        return frozenset(self._links)

    @property
    def connected(self) -> frozenset[PeerId]:
        """Members whose application answered within `ANSWER_S`."""
        since_s = self._clock.monotonic_s() - ANSWER_S
        return frozenset(
            peer for peer, link in self._links.items() if link.member and link.heard_s >= since_s
        )

    @property
    def frozen(self) -> frozenset[PeerId]:
        """Whose link has stood for longer than `ANSWER_S` while it was asked in vain."""
        since_s = self._clock.monotonic_s() - ANSWER_S
        return frozenset(
            peer
            for peer, link in self._links.items()
            if link.in_vain and max(link.heard_s, link.since_s) < since_s
        )

    def answered_at(self, peer: PeerId) -> int:
        """Swarm time of the last answer over this link, ms; 0 before the first."""
        link = self._links.get(peer)
        return link.heard_at if link is not None else 0

    def _heard(self, peer: PeerId, again_s: float, *, member: bool) -> None:
        now_s = self._clock.monotonic_s()
        before = self._links.get(peer)  # None for a link that nobody saw yet
        self._links[peer] = _Link(
            before.since_s if before is not None else now_s,
            heard_s=now_s,
            heard_at=self._clock.now_ms(),
            ask_s=now_s + again_s,
            member=member,
        )
        self._silent.succeeded(peer)
