"""Slow-fast updates: where the weights go, when it ends, and with a real trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from node.rollout.policy import Policy
from node.train import slow_fast as module
from node.train.objectives import Reference
from node.train.objectives.presets.proximal import ppo_clip
from node.train.settings import TrainSettings
from node.train.slow_fast import SlowFast, SlowFastState
from node.train.step import Trainer
from node.weight.batch import collate
from tests.node.train.tolerance import rounding, summands


@dataclass(frozen=True)
class Made:
    """A pass of the toy below."""

    skipped: bool
    met: float
    """The weight it started from."""


class Toy:
    """One weight that every pass moves down by its own gradient, 0.5 w; passes in `skips` do nothing."""

    def __init__(self, weight: float, skips: frozenset[int] = frozenset()) -> None:
        self.learning = {"w": torch.tensor([weight])}
        self.made = 0
        self._skips = skips

    def __call__(self) -> Made:
        self.made += 1
        met = float(self.learning["w"])
        if self.made not in self._skips:
            self.learning["w"].mul_(0.5)
        return Made(self.made in self._skips, met)


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 3)


def test_three_passes_then_back_a_fifth_of_the_way_then_one_more() -> None:
    """8, 4, 2, 1; back to 8 + 0.8 (1 - 8) = 2.4; last pass 1.2."""
    toy = Toy(8.0)
    reports = SlowFast().step(toy.learning, toy)
    assert [report.met for report in reports] == pytest.approx([8.0, 4.0, 2.0, 2.4])
    assert float(toy.learning["w"]) == pytest.approx(1.2)


@pytest.mark.parametrize(("step", "expected"), [(0.0, 4.0), (1.0, 1.0), (0.5, 2.5)])
def test_no_step_is_a_plain_update_and_a_whole_one_never_goes_back(
    step: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes from 8 to 2; back to 8 - 6 a; halved."""
    toy = Toy(8.0)
    monkeypatch.setattr(module, "PASSES", 2)
    monkeypatch.setattr(module, "STEP", step)
    SlowFast().step(toy.learning, toy)
    assert float(toy.learning["w"]) == expected


def test_a_first_pass_that_is_skipped_changes_nothing_and_is_the_only_one() -> None:
    toy = Toy(8.0, skips=frozenset({1}))
    reports = SlowFast().step(toy.learning, toy)
    assert [report.skipped for report in reports] == [True]
    assert float(toy.learning["w"]) == 8.0


def test_a_later_pass_that_is_skipped_is_the_last_one() -> None:
    """8, 4, then skipped at 4; back to 8 + 0.8 (4 - 8) = 4.8, and no further pass."""
    toy = Toy(8.0, skips=frozenset({2}))
    reports = SlowFast().step(toy.learning, toy)
    assert [report.skipped for report in reports] == [False, True]
    assert float(toy.learning["w"]) == pytest.approx(4.8)


@pytest.mark.usefixtures("short_window")
def test_a_rise_of_one_deviation_of_the_last_steps_ends_it_for_good() -> None:
    """0, 0, 3: mean 1, deviation sqrt(2), z = 1.41. Before, with 0, 0, 0, z is 0."""
    slow_fast = SlowFast()
    assert [slow_fast.observe(entropy) for entropy in (9.0, 0.0, 0.0, 0.0)] == [False] * 4
    assert slow_fast.state.on
    assert slow_fast.observe(3.0)
    toy = Toy(8.0)
    for _ in range(5):
        assert not slow_fast.observe(0.0)
    assert not slow_fast.state.on
    assert [report.met for report in slow_fast.step(toy.learning, toy)] == [8.0]


@pytest.mark.usefixtures("short_window")
def test_the_deviation_is_that_of_the_population() -> None:
    """0, 1, 2: (2 - 1) / 0.816 = 1.22; by the sample's deviation, 1, it would be no more than 1."""
    slow_fast = SlowFast()
    assert [slow_fast.observe(entropy) for entropy in (0.0, 1.0, 2.0)] == [False, False, True]


@pytest.mark.usefixtures("short_window")
def test_a_smaller_rise_or_a_fall_does_not() -> None:
    """2, 0, 2: z = (2 - 4/3) / 0.943 = 0.707. Then 0, 2, -7: z is negative."""
    slow_fast = SlowFast()
    assert not any(slow_fast.observe(entropy) for entropy in (2.0, 0.0, 2.0, -7.0))
    assert slow_fast.state.on


def test_too_few_steps_end_nothing() -> None:
    slow_fast = SlowFast()
    assert not any(slow_fast.observe(2.0**step) for step in range(29))
    assert slow_fast.observe(2.0**29)


@pytest.mark.usefixtures("short_window")
def test_a_resumed_run_goes_on_where_it_was() -> None:
    first = SlowFast()
    for entropy in (9.0, 0.0, 0.0):
        first.observe(entropy)
    state = msgspec.json.decode(msgspec.json.encode(first.state), type=SlowFastState)
    second = SlowFast()
    second.state = state
    assert second.observe(3.0)
    assert second.state == SlowFastState(on=False, entropies=(0.0, 0.0, 3.0))


TRAINED = TrainSettings(measure_start_kl=False, warmup_steps=0)
SLOW_FAST = dataclasses.replace(TRAINED, slow_fast=True)


def test_a_trainer_steps_as_by_hand(policy: Policy, make_training_group: Callable[..., Any]) -> None:
    """Against three steps, an interpolation and one more, written out, each measured against log pi of the
    first; moments are not repositioned, and all of it is one version."""
    settings = dataclasses.replace(TRAINED, own=ppo_clip(denominator=Reference.INGESTION))
    batch = collate([make_training_group(seed=1)], settings.weight, policy)
    by_hand = Trainer(policy, settings)
    trainer = Trainer(policy, dataclasses.replace(settings, slow_fast=True), policy_version=5)
    start = by_hand.state_dict()
    first = by_hand.step(batch)
    fixed = dataclasses.replace(batch, ingestion_BT=first.logprobs_BT)
    norms = [first.grad_norm, *(by_hand.step(fixed).grad_norm for _ in range(2))]
    for name, tensor in by_hand.learning().items():
        tensor.copy_(start[name] + 0.8 * (tensor - start[name]))
    norms.append(by_hand.step(fixed).grad_norm)

    report = trainer.step(batch)
    assert (report.policy_version, trainer.policy_version, trainer.updates) == (6, 6, 4)
    assert (report.loss, report.entropy) == (first.loss, first.entropy)
    assert report.grad_norm == pytest.approx(max(norms), rel=1e-4)
    assert torch.equal(report.logprobs_BT, first.logprobs_BT)
    expected = by_hand.state_dict()
    for name, tensor in trainer.state_dict().items():
        # Adam divides by the root of the second moment: relative errors of gradients reach the weights
        # multiplied by the learning rate, once for each of four passes.
        limit = 4 * trainer.settings.learning_rate * rounding(2 * summands(policy)) + rounding(1)
        assert torch.allclose(tensor, expected[name], rtol=0, atol=limit), name
        assert not torch.equal(tensor, start[name])
    for one, other in zip(trainer.optimiser.state.values(), by_hand.optimiser.state.values(), strict=True):
        assert torch.allclose(one["exp_avg"], other["exp_avg"], rtol=1e-3, atol=1e-5)


def test_once_it_is_off_a_trainer_makes_plain_steps(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    batch = collate([make_training_group(seed=1)], TRAINED.weight, policy)
    plain, off = Trainer(policy, TRAINED), Trainer(policy, SLOW_FAST)
    assert off.slow_fast is not None
    off.slow_fast.state = SlowFastState(on=False)
    assert [trainer.step(batch).policy_version for trainer in (plain, off)] == [1, 1]
    assert off.updates == 1
    for name, tensor in off.learning().items():
        assert torch.equal(tensor, plain.learning()[name])
    assert len(off.slow_fast.state.entropies) == 1


def test_a_step_that_is_not_finite_changes_nothing_and_is_not_observed(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    batch = collate([make_training_group(seed=1)], TRAINED.weight, policy)
    trainer = Trainer(policy, SLOW_FAST)
    before = trainer.state_dict()
    report = trainer.step(dataclasses.replace(batch, lambda_S=(float("nan"),) * len(batch.lambda_S)))
    assert (report.skipped, trainer.policy_version, trainer.updates, trainer.skipped_steps) == (True, 0, 0, 1)
    assert trainer.slow_fast is not None
    assert trainer.slow_fast.state == SlowFastState()
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, before[name])
