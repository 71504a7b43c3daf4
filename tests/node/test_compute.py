"""Lanes: one piece of work at a time in each, all lanes beside each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from node.clock import VirtualClock, run_virtual
from node.compute import InlineCompute, ThreadCompute

PATIENCE_S = 10.0


@pytest.fixture
def threads() -> Iterator[ThreadCompute]:
    compute = ThreadCompute()
    yield compute
    compute.close()


async def test_work_of_one_lane_never_overlaps_and_keeps_its_order(threads: ThreadCompute) -> None:
    busy, seen, overlaps = threading.Lock(), [], []

    def work(number: int) -> int:
        if not busy.acquire(blocking=False):
            overlaps.append(number)
            return number
        try:
            seen.append((number, threading.current_thread().name))
            return number
        finally:
            busy.release()

    results = await asyncio.gather(*(threads.run("train", work, number) for number in range(50)))
    assert results == list(range(50))
    assert overlaps == []
    assert [number for number, _ in seen] == list(range(50))
    assert len({name for _, name in seen}) == 1


async def test_lanes_work_at_the_same_time_and_beside_the_loop(threads: ThreadCompute) -> None:
    meeting = threading.Barrier(3, timeout=PATIENCE_S)  # opens only when three threads are inside at once
    work = [threads.run(lane, meeting.wait) for lane in ("generate", "train", "score")]
    assert sorted(await asyncio.gather(*work)) == [0, 1, 2]
    started, release = threading.Event(), threading.Event()

    def blocks() -> str:
        started.set()
        return "done" if release.wait(PATIENCE_S) else "late"

    task = asyncio.create_task(threads.run("verify", blocks))
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    release.set()  # from the loop, which is not blocked
    assert await task == "done"


async def test_arguments_go_in_and_errors_come_out(threads: ThreadCompute) -> None:
    def divide(left: int, *, by: int) -> float:
        return left / by

    assert await threads.run("train", divide, 6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await threads.run("train", divide, 6, by=0)
    assert await threads.run("train", divide, 6, by=2) == 3  # the lane lives on


async def test_closing_waits_for_running_work_and_drops_the_rest() -> None:
    compute = ThreadCompute()
    started, release, ended = threading.Event(), threading.Event(), []

    def runs() -> None:
        started.set()
        release.wait(PATIENCE_S)
        ended.append("first")

    first = asyncio.create_task(compute.run("train", runs))
    second = asyncio.create_task(compute.run("train", ended.append, "second"))
    assert await asyncio.to_thread(started.wait, PATIENCE_S)
    release.set()
    await asyncio.to_thread(compute.close)
    await asyncio.wait([first, second])
    assert ended[0] == "first"
    assert first.done()
    compute.close()
    with pytest.raises(RuntimeError):
        await compute.run("train", ended.append, "third")


def test_inline_work_costs_its_lanes_virtual_time() -> None:
    async def main() -> list[float]:
        clock, compute = VirtualClock(), InlineCompute({"generate": 0.25, "train": 2.0})
        times = []
        for lane in ("generate", "train", "score"):
            assert await compute.run(lane, divmod, 7, 2) == (3, 1)
            times.append(clock.monotonic_s())
        await asyncio.gather(compute.run("train", int), compute.run("generate", int))
        times.append(clock.monotonic_s())
        with pytest.raises(ZeroDivisionError):
            await compute.run("train", divmod, 1, 0)
        compute.close()
        return times

    assert run_virtual(main()) == pytest.approx([0.25, 2.25, 2.25, 4.25])
