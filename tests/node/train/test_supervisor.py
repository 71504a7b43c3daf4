"""The supervisor on a real trainer: what is bad goes back as a new version, and too much of it ends the
run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from node.config import SuperviseConfig
from node.rollout.policy import Policy
from node.train.objectives.presets.direct import dppo_tv
from node.train.old_policy import sequences_of
from node.train.settings import TrainSettings
from node.train.stability import RollBack, Sign
from node.train.step import StepReport, Trainer
from node.train.supervisor import Supervisor
from node.weight.batch import TrainingBatch, collate
from protocol.errors import UnstableError

SETTINGS = TrainSettings(measure_start_kl=False, warmup_steps=0)
LIMITS = SuperviseConfig()
WIDE = SuperviseConfig(kl_step=0.0, ess=0.0, grad_norm=0.0)


@pytest.fixture
def batch(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    return collate(
        [make_training_group(seed=1), make_training_group("peer", seed=2)], SETTINGS.weight, policy
    )


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}


def rolled_back(done: StepReport) -> RollBack:
    assert done.rolled_back is not None
    return done.rolled_back


def wild(trainer: Trainer) -> None:
    """The next step is far too large."""
    trainer.settings = dataclasses.replace(trainer.settings, learning_rate=10.0)


def tame(trainer: Trainer) -> None:
    trainer.settings = SETTINGS


def test_good_steps_are_the_trainers_own(policy: Policy, batch: TrainingBatch) -> None:
    trainer, alone = Trainer(policy, SETTINGS), Trainer(policy, SETTINGS)
    supervisor = Supervisor(trainer, LIMITS)
    for _ in range(3):
        done, report = supervisor.step(batch), alone.step(batch)
        assert done.rolled_back is None
        assert (done.loss, done.policy_version) == (report.loss, report.policy_version)
    assert weights(trainer) == weights(alone)
    assert supervisor.rolled_back == 0


def test_the_divergence_of_a_step_is_that_of_its_own_rollouts(policy: Policy, batch: TrainingBatch) -> None:
    """k3 over the tokens of the own group's rollouts, by hand."""
    trainer, alone = Trainer(policy, SETTINGS), Trainer(policy, SETTINGS)
    own = batch.own_B.nonzero().squeeze(-1).tolist()
    assert own == [0, 1, 2, 3]
    sequences = sequences_of(batch, own)
    before = np.concatenate(alone.logprobs(sequences))
    alone.step(batch)
    log_ratio = np.concatenate(alone.logprobs(sequences)) - before
    done = Supervisor(trainer, WIDE).step(batch)
    assert done.kl_step == pytest.approx(float(np.mean(np.exp(log_ratio) - 1 - log_ratio)), rel=1e-3)
    assert done.kl_step > 1e-5


def test_a_bad_step_goes_back_and_training_goes_on_from_there(policy: Policy, batch: TrainingBatch) -> None:
    trainer, alone = (Trainer(policy, SETTINGS, policy_version=7) for _ in range(2))
    supervisor = Supervisor(trainer, LIMITS)
    supervisor.step(batch)
    alone.step(batch)
    wild(trainer)
    done = supervisor.step(batch)
    found = rolled_back(done)
    assert found.alarm.sign is Sign.KL_STEP
    assert done.kl_step == found.alarm.value > found.alarm.limit == 0.5
    assert (found.bad_version, found.good_version, found.policy_version) == (9, 8, 10)
    assert (done.policy_version, trainer.policy_version, trainer.updates, trainer.steps) == (9, 10, 1, 1)
    assert (found.total, found.error) == (1, None)
    assert found.text.startswith("version 9 was rolled back: one step moved the policy by")
    assert found.text.endswith("(limit 0.5); version 10 has the weights of 8")
    assert weights(trainer) == weights(alone)
    tame(trainer)
    assert supervisor.step(batch).rolled_back is None
    alone.step(batch)
    assert weights(trainer) == weights(alone)
    assert trainer.policy_version == 11


def test_weights_that_broke_go_back(policy: Policy, batch: TrainingBatch) -> None:
    """Finite gradients, and a step after which no logit is a number."""
    trainer = Trainer(policy, SETTINGS)
    before = weights(trainer)
    trainer.settings = dataclasses.replace(SETTINGS, learning_rate=1e38)
    done = Supervisor(trainer, LIMITS).step(batch)
    assert rolled_back(done).alarm.sign is Sign.KL_STEP
    assert math.isnan(rolled_back(done).alarm.value)
    assert weights(trainer) == before


def test_too_many_in_a_row_end_the_run_with_the_good_weights_in_place(
    policy: Policy, batch: TrainingBatch
) -> None:
    trainer = Trainer(policy, SETTINGS)
    supervisor = Supervisor(trainer, SuperviseConfig(in_a_row=2))
    before = weights(trainer)
    wild(trainer)
    assert rolled_back(supervisor.step(batch)).error is None
    last = rolled_back(supervisor.step(batch))
    assert weights(trainer) == before
    assert (last.total, last.policy_version) == (2, 4)
    assert isinstance(last.error, UnstableError)
    assert str(last.error).startswith(
        "2 times in a row an update had to be rolled back, now because one step"
    )
    assert "Lower train.learning_rate" in str(last.error)


def test_a_skipped_step_is_neither_good_nor_bad(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, SETTINGS)
    broken = dataclasses.replace(batch, advantages_B=torch.full_like(batch.advantages_B, math.nan))
    done = Supervisor(trainer, LIMITS).step(broken)
    assert done.skipped
    assert (done.kl_step, done.rolled_back, trainer.policy_version) == (None, None, 0)


def test_the_sample_size_of_the_own_tokens_is_watched(policy: Policy, batch: TrainingBatch) -> None:
    """One own token was 20 nats less likely to the engine than it is here: its weight outdoes all others'."""
    behaviour_BT = batch.behaviour_BT.clone()
    behaviour_BT[0, 0] -= 20.0
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, own=dppo_tv()))
    found = rolled_back(
        Supervisor(trainer, WIDE.model_copy(update={"ess": 0.2})).step(
            dataclasses.replace(batch, behaviour_BT=behaviour_BT)
        )
    )
    tokens = int(batch.mask_BT[batch.own_B].sum())
    assert found.alarm.sign is Sign.ESS
    assert found.alarm.value == pytest.approx(1 / tokens, rel=0.05)
    # The default caps that weight at 1, so it makes no step on its own.
    done = Supervisor(Trainer(policy, SETTINGS), WIDE.model_copy(update={"ess": 0.2})).step(
        dataclasses.replace(batch, behaviour_BT=behaviour_BT)
    )
    assert done.rolled_back is None


def test_without_own_rollouts_or_rows_no_divergence_is_measured(
    policy: Policy, batch: TrainingBatch, make_training_group: Callable[..., Any]
) -> None:
    foreign = collate([make_training_group("peer", seed=2)], SETTINGS.weight, policy)
    assert Supervisor(Trainer(policy, SETTINGS), LIMITS).step(foreign).kl_step is None
    assert Supervisor(Trainer(policy, SETTINGS), SuperviseConfig(), kl_rows=0).step(batch).kl_step is None


def test_weights_that_were_given_are_what_a_bad_step_goes_back_to(
    policy: Policy, batch: TrainingBatch
) -> None:
    """An adopted merge, which has its own gate."""
    trainer = Trainer(policy, SETTINGS)
    supervisor = Supervisor(trainer, LIMITS)
    supervisor.step(batch)
    trainer.adopt({name: 1.01 * tensor for name, tensor in trainer.state_dict().items()}, 2)
    merged = weights(trainer)
    wild(trainer)
    assert rolled_back(supervisor.step(batch)).good_version == 2
    assert weights(trainer) == merged
    assert trainer.updates == 0


def test_a_bad_probe_goes_back_to_the_last_good_one(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, SETTINGS)
    supervisor = Supervisor(trainer, SuperviseConfig(in_a_row=2, probe_every=1))
    supervisor.step(batch)
    assert supervisor.probe([1.0] * 32) is None
    proven = weights(trainer)
    for _ in range(2):
        supervisor.step(batch)
    found = supervisor.probe([0.0] * 32)
    assert found is not None
    assert (found.alarm.sign, found.alarm.value) == (Sign.PROBE_REWARD, 1.0)
    assert (found.bad_version, found.good_version, found.policy_version) == (3, 1, 4)
    assert weights(trainer) == proven
    assert (trainer.updates, trainer.steps) == (1, 1)
    supervisor.step(batch)
    again = supervisor.probe([0.0] * 32)
    assert again is not None
    assert isinstance(again.error, UnstableError)
    assert weights(trainer) == proven
    assert trainer.policy_version == 6


def test_two_states_are_held_only_for_probes(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, SETTINGS)
    one, two = (Supervisor(trainer, SuperviseConfig(probe_every=every)) for every in (0, 5))
    for _ in range(2):
        one.step(batch)
        two.step(batch)
    two.probe([1.0] * 32)
    assert two.nbytes == 2 * one.nbytes
    with pytest.raises(ValueError, match="without probing"):
        one.probe([1.0] * 32)


def test_a_step_of_several_passes_goes_back_as_one(policy: Policy, batch: TrainingBatch) -> None:
    """Also what slow-fast remembers of it."""
    settings = dataclasses.replace(SETTINGS, slow_fast=True)
    trainer = Trainer(policy, settings)
    supervisor = Supervisor(trainer, LIMITS)
    assert supervisor.step(batch).rolled_back is None
    assert trainer.slow_fast is not None
    before, state = weights(trainer), trainer.slow_fast.state
    assert (trainer.updates, len(state.entropies)) == (4, 1)
    wild(trainer)
    found = rolled_back(supervisor.step(batch))
    assert (found.bad_version, found.good_version, found.policy_version) == (2, 1, 3)
    assert weights(trainer) == before
    assert (trainer.updates, trainer.slow_fast.state) == (4, state)
