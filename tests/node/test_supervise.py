"""Named waits, loop lag, and stages that end together."""

from __future__ import annotations

import asyncio

import pytest

from node.clock import VirtualClock, run_virtual
from node.supervise import LoopEndedError, LoopLag, StageGauge, run_endless, run_stages, sole_cause

# --- StageGauge --------------------------------------------------------------------------------------------


def test_a_wait_has_a_name_and_a_duration() -> None:
    async def main() -> None:
        depth = [0]
        gauge = StageGauge("verify", VirtualClock(), "fetched bodies", 64, lambda: depth[0])
        assert shown(gauge) == ("fetched bodies", 0.0)
        with gauge.waiting("room in queue"):
            await asyncio.sleep(2.5)
            depth[0] = 3
            status = gauge.status()
            assert (status.stage, status.queued, status.capacity) == ("verify", 3, 64)
            assert (status.waiting_for, status.waiting_s) == ("room in queue", 2.5)
        assert shown(gauge) == ("fetched bodies", 0.0)
        with pytest.raises(TimeoutError), gauge.waiting("nothing"):
            async with asyncio.timeout(1):
                await asyncio.Event().wait()
        assert shown(gauge) == ("fetched bodies", 0.0)

    run_virtual(main())


def shown(gauge: StageGauge) -> tuple[str, float]:
    return gauge.status().waiting_for, gauge.status().waiting_s


def test_a_stage_works_only_inside_its_work() -> None:
    async def main() -> None:
        gauge = StageGauge("broadcast", VirtualClock(), "a new version")
        assert shown(gauge) == ("a new version", 0.0)
        await asyncio.sleep(3)
        assert shown(gauge) == ("a new version", 3.0)
        with gauge.working():
            await asyncio.sleep(1)
            assert shown(gauge) == ("", 0.0)
        assert shown(gauge) == ("a new version", 0.0)
        with pytest.raises(KeyError), gauge.working():
            raise KeyError
        await asyncio.sleep(2)
        assert shown(gauge) == ("a new version", 2.0)

    run_virtual(main())


def test_a_stage_of_several_loops_works_while_one_of_them_does() -> None:
    async def main() -> None:
        gauge = StageGauge("share", VirtualClock(), "offers")

        async def wait(name: str, seconds: float) -> None:
            with gauge.waiting(name):
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait("need", 10))
            with gauge.working():
                await asyncio.sleep(1)
                assert shown(gauge) == ("", 0.0)
            assert shown(gauge) == ("need", 1.0)
            group.create_task(wait("room in verify", 2))
            await asyncio.sleep(1)
            assert shown(gauge) == ("room in verify", 1.0)  # the wait that began last
            await asyncio.sleep(2)
            assert shown(gauge) == ("need", 4.0)
        assert shown(gauge) == ("offers", 0.0)

    run_virtual(main())


# --- LoopLag -----------------------------------------------------------------------------------------------


def test_loop_lag_is_the_99th_percentile_of_late_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    lags_s = iter([0.3] * 3 + [0.2] + [0.0] * 97 + [0.1] + [0.0] * 98)
    lag = LoopLag(period_s=1.0, samples=100)
    assert lag.p99_s() == 0.0
    real_sleep = asyncio.sleep

    async def late(seconds: float) -> None:
        """A loop that was busy when the timer was due."""
        try:
            await real_sleep(seconds + next(lags_s))
        except StopIteration:
            await asyncio.Event().wait()

    async def main() -> None:
        monkeypatch.setattr(asyncio, "sleep", late)
        task = asyncio.create_task(lag.run())
        await real_sleep(3.95)  # three samples of 0.3 s
        assert lag.p99_s() == pytest.approx(0.3)
        await real_sleep(300)  # the hundred newest samples are left: one of 0.1 s, 99 punctual ones
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())
    assert lag.p99_s() == pytest.approx(0.1)


# --- run_stages --------------------------------------------------------------------------------------------


class Stages:
    """Stages that tell how they ended."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    async def forever(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)  # it may take a moment to close
            self.ended[name] = "cancelled"
            raise

    async def works(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.ended[name] = "done"

    async def breaks(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise KeyError("a bug of ours")


def test_a_stage_that_raises_ends_the_others_and_is_raised() -> None:
    stages = Stages()

    async def main() -> float:
        with pytest.raises(KeyError, match="a bug of ours"):
            await run_stages(
                {"a": stages.forever("a"), "b": stages.breaks(3), "c": stages.forever("c")},
                until=asyncio.Event(),
            )
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3.5)
    assert stages.ended == {"a": "cancelled", "c": "cancelled"}


def test_a_stage_that_returns_leaves_the_others_running_until_the_stop() -> None:
    stages = Stages()

    async def main() -> float:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(10, stop.set)
        await run_stages({"a": stages.works("a", 2), "b": stages.forever("b")}, until=stop)
        assert len(asyncio.all_tasks()) == 1
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.5)
    assert stages.ended == {"a": "done", "b": "cancelled"}


def test_a_stage_that_breaks_at_the_stop_is_not_hidden_by_it() -> None:
    async def main() -> None:
        stop = asyncio.Event()

        async def breaks() -> None:
            stop.set()
            raise KeyError("at the very end")

        with pytest.raises(KeyError, match="at the very end"):
            await run_stages({"a": breaks()}, until=stop)

    run_virtual(main())


def test_cancelling_from_outside_ends_all_stages() -> None:
    stages = Stages()

    async def main() -> None:
        task = asyncio.create_task(run_stages({"a": stages.forever("a")}, until=asyncio.Event()))
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert stages.ended == {"a": "cancelled"}


def test_one_error_in_a_stages_task_group_is_raised_as_itself() -> None:
    async def deep() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(Stages().breaks(1))
            outer.create_task(Stages().forever("outer"))

    async def main() -> None:
        with pytest.raises(KeyError, match="a bug of ours"):
            await run_stages({"a": deep()}, until=asyncio.Event())

    run_virtual(main())


def test_several_errors_stay_together() -> None:
    both = ExceptionGroup("both", [KeyError("a"), ValueError("b")])
    assert sole_cause(ExceptionGroup("outer", [both])) is both
    assert sole_cause(error := OSError("c")) is error


def test_a_loop_that_returns_inside_a_stage_ends_the_stage_by_name() -> None:
    """A task group would wait for the others for ever, and nobody would know."""

    async def main() -> None:
        stopped = asyncio.Event()

        async def returns() -> None:
            await asyncio.sleep(3)

        async def goes_on() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        async with asyncio.timeout(10):
            with pytest.raises(LoopEndedError, match="'gossip' has ended by itself"):
                await run_stages(
                    {"network": run_endless(gossip=returns(), presence=goes_on())}, until=asyncio.Event()
                )
        assert stopped.is_set()

    run_virtual(main())
