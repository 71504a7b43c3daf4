"""Virtual time: it jumps, keeps order, and refuses to hang."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.clock import VIRTUAL_EPOCH_MS, StepWatch, SystemClock, VirtualClock, duration, run_virtual


def test_an_hour_takes_no_time() -> None:
    clock = VirtualClock()

    async def main() -> tuple[int, float]:
        assert clock.now_ms() == VIRTUAL_EPOCH_MS
        await asyncio.sleep(3600)
        return clock.now_ms(), clock.monotonic_s()

    began_s = time.monotonic()
    now_ms, monotonic_s = run_virtual(main())
    assert time.monotonic() - began_s < 1
    assert now_ms == VIRTUAL_EPOCH_MS + 3_600_000
    assert monotonic_s == pytest.approx(3600)


def test_a_month_of_small_steps_does_not_drift() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(2592.0)
        return VirtualClock().monotonic_s()

    assert run_virtual(main()) == pytest.approx(2_592_000, abs=1e-3)


def test_timeouts_and_late_timers_work() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        seen.append(("timeout", loop.time()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 7)
        seen.append(("wait_for", loop.time()))
        event = asyncio.Event()
        loop.call_later(86_400 * 3, event.set)  # beyond the loop's longest select
        await event.wait()
        return [*seen, ("timer", loop.time())]

    times = dict(run_virtual(main()))
    assert times["timeout"] == pytest.approx(5)
    assert times["wait_for"] == pytest.approx(12)
    assert times["timer"] == pytest.approx(12 + 3 * 86_400)


def test_the_order_is_that_of_the_timers_and_the_same_again() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def tick(name: str, period_s: float) -> None:
            for number in range(4):
                await asyncio.sleep(period_s)
                seen.append(f"{name}{number}")

        async with asyncio.TaskGroup() as group:
            for name, period_s in (("slow", 3.0), ("fast", 1.0), ("even", 2.0)):
                group.create_task(tick(name, period_s))
        return seen

    first = run_virtual(main())
    assert first == run_virtual(main())
    # 1 | 2 2 | 3 3 | 4 4 | 6 6 | 8 | 9 | 12; equal times in the order in which the timers were set
    assert first[:3] == ["fast0", "even0", "fast1"]
    assert first[-3:] == ["even3", "slow2", "slow3"]
    assert len(first) == 12


def test_a_deadlock_is_an_error_and_no_hang() -> None:
    cleaned = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def main() -> None:
        await asyncio.gather(waits(), waits())

    with pytest.raises(RuntimeError, match="deadlocked"):
        run_virtual(main())
    assert cleaned == [True, True]


def test_what_main_raises_is_raised() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        run_virtual(main())


def test_another_epoch() -> None:
    async def main() -> int:
        await asyncio.sleep(0.0015)
        return VirtualClock(epoch_ms=1000).now_ms()

    assert run_virtual(main()) == 1002  # rounded


def test_the_system_clock_is_the_systems() -> None:
    clock = SystemClock()
    assert abs(clock.now_ms() - time.time() * 1000) < 1000
    assert clock.monotonic_s() <= clock.monotonic_s()


def test_a_clock_that_is_set_is_told_once_for_each_step() -> None:
    class Settable:
        at_ms = 10**12

        def now_ms(self) -> int:
            return self.at_ms

        def monotonic_s(self) -> float:
            return 5.0

    clock = Settable()
    watch = StepWatch(clock)
    assert watch.look() == ""
    clock.at_ms += 3_600_000
    assert watch.look() == "this machine's clock went ahead by 60 min: it was set, or the machine slept"
    assert watch.look() == ""
    clock.at_ms -= 12_000
    assert watch.look() == "this machine's clock was set back by 12 s"
    clock.at_ms += 1_500  # steered, or read a moment later
    assert watch.look() == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_durations_in_sentences(seconds: float, told: str) -> None:
    assert duration(seconds) == told
