"""The stepper: the device, the engine, and what surrounds a step."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from node.clock import run_virtual
from node.config import load_config
from node.rollout.policy import Policy
from node.train.objectives import open_objective
from node.train.settings import TrainSettings
from node.train.step import StepReport, Trainer
from node.train.stepper import Stepper, open_stepper
from node.weight.batch import TrainingBatch
from tests.node.runtimes import make_runtime

SETTINGS = TrainSettings(measure_start_kl=False)


class Engine:
    """Notes what is asked of it, and whether a step runs meanwhile."""

    def __init__(self) -> None:
        self.not_sharing = ""
        self.calls: list[str] = []

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self.calls.append("sleeps")
        yield
        self.calls.append("wakes")

    async def update(self, policy_version: int) -> None:
        self.calls.append(f"gets {policy_version}")

    async def replace(self, change: Callable[[], None] | None, *, anchor: bool) -> None:
        self.calls.append("gets others")


class Merges:
    """The first merge is adopted."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._answers = [True, False]

    async def next(self) -> bool:
        self._trainer.policy_version += 1
        return self._answers.pop(0)


def supervised(**config: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return load_config([], {"supervise.enabled": True, "supervise.probe_every": 1} | keys)


def test_a_step_has_the_device_to_itself_and_its_weights_reach_the_engine(
    policy: Policy, batch: TrainingBatch
) -> None:
    engine, trainer = Engine(), Trainer(policy, SETTINGS)
    stepper = Stepper(make_runtime(), trainer, engine)
    assert run_virtual(stepper.step(batch)).policy_version == stepper.policy_version == 1
    run_virtual(stepper.hand_over())
    assert engine.calls == ["sleeps", "wakes", "gets 1"]
    assert (stepper.sharing, stepper.probes) == (True, False)
    assert run_virtual(stepper.probe([1.0] * 16)) is None
    skipped: StepReport = run_virtual(stepper.step(dataclasses.replace(batch, lambda_S=(float("nan"),) * 3)))
    assert skipped.skipped
    assert engine.calls[3:] == ["sleeps", "wakes"]


def test_a_decline_that_a_probe_finds_is_taken_back_in_the_engine_too(
    policy: Policy, batch: TrainingBatch
) -> None:
    engine, trainer = Engine(), Trainer(policy, SETTINGS)
    stepper = open_stepper(make_runtime(), supervised(), trainer, engine)
    assert stepper.probes
    assert run_virtual(stepper.probe([1.0] * 64)) is None
    run_virtual(stepper.step(batch))
    undone = run_virtual(stepper.probe([0.0] * 64))
    assert undone is not None
    assert (undone.bad_version, undone.policy_version) == (1, 2)
    assert engine.calls[-1] == "gets others"


def test_the_last_adopted_merge_is_known(policy: Policy) -> None:
    trainer = Trainer(policy, SETTINGS)
    stepper = Stepper(make_runtime(), trainer, Engine(), merges=Merges(trainer))
    assert [run_virtual(stepper.merge()) for _ in range(2)] == [True, False]
    assert (stepper.merged_version, stepper.policy_version) == (1, 2)
    assert not run_virtual(Stepper(make_runtime(), trainer, Engine()).merge())


@pytest.mark.parametrize(
    ("old", "filled"),
    [(None, []), ("snapshot", ["snapshot_BT"]), ("ewma", ["ewma_BT"])],
)
def test_old_log_probabilities_are_kept_where_the_objective_needs_them(
    policy: Policy, batch: TrainingBatch, old: str | None, filled: list[str]
) -> None:
    seen: list[TrainingBatch] = []

    class Watched(Trainer):
        def step(self, batch: TrainingBatch) -> StepReport:
            seen.append(batch)
            return super().step(batch)

    own = open_objective("tis", {"old": old}) if old is not None else SETTINGS.own
    settings = dataclasses.replace(SETTINGS, own=own)
    stepper = open_stepper(make_runtime(), load_config(), Watched(policy, settings), Engine())
    run_virtual(stepper.step(batch))
    assert [name for name in ("snapshot_BT", "ewma_BT") if getattr(seen[0], name) is not None] == filled
