"""What tests give to services: a runtime whose time and costs they choose, and a book about peers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from node.clock import VIRTUAL_EPOCH_MS, Clock, VirtualClock
from node.compute import InlineCompute, Lane
from node.events import Event, EventBus, Notice
from node.membership import Membership
from node.peers.book import PeerBook
from node.peers.links import Links
from node.peers.trust import TrustSettings
from node.runtime import Runtime
from node.transport.limits import Refusals
from protocol.identity import Identity
from protocol.messages import Charter, PeerId

__all__ = ["ManualClock", "make_links", "make_peers", "make_runtime", "notices_of"]


class ManualClock:
    """Time that only a test moves; needs no event loop."""

    def __init__(self, now_ms: int = VIRTUAL_EPOCH_MS) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000


def make_runtime(
    clock: Clock | None = None,
    costs_s: Mapping[Lane, float] | None = None,
    events: list[Event] | None = None,
    seed: int = 0,
) -> Runtime:
    """`costs_s`: virtual seconds that a piece of work of a lane takes. What is emitted goes to `events`."""
    bus = EventBus()
    if events is not None:
        bus.subscribe(events.append)
    return Runtime(clock or VirtualClock(), InlineCompute(costs_s or {}), bus, random.Random(seed))


def notices_of(events: list[Event]) -> list[str]:
    """What the operator was told, in order."""
    return [event.text for event in events if isinstance(event, Notice)]


def make_links(clock: Clock, *connected: PeerId) -> Links:
    """Links of which each has answered just now."""
    links = Links(clock)
    for peer in connected:
        links.answered(peer)
    return links


def make_peers(
    runtime: Runtime,
    identity: Identity,
    charter: Charter,
    *,
    refusals: Refusals | None = None,
    **settings: Any,
) -> tuple[Membership, PeerBook]:
    """A member of the swarm of `charter` and its book about the others; `settings` are those of trust."""
    membership = Membership(identity, charter, runtime.clock)
    return membership, PeerBook(runtime, membership, TrustSettings(**settings), refusals=refusals)
