"""What tests give to services: a runtime whose time and costs they choose, and a book about peers."""

from __future__ import annotations

import random
from collections.abc import Mapping

from node.clock import VIRTUAL_EPOCH_MS, Clock, VirtualClock
from node.compute import InlineCompute, Lane
from node.events import Event, EventBus, Notice
from node.runtime import Runtime

__all__ = ["ManualClock", "make_runtime", "notices_of"]


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
