"""AReaL's admission rule, with numbers worked out by hand."""

from __future__ import annotations

import asyncio

import pytest

from node.clock import run_virtual
from node.rollout.admission import Admission


@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step", "policy_version", "room"),
    [
        # accepted = version * B at the start, so room = (max_staleness + 1) * B whatever the version
        (0, 4, 0, 4),
        (1, 4, 0, 8),
        (1, 4, 17, 8),
        (3, 2, 5, 8),
    ],
)
def test_room_at_the_start_and_after_a_resume(
    max_staleness: int, groups_per_step: int, policy_version: int, room: int
) -> None:
    assert Admission(max_staleness, groups_per_step, policy_version).room() == room


def test_a_run_by_hand() -> None:
    admission = Admission(max_staleness=1, groups_per_step=4)  # limit (0+1+1)*4 = 8
    admission.started(4)
    assert admission.room() == 4  # 0 accepted + 4 running < 8
    admission.finished(accepted=3, dropped=1)
    assert admission.room() == 5  # 3 + 0; the dropped one counts no more
    admission.started(5)
    assert admission.room() == 0
    admission.finished(accepted=5)
    assert admission.room() == 0  # 8 of 8
    admission.stepped(1)  # limit (1+1+1)*4 = 12
    assert admission.room() == 4
    admission.started(4)
    admission.stepped(2)  # limit 16, 8 accepted + 4 running
    assert admission.room() == 4
    admission.finished(accepted=0, dropped=4)
    assert admission.room() == 8


def test_without_staleness_generation_and_training_take_turns() -> None:
    admission = Admission(max_staleness=0, groups_per_step=2)
    for version in range(1, 4):
        assert admission.room() == 2
        admission.started(2)
        admission.finished(accepted=2)
        assert admission.room() == 0
        admission.stepped(version)


def test_steps_that_make_no_version_give_their_room_back() -> None:
    admission = Admission(max_staleness=0, groups_per_step=2)
    for _ in range(5):
        admission.started(2)
        admission.finished(accepted=2)
        assert admission.room() == 0
        admission.discarded(2)
    assert admission.room() == 2


def test_room_is_never_negative() -> None:
    admission = Admission(max_staleness=0, groups_per_step=2)
    admission.started(5)
    assert admission.room() == 0


@pytest.mark.parametrize("unblock", ["stepped", "dropped", "discarded"])
def test_waiting_ends_when_room_is_made(unblock: str) -> None:
    async def main() -> tuple[int, float]:
        admission = Admission(max_staleness=0, groups_per_step=2)
        admission.started(2)
        if unblock != "dropped":
            admission.finished(accepted=2)
        loop = asyncio.get_running_loop()
        if unblock == "stepped":
            loop.call_later(3, admission.stepped, 1)
        elif unblock == "discarded":
            loop.call_later(3, admission.discarded, 2)
        else:
            loop.call_later(3, lambda: admission.finished(accepted=0, dropped=2))
        return await admission.wait(), loop.time()

    room, at_s = run_virtual(main())
    assert (room, at_s) == (2, pytest.approx(3))


def test_a_change_that_makes_no_room_does_not_end_the_wait() -> None:
    async def main() -> float:
        admission = Admission(max_staleness=0, groups_per_step=2)
        admission.started(2)
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: admission.finished(accepted=2))
        loop.call_later(5, admission.stepped, 1)
        assert await admission.wait() == 2
        return loop.time()

    assert run_virtual(main()) == pytest.approx(5)
