"""What a node tells about itself as a whole: its stages, its peers and weights, its health.

    services --gauge, snapshot--> StagesSeen and others, twice a second
             --health-----------> Health, once a second

A loop that only reads. What a number means is known by the service that gives it. Not for events of single
groups, steps or versions: those who make them tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from node.clock import StepWatch
from node.events import Health, NoticeLevel, StagesSeen
from node.rollout.stage import RolloutStage
from node.runtime import Runtime
from node.service import Service
from node.stalls import StallWatch
from node.supervise import LoopLag, run_endless

__all__ = ["Status"]

SNAPSHOT_S = 0.5
HEALTH_EVERY = 2
"""Snapshots from one health event to the next."""


class Status:
    """Snapshots of `services`, in their order, with the rollouts under way. `meter` gives this process's
    resident bytes and open descriptors. Stages that stand still are told until `finished` is set."""

    def __init__(
        self,
        runtime: Runtime,
        services: Sequence[Service],
        rollout: RolloutStage,
        meter: Callable[[], tuple[int, int]],
        finished: asyncio.Event,
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._rollout = rollout
        self._meter = meter
        self._finished = finished
        self._gauges = [gauge for each in services for gauge in each.gauges]
        self._lag = LoopLag()

    async def run(self) -> None:
        """Tell until cancelled."""
        await run_endless(lag=self._lag.run(), tell=self._tell())

    async def _tell(self) -> None:
        stalls, steps = StallWatch(self._gauges), StepWatch(self._runtime.clock)
        number, before_s = 0, self._runtime.monotonic_s()
        while True:
            now_s = self._runtime.monotonic_s()
            if not self._finished.is_set():  # else there is nothing more to do for most
                for text in stalls.tick(now_s - before_s):
                    self._runtime.notice(NoticeLevel.WARNING, text)
            before_s = now_s
            if text := steps.look():
                self._runtime.notice(NoticeLevel.WARNING, text)
            if number and number % HEALTH_EVERY == 0:
                self._runtime.emit(self.health())
            self._runtime.emit(
                StagesSeen(
                    at=self._runtime.now_ms(),
                    stages=tuple(gauge.status() for gauge in self._gauges),
                    rollouts_in_flight=self._rollout.in_flight,
                    tokens_sampled=self._rollout.sampled,
                )
            )
            for service in self._services:
                for event in service.snapshot():
                    self._runtime.emit(event)
            number += 1
            await asyncio.sleep(SNAPSHOT_S)

    def tell_last(self) -> None:
        """What is to be remembered of a node that ends."""
        for service in self._services:
            for event in service.last():
                self._runtime.emit(event)
        self._runtime.emit(self.health())

    def health(self) -> Health:
        """How the node is now."""
        rss_bytes, descriptors = self._meter()
        health = Health(
            at=self._runtime.now_ms(),
            loop_lag_p99_s=self._lag.p99_s(),
            rss_bytes=rss_bytes,
            descriptors=descriptors,
            tasks=len(asyncio.all_tasks()),
            transport_restarts=0,
            sandbox_restarts=0,
            refused={},
            announced=0,
            bodies_fetched=0,
            bodies_served=0,
        )
        for service in self._services:
            health = service.health(health)
        return health
