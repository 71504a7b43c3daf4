"""Stages that stand still are told once, and told again when they go on."""

from __future__ import annotations

import asyncio

from node.clock import VirtualClock, run_virtual
from node.stalls import FIRST_WORK_S, HISTORY, StallWatch
from node.supervise import StageGauge


class Watch:
    """A stage that waits for batches, and whoever watches it."""

    def __init__(self) -> None:
        self.gauge = StageGauge("train", VirtualClock(), "a batch")
        self.stalls = StallWatch([self.gauge])

    async def step(self, pause_s: float) -> list[str]:
        """Let that time pass inside a piece of work, then end it."""
        with self.gauge.working():
            told = await self.quiet(pause_s)
        return told + self.stalls.tick(0.0)

    async def quiet(self, pause_s: float) -> list[str]:
        """Let that time pass, ticked once a second."""
        told: list[str] = []
        for _ in range(int(pause_s)):
            await asyncio.sleep(1)
            told += self.stalls.tick(1.0)
        return told


def test_ten_times_the_longest_pause_is_a_stall() -> None:
    async def main() -> None:
        watch = Watch()
        for _ in range(HISTORY):
            assert await watch.step(8) == []
        with watch.gauge.waiting("own groups"):
            assert await watch.quiet(80) == []
            told = "train makes no progress for 81 s, 8.0 s at most are usual: it waits for own groups"
            assert await watch.quiet(1) == [told]
            assert await watch.quiet(100) == []
            assert watch.gauge.status().stalled_s == 181.0
        assert watch.stalls.tick(1.0) == ["train goes on after 181 s"]
        assert watch.gauge.status().stalled_s == 0.0

    run_virtual(main())


def test_quick_stages_get_a_minute_and_new_ones_ten() -> None:
    async def main() -> None:
        quick = Watch()
        for _ in range(HISTORY):
            await quick.step(1)
        assert await quick.quiet(60) == []
        assert len(await quick.quiet(1)) == 1

        new = Watch()
        assert await new.quiet(3 * FIRST_WORK_S) == []  # nothing to do yet is no stall
        with new.gauge.working():
            told = await new.quiet(FIRST_WORK_S + 1)
        assert told == [
            "train makes no progress for 601 s, 1800.0 s at most are usual: it works on one piece"
        ]

    run_virtual(main())


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    async def main() -> None:
        watch = Watch()
        for _ in range(HISTORY):
            await watch.step(1)
        assert watch.stalls.tick(3600.0) == []
        assert await watch.quiet(57) == []

    run_virtual(main())
