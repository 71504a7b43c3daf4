"""The train stage: what comes after what in a run, and what is told when updates are taken back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from node.clock import run_virtual
from node.config import load_config
from node.events import Event, Notice, RolledBack, StepDone, decode_event, encode_event
from node.rollout.policy import Policy
from node.train.checkpoints import Checkpoints
from node.train.evaluate import Evaluator
from node.train.stability import Alarm, RollBack, Sign
from node.train.stage import TrainStage
from node.train.step import StepReport
from node.train.stepper import Stepper
from node.weight.batch import TrainingBatch, collate
from node.weight.groups import training_group
from node.weight.settings import WeightSettings
from node.weight.stage import WeightStage
from protocol.errors import UnstableError
from tests.node.runtimes import make_runtime, notices_of
from tests.node.weight.conftest import ME, accepted

REPORT = StepReport(
    policy_version=1,
    skipped=False,
    loss=0.5,
    grad_norm=1.0,
    learning_rate=1e-3,
    entropy=2.0,
    kl_start=0.1,
    tokens=8,
    sources=(),
    logprobs_BT=torch.full((2, 4), -1.0),
    train_s=0.25,
)


def undone(bad: int, good: int, value: float = 0.75, error: UnstableError | None = None) -> RollBack:
    alarm = Alarm(Sign.KL_STEP, value, 0.5, f"one step moved the policy by {value} nats per token", 1)
    return RollBack(alarm, bad, good, policy_version=bad + 1, total=1, error=error)


class Course:
    """Everything around a train stage, as a list of calls in their order. `at` maps a step's number to what
    the step, the merge or the probe after it brings."""

    def __init__(self, batch: TrainingBatch, **config: Any) -> None:
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.batch = batch
        self.policy_version = 0
        self.merged_version = 0
        self.sharing = True
        self.probes = True
        self.pool_size = 3
        self.steps = 0
        self.reports: dict[int, dict[str, Any]] = {}
        self.merges: dict[int, int] = {}
        self.found_bad: dict[int, RollBack] = {}
        self.remembered: list[bool] = []
        self.kept_recent: list[int] = []
        keys = {key.replace("__", "."): value for key, value in config.items()}
        self.stage = TrainStage(
            make_runtime(events=self.events),
            load_config([], {"train.steps": 1, "evaluate.every": 100, "train.checkpoint_every": 100} | keys),
            cast("WeightStage", self),
            cast("Stepper", self),
            cast("Evaluator", self),
            cast("Checkpoints", self),
        )

    def run(self) -> None:
        run_virtual(self.stage.run())

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def draw(self, policy_version: int, *, wait: bool) -> TrainingBatch:
        return self.batch

    def stepped(self, batch: TrainingBatch, logprobs_BT: torch.Tensor | None) -> None:
        self.remembered.append(logprobs_BT is not None)

    async def step(self, batch: TrainingBatch) -> StepReport:
        self.steps += 1
        changes = self.reports.get(self.steps, {})
        made = self.policy_version + (not changes.get("skipped", False))
        self.policy_version = made + ("rolled_back" in changes)
        self.calls.append(f"step {made}")
        return dataclasses.replace(REPORT, policy_version=made, **changes)

    async def hand_over(self) -> None:
        self.calls.append(f"engine {self.policy_version}")

    async def merge(self) -> bool:
        self.policy_version += self.merges.get(self.steps, 0)
        if self.merges.get(self.steps) != 1:
            return False
        self.calls.append("merge")
        self.merged_version = self.policy_version
        return True

    async def rewards(self, prompts: int) -> list[float]:
        return [1.0] * prompts

    async def probe(self, rewards: Sequence[float]) -> RollBack | None:
        self.calls.append("probe")
        found = self.found_bad.get(self.steps)
        self.policy_version = found.policy_version if found is not None else self.policy_version
        return found

    async def evaluate(self, moment: str) -> None:
        self.calls.append(moment)

    async def save(self) -> None:
        self.calls.append("save")

    async def keep_recent(self) -> None:
        self.kept_recent.append(self.policy_version)


@pytest.fixture
def course(policy: Policy) -> Callable[..., Course]:
    """Makes a course that trains on one own group of version 0 at every step."""
    own = training_group(accepted(policy, ME, [0.0, 1.0]), policy)
    batch = collate([dataclasses.replace(own, advantages=(-1.0, 1.0))], WeightSettings(), policy)
    return lambda **config: Course(batch, **config)


def test_evaluations_checkpoints_and_the_end(course: Callable[..., Course]) -> None:
    made = course(train__steps=5, evaluate__every=2, train__checkpoint_every=2)
    made.run()
    assert made.kept_recent == [1, 2, 3, 4, 5]
    assert " ".join(made.calls) == (
        "before step 1 engine 1 step 2 engine 2 during save step 3 engine 3 step 4 engine 4 during save "
        "step 5 engine 5 save after"
    )
    assert made.stage.finished.is_set()
    assert made.remembered == [True] * 5


def test_an_adopted_merge_is_saved_at_once_and_groups_from_before_it_are_counted(
    course: Callable[..., Course],
) -> None:
    """After step 1 a merge is adopted, after step 2 one is not, which costs two versions."""
    made = course(train__steps=3)
    made.merges = {1: 1, 2: 2}
    made.policy_version = 1
    made.batch = dataclasses.replace(
        made.batch, groups=tuple(dataclasses.replace(group, lag=1) for group in made.batch.groups)
    )
    made.run()
    assert " ".join(made.calls) == (
        "before step 2 engine 2 merge save step 4 engine 4 step 7 engine 7 save after"
    )
    # Trained at versions 1, 3 and 6, on groups of the version before; the merge made version 3.
    assert [step.groups_across_merge for step in made.of(StepDone)] == [0, 1, 0]


def test_a_step_that_is_not_finite_is_told_and_forgotten(course: Callable[..., Course]) -> None:
    made = course()
    made.reports = {1: {"skipped": True, "loss": math.nan, "grad_norm": math.inf, "kl_start": -math.inf}}
    made.run()
    (step,) = made.of(StepDone)
    assert decode_event(encode_event(step)) == step  # JSON has no NaN
    assert (step.skipped, step.policy_version, step.loss, step.grad_norm) == (True, 0, 0.0, 0.0)
    assert notices_of(made.events) == ["a step was not finite and left the weights untouched"]
    assert made.remembered == [False]
    assert made.calls == ["before", "step 0", "save", "after"]


def test_a_step_that_was_rolled_back_is_told_and_forgotten(course: Callable[..., Course]) -> None:
    made = course(train__steps=3)
    made.reports = {2: {"rolled_back": undone(2, 1, math.nan), "kl_step": math.nan}}
    made.run()
    assert [(step.policy_version, step.rolled_back) for step in made.of(StepDone)] == [
        (1, False),
        (2, True),
        (4, False),
    ]
    assert made.remembered == [True, False, True]
    (event,) = made.of(RolledBack)
    assert decode_event(encode_event(event)) == event
    assert (event.sign, event.value, event.bad_version, event.good_version) == ("kl_step", 0.0, 2, 1)
    (notice,) = made.of(Notice)
    assert (notice.level, notice.text) == ("warning", event.why)


def test_one_roll_back_too_many_ends_the_run_once_the_good_weights_are_saved(
    course: Callable[..., Course],
) -> None:
    made = course(train__steps=5)
    made.reports = {1: {"rolled_back": undone(1, 0, error=UnstableError("3 times in a row"))}}
    with pytest.raises(UnstableError, match="3 times in a row"):
        made.run()
    assert made.calls == ["before", "step 1", "engine 2", "save"]
    assert not made.stage.finished.is_set()


def test_probes_come_before_the_first_step_and_then_every_few(course: Callable[..., Course]) -> None:
    """The one after step 4 finds version 4 bad: the good weights are saved, since a checkpoint may hold
    version 3 or 4."""
    made = course(train__steps=5, supervise__probe_every=2)
    made.found_bad = {4: undone(4, 2)}
    made.run()
    assert " ".join(made.calls) == (
        "before probe step 1 engine 1 step 2 engine 2 probe step 3 engine 3 step 4 engine 4 probe save "
        "step 6 engine 6 save after"
    )
    (event,) = made.of(RolledBack)
    assert (event.bad_version, event.good_version, event.policy_version) == (4, 2, 5)


def test_without_an_interval_or_a_supervisor_nothing_is_probed(course: Callable[..., Course]) -> None:
    unsupervised = course(supervise__probe_every=1)
    unsupervised.probes = False
    for made in (course(), unsupervised):
        made.run()
        assert "probe" not in made.calls
