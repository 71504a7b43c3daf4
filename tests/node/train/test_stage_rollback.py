"""The train stage when updates are taken back: what counts, what is told, and when the run ends."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from node.clock import run_virtual
from node.events import Notice, RolledBack, StepDone, decode_event, encode_event
from node.rollout.policy import Policy
from node.train.stability import Alarm, RollBack, Sign
from protocol.errors import UnstableError
from tests.node.train.test_stage import ALICE, Bench


def undone(
    bad: int, good: int, value: float = 0.75, error: UnstableError | None = None, **changes: Any
) -> RollBack:
    alarm = Alarm(Sign.KL_STEP, value, 0.5, f"one step moved the policy by {value} nats per token", 1)
    values = {"alarm": alarm, "bad_version": bad, "good_version": good, "policy_version": bad + 1, "total": 1}
    return RollBack(**{**values, "error": error, **changes})


def of(bench: Bench, kind: Any) -> list[Any]:
    return [event for event in bench.events if isinstance(event, kind)]


def test_a_step_that_was_rolled_back_is_told_brought_to_the_engine_and_not_counted(policy: Policy) -> None:
    """The second of three steps makes version 2, which is bad; version 3 has the weights of 1."""

    async def main() -> None:
        made = Bench(policy, steps=3, external_groups=1)
        for _ in range(3):
            made.make_own(0.0, 1.0)
        made.pool_in(ALICE, 0.0, 1.0)
        known: list[int] = []

        async def broadcast(version: int) -> None:
            known.append(len(made.stage._ingestion))
            made.calls.append(f"broadcast {version}")
            second = version == 1
            made.trainer.changes = {"rolled_back": undone(2, 1), "kl_step": 0.75} if second else {}

        made.stage._broadcast = broadcast
        await made.stage.run()
        steps = of(made, StepDone)
        assert [(step.policy_version, step.rolled_back) for step in steps] == [
            (1, False),
            (2, True),
            (4, False),
        ]
        assert [step.kl_step for step in steps] == [None, 0.75, None]
        assert made.calls == [
            "evaluate before",
            "broadcast 1",
            "broadcast 3",
            "broadcast 4",
            "save",
            "evaluate after",
        ]
        assert made.used == [1, 1, 1]
        (event,) = of(made, RolledBack)
        assert (event.sign, event.value, event.limit, event.total) == ("kl_step", 0.75, 0.5, 1)
        assert (event.bad_version, event.good_version, event.policy_version) == (2, 1, 3)
        (notice,) = of(made, Notice)
        assert (notice.level, notice.text) == ("warning", event.why)
        assert event.why == (
            "version 2 was rolled back: one step moved the policy by 0.75 nats per token (limit 0.5); "
            "version 3 has the weights of 1"
        )

    run_virtual(main())


def test_what_a_bad_step_met_is_not_what_later_uses_are_clipped_against(policy: Policy) -> None:
    async def main() -> None:
        made = Bench(policy)
        made.trainer.changes = {"rolled_back": undone(1, 0)}
        made.make_own(0.0, 1.0)
        made.pool_in(ALICE, 0.0, 1.0)
        await made.stage.run()
        assert made.stage._ingestion == {}

    run_virtual(main())


def test_numbers_that_broke_are_told_as_zeros(policy: Policy) -> None:
    async def main() -> None:
        made = Bench(policy)
        made.trainer.changes = {"rolled_back": undone(1, 0, math.nan), "kl_step": math.nan}
        made.make_own(0.0, 1.0)
        await made.stage.run()
        assert made.step.kl_step == 0.0
        (event,) = of(made, RolledBack)
        assert event.value == 0.0
        assert decode_event(encode_event(event)) == event

    run_virtual(main())


def test_one_roll_back_too_many_ends_the_stage_once_the_good_weights_are_saved(policy: Policy) -> None:
    async def main() -> None:
        made = Bench(policy, steps=5)
        made.trainer.changes = {"rolled_back": undone(1, 0, error=UnstableError("3 times in a row"))}
        for _ in range(5):
            made.make_own(0.0, 1.0)
        with pytest.raises(UnstableError, match="3 times in a row"):
            await made.stage.run()
        assert made.calls == ["evaluate before", "broadcast 2", "save"]
        assert len(of(made, RolledBack)) == len(of(made, Notice)) == len(of(made, StepDone)) == 1
        assert not made.finished.is_set()

    run_virtual(main())


# --- probes ------------------------------------------------------------------------------------------------


def test_probes_come_before_the_first_step_and_then_every_few(policy: Policy) -> None:
    """The one after step 4 finds version 4 bad: what it has undone is saved, since a checkpoint may hold
    version 3 or 4."""
    made = cast("Bench", None)

    async def probe() -> RollBack | None:
        made.calls.append("probe")
        if made.trainer.policy_version != 4:
            return None
        made.trainer.policy_version = 5
        return undone(4, 2)

    async def main() -> None:
        nonlocal made
        made = Bench(policy, steps=5, probe_every=2, probe=probe)
        for _ in range(5):
            made.make_own(0.0, 1.0)
        await made.stage.run()

    run_virtual(main())
    assert made.calls == [
        "evaluate before",
        "probe",
        "broadcast 1",
        "broadcast 2",
        "probe",
        "broadcast 3",
        "broadcast 4",
        "probe",
        "save",
        "broadcast 6",
        "save",
        "evaluate after",
    ]
    assert [step.policy_version for step in of(made, StepDone)] == [1, 2, 3, 4, 6]
    (event,) = of(made, RolledBack)
    assert (event.bad_version, event.good_version, event.policy_version) == (4, 2, 5)


def test_without_an_interval_nothing_is_probed(policy: Policy) -> None:
    async def probe() -> RollBack | None:
        raise AssertionError

    async def main() -> None:
        made = Bench(policy, probe=probe)
        made.make_own(0.0, 1.0)
        await made.stage.run()

    run_virtual(main())
