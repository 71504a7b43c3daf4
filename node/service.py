"""A service: one part of a node that lives as long as the node does, and what a node has to know of it.

    start, one after the other --> run, all at a time, until one raises or the node is stopped --> stop

A record of functions, so that the parts themselves need no common base class: whoever wires a node says which
of a part's methods are which. Not for what a part does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from node.events import Event, Health
from node.supervise import StageGauge, endless

__all__ = ["Service"]


async def _nothing() -> None:
    return None


def _as_it_is(health: Health) -> Health:
    return health


def _no_events() -> Sequence[Event]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Service:
    """One part of a node."""

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    """Its loop; an error in it ends the node."""
    finishes: bool = False
    """Whether the loop may return, its work done, while the others go on."""
    gauges: Sequence[StageGauge] = ()
    """Its rows in the strip of stages."""
    start: Callable[[], Awaitable[None]] = _nothing
    """Called before any loop runs."""
    stop: Callable[[], Awaitable[None]] = _nothing
    """Called when the loops have ended in order."""
    snapshot: Callable[[], Sequence[Event]] = _no_events
    """Events that tell how it does, about twice a second."""
    last: Callable[[], Sequence[Event]] = _no_events
    """Events that are to be remembered of a node that ends."""
    health: Callable[[Health], Health] = _as_it_is
    """Its contribution to the node's health."""

    async def whole_run(self) -> None:
        """`run`. Raises LoopEndedError when that returns and must not."""
        await (self.run() if self.finishes else endless(self.name, self.run()))
