"""Time as an argument: the system's, or a virtual one that jumps when every task waits.

Nothing in `node/` but the hivemind adapter, which must agree with hivemind's own, reads the machine's time of
day; the rest asks the `Clock` it was given. A virtual clock comes with its own event loop (`run_virtual`), on
which `asyncio.sleep`, timeouts and `loop.time()` take no real time: whenever no callback is ready, time moves
to the next timer. With no threads and no sockets such a run is deterministic. Not for measuring how long work
takes: use `time.perf_counter` for that.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

__all__ = ["VIRTUAL_EPOCH_MS", "Clock", "StepWatch", "SystemClock", "VirtualClock", "duration", "run_virtual"]

VIRTUAL_EPOCH_MS = 1_800_000_000_000
"""Where virtual time begins."""

STEP_MS = 2000
"""A clock that is steered goes apart from monotonic time by much less between two looks."""

T = TypeVar("T")


class Clock(Protocol):
    """Swarm time."""

    def now_ms(self) -> int:
        """Integer milliseconds since 1970."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never run backwards; only differences mean something."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time of the running virtual event loop, counted from a fixed epoch."""

    def __init__(self, epoch_ms: int = VIRTUAL_EPOCH_MS) -> None:
        self._epoch_ms = epoch_ms

    def now_ms(self) -> int:
        return self._epoch_ms + round(self.monotonic_s() * 1000)

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for `timeout`, moves the loop's clock forward by it."""

    offset_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: the simulation is deadlocked")
        self.offset_s += max(timeout, 0.0)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.offset_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual event loop. Raises RuntimeError when all tasks wait without a timer."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class StepWatch:
    """Notices that a clock was set: by how much it and monotonic time have gone apart since the last look."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms: float | None = None

    def look(self) -> str:
        """What to tell, "" for nothing."""
        offset_ms = self._clock.now_ms() - 1000 * self._clock.monotonic_s()
        before_ms, self._offset_ms = self._offset_ms, offset_ms
        step_ms = 0.0 if before_ms is None else offset_ms - before_ms
        if abs(step_ms) < STEP_MS:
            return ""
        told = duration(abs(step_ms) / 1000)
        if step_ms > 0:
            return f"this machine's clock went ahead by {told}: it was set, or the machine slept"
        return f"this machine's clock was set back by {told}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h` or `2 days`: for sentences."""
    for unit, size_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"
