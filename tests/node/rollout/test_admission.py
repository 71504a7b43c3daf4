"""How far generation may run ahead: by hand, and against AReaL's rule."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.clock import run_virtual
from node.rollout.admission import Admission


class AReaL:
    """The rule as published: N is counted from the start of a run."""

    def __init__(self, max_staleness: int, groups_per_step: int, policy_version: int) -> None:
        self.eta, self.per_step, self.version = max_staleness, groups_per_step, policy_version
        self.admitted = policy_version * groups_per_step

    def room(self) -> int:
        room = 0
        while (self.admitted + room) // self.per_step <= self.version + self.eta:
            room += 1
        return room


@pytest.mark.slow
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    first_version=st.integers(0, 20),
    moves=st.lists(st.tuples(st.sampled_from(["start", "accept", "drop", "step"]), st.integers(1, 6))),
)
def test_room_is_what_areal_admits_where_every_step_takes_its_groups(
    max_staleness: int, groups_per_step: int, first_version: int, moves: list[tuple[str, int]]
) -> None:
    admission = Admission(max_staleness, groups_per_step)
    areal = AReaL(max_staleness, groups_per_step, first_version)
    running = complete = 0
    for move, wanted in moves:
        if move == "start":
            groups = min(wanted, admission.room())
            admission.started(groups)
            areal.admitted += groups
            running += groups
        elif move == "step" and complete >= groups_per_step:
            admission.used(groups_per_step)
            areal.version += 1
            complete -= groups_per_step
        elif move in ("accept", "drop"):
            groups = min(wanted, running)
            running -= groups
            if move == "accept":
                admission.finished(accepted=groups)
                complete += groups
            else:
                admission.finished(accepted=0, dropped=groups)
                areal.admitted -= groups
        assert admission.room() == areal.room()
        assert admission.complete == complete


@given(
    max_staleness=st.integers(0, 3),
    groups_per_step=st.integers(1, 4),
    takes=st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_after_short_steps_no_group_is_used_later_than_allowed(
    max_staleness: int, groups_per_step: int, takes: list[int]
) -> None:
    """Generation is as fast as it may be; a step takes all there is, at most its groups."""
    admission, waiting = Admission(max_staleness, groups_per_step), list[int]()
    for version, wanted in enumerate(takes):
        groups = min(wanted, admission.room())
        admission.started(groups)
        admission.finished(accepted=groups)
        waiting += [version] * groups
        used, waiting = waiting[:groups_per_step], waiting[groups_per_step:]
        assert all(version - completed <= max_staleness for completed in used)
        admission.used(len(used))


def test_a_run_by_hand() -> None:
    admission = Admission(max_staleness=1, groups_per_step=4)
    assert admission.room() == 8
    admission.started(4)
    assert admission.room() == 4
    admission.finished(accepted=3, dropped=1)
    assert admission.room() == 5  # the dropped one counts no more
    admission.started(5)
    admission.finished(accepted=5)
    assert admission.room() == 0
    admission.used(4)
    assert admission.room() == 4
    admission.used(2)  # a short step gives back what it took
    assert (admission.room(), admission.complete) == (6, 2)


def test_room_is_never_negative() -> None:
    admission = Admission(max_staleness=0, groups_per_step=2)
    admission.started(5)
    assert admission.room() == 0


@pytest.mark.parametrize("unblock", ["used", "dropped"])
def test_waiting_ends_when_room_is_made(unblock: str) -> None:
    async def main() -> tuple[int, float]:
        admission = Admission(max_staleness=0, groups_per_step=2)
        admission.started(2)
        loop = asyncio.get_running_loop()
        if unblock == "used":
            loop.call_later(1, lambda: admission.finished(accepted=2))  # makes no room
            loop.call_later(3, admission.used, 2)
        else:
            loop.call_later(3, lambda: admission.finished(accepted=0, dropped=2))
        return await admission.wait(), loop.time()

    assert run_virtual(main()) == (2, pytest.approx(3))


def test_a_budget_is_of_one_step_and_its_end_is_told() -> None:
    async def main() -> None:
        admission = Admission(max_staleness=1, groups_per_step=2, token_budget=100)
        admission.started(2)
        admission.finished(accepted=1)
        admission.sampled(60)
        assert admission.tokens_left() == 40
        admission.sampled(70)  # an engine may overshoot
        assert admission.tokens_left() == 0
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: admission.finished(accepted=1))
        loop.call_later(4, admission.used, 1)
        holding = asyncio.create_task(admission.hold())
        await asyncio.sleep(2)
        assert admission.held.is_set()
        await holding
        assert loop.time() == pytest.approx(4)
        assert not admission.held.is_set()
        assert admission.tokens_left() == 100

    run_virtual(main())


def test_without_a_budget_tokens_do_not_count() -> None:
    admission = Admission(max_staleness=0, groups_per_step=1)
    admission.sampled(10**9)
    assert admission.tokens_left() is None
