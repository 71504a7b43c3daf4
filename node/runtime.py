"""What every part of a node is given: time, threads, the event stream, random numbers, and a voice.

    Runtime(clock, compute, bus, rng) --> every service, as its first argument

One small object in place of four arguments. It decides nothing and holds no state of its own: real nodes get
the system's clock and threads, simulations a virtual clock and inline work (`run_virtual`), tests whichever
they need. Not for what a node knows of its swarm (`node/membership.py`) nor for settings (`node/config.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import Event, EventBus, Notice, NoticeLevel

__all__ = ["Runtime"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, compute lanes, event bus and random numbers of one node."""

    clock: Clock
    compute: Compute
    bus: EventBus
    rng: random.Random
    """For choices on the event loop; seeded, so that simulations repeat."""

    def now_ms(self) -> int:
        """Swarm time: integer milliseconds since 1970."""
        return self.clock.now_ms()

    def monotonic_s(self) -> float:
        """Seconds that never run backwards; only differences mean something."""
        return self.clock.monotonic_s()

    async def run(self, lane: Lane, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Result of the blocking `function(*args, **kwargs)`, run beside the event loop. Work of one lane
        never overlaps."""
        return await self.compute.run(lane, function, *args, **kwargs)

    def emit(self, event: Event) -> None:
        """Hand `event` to everybody who shows or keeps events."""
        self.bus.emit(event)

    def notice(self, level: NoticeLevel, text: str) -> None:
        """Tell the operator one sentence, with what to do about it where there is something to do."""
        self.bus.emit(Notice(at=self.clock.now_ms(), level=level, text=text))
