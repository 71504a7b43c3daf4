"""What a node tells about itself as a whole: its stages, its peers and weights, its health.

    services --gauge, snapshot--> StagesSeen and others, twice a second
             --health-----------> Health, once a second

A loop that only reads. What a number means is known by the service that gives it. Not for events of single
groups, steps or versions: those who make them tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from node.events import Health, StagesSeen
from node.rollout.stage import RolloutStage
from node.runtime import Runtime
from node.service import Service
from node.supervise import LoopLag

__all__ = ["Status"]

SNAPSHOT_S = 0.5
HEALTH_EVERY = 2
"""Snapshots from one health event to the next."""


class Status:
    """Snapshots of `services`, in their order, with the rollouts under way."""

    def __init__(
        self,
        runtime: Runtime,
        services: Sequence[Service],
        rollout: RolloutStage,
        rss_bytes: Callable[[], int],
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._rollout = rollout
        self._rss_bytes = rss_bytes
        self._lag = LoopLag()

    async def run(self) -> None:
        """Tell until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lag.run())
            group.create_task(self._tell())

    async def _tell(self) -> None:
        number = 0
        while True:
            if number and number % HEALTH_EVERY == 0:
                self._runtime.emit(self.health())
            self._runtime.emit(
                StagesSeen(
                    at=self._runtime.now_ms(),
                    stages=tuple(gauge.status() for each in self._services for gauge in each.gauges),
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
        health = Health(
            at=self._runtime.now_ms(),
            loop_lag_p99_s=self._lag.p99_s(),
            rss_bytes=self._rss_bytes(),
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
