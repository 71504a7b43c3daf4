"""Where heavy work runs: on threads beside the event loop, or inline at a fixed virtual cost.

The loop serves the network and must not be blocked (D11): generation, training, scoring and checks go through
`Compute.run`. `ThreadCompute` has one thread per lane, so two pieces of work of one lane never overlap (torch
modules are not thread-safe) while lanes do. `InlineCompute` calls the function at once and then sleeps the
lane's fixed cost in virtual time, which makes a whole swarm in one process deterministic.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Protocol, TypeVar

__all__ = ["Compute", "InlineCompute", "Lane", "ThreadCompute"]

T = TypeVar("T")


class Lane(StrEnum):
    """Kinds of work. Two pieces of one kind never overlap."""

    DERIVE = "derive"
    """The questions of own slots."""
    GENERATE = "generate"
    SCORE = "score"
    VERIFY = "verify"
    WEIGHT = "weight"
    TRAIN = "train"
    EVALUATE = "evaluate"
    BROADCAST = "broadcast"
    """Coding and storing weights for others."""
    APPLY = "apply"
    """Making a version of weights from what others published, and giving it to the engine."""
    MERGE = "merge"
    DISK = "disk"


class Compute(Protocol):
    """Runs blocking work without blocking the event loop."""

    async def run(self, lane: Lane, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Result of `function(*args, **kwargs)`; what it raises is raised here."""
        ...

    def close(self) -> None:
        """Let running work end and release the threads."""
        ...


class ThreadCompute:
    """One worker thread per lane."""

    def __init__(self) -> None:
        self._executors: dict[Lane, ThreadPoolExecutor] = {}
        self._under_way: dict[Lane, object] = {}
        """Names the piece of work that a lane does now."""
        self._longest_s: dict[Lane, float] = {}

    async def run(self, lane: Lane, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        executor = self._executors.get(lane)
        if executor is None:
            executor = self._executors[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"swarm-{lane}")
        return await asyncio.get_running_loop().run_in_executor(
            executor, functools.partial(self._timed, lane, function, *args, **kwargs)
        )

    def under_way(self) -> dict[Lane, object]:
        """What each lane that is not idle does now: two readings name the same piece of work alike."""
        return dict(self._under_way)

    def longest_s(self, lane: Lane) -> float:
        """What the longest piece of work of this lane took so far, 0 before the first has ended."""
        return self._longest_s.get(lane, 0.0)

    def _timed(self, lane: Lane, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        began_s = time.monotonic()
        self._under_way[lane] = object()
        try:
            return function(*args, **kwargs)
        finally:
            del self._under_way[lane]
            self._longest_s[lane] = max(self.longest_s(lane), time.monotonic() - began_s)

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True, cancel_futures=True)


class InlineCompute:
    """Calls inline, then lets `costs_s[lane]` seconds of virtual time pass."""

    def __init__(self, costs_s: Mapping[Lane, float]) -> None:
        self._costs_s = dict(costs_s)

    async def run(self, lane: Lane, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result = function(*args, **kwargs)
        await asyncio.sleep(self._costs_s.get(lane, 0.0))
        return result

    def close(self) -> None:
        return None
