"""What keeps a node honest about itself: named waits, the stage strip, event-loop lag, and one way to run
stages.

A stage works inside `StageGauge.working` and waits, by name, inside `StageGauge.waiting` or for its next
work, so `swarm status` can say what a stage waits for and since when. `run_stages` runs all loops; when one
ends with an error the others are cancelled and the error is raised: an error inside is our bug and must not
hide (peers' errors never get here, their boundary caught them). `run_endless` is for the loops inside one
stage: there a loop that merely returns is an error, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import psutil

from node.clock import Clock
from node.events import StageStatus
from protocol.errors import OurFault

__all__ = [
    "LoopEndedError",
    "LoopLag",
    "ProcessMeter",
    "StageGauge",
    "endless",
    "run_endless",
    "run_stages",
    "sole_cause",
]


class LoopEndedError(OurFault):
    """A loop that runs for as long as the node has returned."""


class StageGauge:
    """What one stage is doing: its queue's depth, and whether it works or what it waits for.

    A stage works while one of its loops is inside `working`. Else it waits: for what the wait that began
    last is named after, or for `idle`, its next work. The blocks are not nested. Names are shown in narrow
    columns: a few short words.
    """

    def __init__(
        self,
        stage: str,
        clock: Clock,
        idle: str,
        capacity: int = 0,
        depth: Callable[[], int] | None = None,
    ) -> None:
        self.stage = stage
        self._clock = clock
        self._idle = idle
        self._capacity = capacity
        self._depth = depth or (lambda: 0)
        self.busy = 0
        """Loops that are inside `working` now."""
        self.progress = 0
        """How often a piece of work began or ended, or a wait ended."""
        self.stalled_s = 0.0
        """How long it has stood still, while that is far longer than usual (`node/stalls.py`)."""
        self._waits: dict[object, tuple[str, float]] = {}
        self._idle_since_s: float | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark one loop of the stage as working for the time of the block."""
        self.busy += 1
        self.progress += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.progress += 1
            self._idle_since_s = self._clock.monotonic_s()

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Mark one loop of the stage as waiting for `name` for the time of the block."""
        wait = object()
        self._waits[wait] = (name, self._clock.monotonic_s())
        try:
            yield
        finally:
            del self._waits[wait]
            self.progress += 1
            self._idle_since_s = self._clock.monotonic_s()

    def status(self) -> StageStatus:
        """Snapshot for the stage strip."""
        waiting_for, waited_s = "", 0.0
        if not self.busy:
            now_s = self._clock.monotonic_s()
            if self._idle_since_s is None:
                self._idle_since_s = now_s  # not in __init__: virtual time needs its running loop
            waiting_for, since_s = next(reversed(self._waits.values()), (self._idle, self._idle_since_s))
            waited_s = now_s - since_s
        return StageStatus(
            stage=self.stage,
            queued=self._depth(),
            capacity=self._capacity,
            waiting_for=waiting_for,
            waiting_s=round(waited_s, 3),
            stalled_s=round(self.stalled_s, 3),
        )


class LoopLag:
    """How late the event loop runs its timers: the 99th percentile over the last samples, in seconds."""

    def __init__(self, period_s: float = 0.05, samples: int = 20_000) -> None:
        self._period_s = period_s
        self._lags_s: deque[float] = deque(maxlen=samples)

    async def run(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._period_s
            await asyncio.sleep(self._period_s)
            self._lags_s.append(max(0.0, loop.time() - due_s))

    def p99_s(self) -> float:
        """99th percentile so far, 0.0 without samples."""
        if not self._lags_s:
            return 0.0
        ordered = sorted(self._lags_s)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


class ProcessMeter:
    """Resident memory and open descriptors of this process. The reading before where the system gives none:
    for want of a descriptor nobody may end a node that could go on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._read = (0, 0)

    def __call__(self) -> tuple[int, int]:
        """Bytes, and how many descriptors."""
        with contextlib.suppress(OSError, psutil.Error):
            self._read = self._process.memory_info().rss, self._process.num_fds()
        return self._read


async def run_stages(stages: Mapping[str, Coroutine[Any, Any, None]], *, until: asyncio.Event) -> None:
    """Run all `stages` until `until` is set or one of them raises; cancels and awaits them all before it
    returns.

    A stage that returns has finished its work; the others go on. One error of a stage's task group is raised
    as itself, with a note that names the stage.
    """
    tasks = {asyncio.create_task(_named(name, work), name=name) for name, work in stages.items()}
    stop = asyncio.create_task(until.wait(), name="stop")
    try:
        pending = tasks | {stop}
        while stop in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    except BaseExceptionGroup as group:
        raise sole_cause(group) from None
    finally:
        for task in tasks | {stop}:
            task.cancel()
        await asyncio.gather(*tasks, stop, return_exceptions=True)


async def endless(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, which ends by cancellation only. Raises LoopEndedError when it returns."""
    await work
    raise LoopEndedError(f"{name!r} has ended by itself; that is a bug of ours")


async def run_endless(**loops: Coroutine[Any, Any, None]) -> None:
    """Run these loops until cancelled; whatever ends one of them ends all. Raises LoopEndedError for one that
    returns, its error for one that raises."""
    async with asyncio.TaskGroup() as group:
        for name, work in loops.items():
            group.create_task(endless(name, work), name=name)


async def _named(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        error.add_note(f"in the stage {name!r}")
        raise


def sole_cause(error: BaseException) -> BaseException:
    """What a group of one error holds, however deep; else `error`. A task group wraps even a single error,
    and who reads the reason wants to see that one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
