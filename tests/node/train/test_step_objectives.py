"""What a step gives an objective: statistics over the batch, lags, old log-probabilities, rows that are
numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train import step
from node.train.objectives import all_presets, open_objective
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from node.weight.settings import Treatment
from tests.node.train.conftest import gradients
from tests.node.train.tolerance import same_gradients

Make = Callable[..., Any]
SETTINGS = TrainSettings()


WHOLE = {
    "sat": open_objective("sat", {"quantile": 0.5}),
    "m2po_mask": open_objective("m2po_mask"),
    "m2po_clip": open_objective("m2po_clip", {"floor_low": 0.0, "floor_high": 0.0}),
    "ais": open_objective("ais", {"kappa": 1.0}),
    "mis": open_objective("mis", {"normalise": True}),
    "mis-means": open_objective("mis", {"aggregation": "seq_mean_token_mean"}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_statistics_are_those_of_the_batch_whatever_the_micro_batches(
    policy: Policy, make_training_group: Make, name: str
) -> None:
    """Own and followers' groups share a treatment, and foreign ones stand between them."""
    groups = [
        make_training_group(seed=1, advantages=(1.0, -1.0, 0.5, -0.5)),
        make_training_group("a", seed=3),
        make_training_group("f", seed=2, own_lineage=True, treatment=Treatment.OWN),
        make_training_group(seed=4, advantages=(1.0, -1.0, 1.0, -1.0)),
    ]
    settings = dataclasses.replace(SETTINGS, own=WHOLE[name])
    batch = collate(nearer(policy, groups), settings.weight, policy)
    whole = gradients(Trainer(policy, settings), batch)
    parts = gradients(Trainer(policy, dataclasses.replace(settings, micro_batch_tokens=60)), batch)
    assert all(gradient.abs().max() > 0 for gradient in whole.values())
    same_gradients(parts, whole, policy)


def nearer(policy: Policy, groups: list[Any]) -> list[Any]:
    """The groups with log mu within half a nat of log pi."""
    trainer = Trainer(policy, SETTINGS)
    found = []
    for group in groups:
        scored = trainer.logprobs(
            [TokenSequence(group.prompt_ids, tuple(each.tokens_T.tolist())) for each in group.rollouts]
        )
        rollouts = tuple(
            dataclasses.replace(each, behaviour_T=(row + 0.25 * each.behaviour_T + 0.6).clip(max=0.0))
            for each, row in zip(group.rollouts, scored, strict=True)
        )
        found.append(dataclasses.replace(group, rollouts=rollouts))
    return found


def test_one_micro_batch_costs_no_second_pass(
    policy: Policy, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    real = step.completion_logprobs

    def counted(model: torch.nn.Module, tokens_BL: torch.Tensor, *rest: Any) -> Any:
        passes.append((len(tokens_BL), torch.is_grad_enabled()))
        return real(model, tokens_BL, *rest)

    monkeypatch.setattr(step, "completion_logprobs", counted)
    settings = dataclasses.replace(SETTINGS, own=WHOLE["sat"], measure_start_kl=False)
    batch = collate(groups, settings.weight, policy)
    Trainer(policy, settings).step(batch)
    assert passes == [(20, True)]
    passes.clear()
    Trainer(policy, dataclasses.replace(settings, micro_batch_tokens=60)).step(batch)
    # without gradient only the rows whose objective asks for it: two own groups
    assert sum(rows for rows, graded in passes if not graded) == 8
    assert sum(rows for rows, graded in passes if graded) == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_finite_advantage_is_left_out_and_counted(
    policy: Policy, batch: TrainingBatch, bad: float
) -> None:
    spoiled, without = (batch.advantages_B.clone() for _ in range(2))
    spoiled[2], without[2] = bad, 0.0
    trainer, other = Trainer(policy, SETTINGS), Trainer(policy, SETTINGS)
    report = trainer.step(dataclasses.replace(batch, advantages_B=spoiled))
    plain = other.step(dataclasses.replace(batch, advantages_B=without))
    assert (report.skipped, report.nonfinite, plain.nonfinite) == (False, 1, 0)
    assert report.loss == plain.loss
    assert all(math.isfinite(share.advantage_abs) for share in report.sources)
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_lags_are_those_of_each_token_or_of_the_group(policy: Policy, make_training_group: Make) -> None:
    own, follower, foreign = (
        make_training_group(seed=1, lag=1),
        make_training_group("f", seed=2, lag=2, own_lineage=True, treatment=Treatment.OWN),
        make_training_group("a", seed=3, lag=5),
    )
    versions = [np.arange(len(each.tokens_T)) + 4 for each in own.rollouts]
    own, foreign = (
        dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(each, versions_T=row)
                for each, row in zip(group.rollouts, rows, strict=True)
            ),
        )
        for group, rows in ((own, versions), (foreign, [np.zeros_like(e.tokens_T) for e in foreign.rollouts]))
    )
    batch = collate([own, follower, foreign], SETTINGS.weight, policy)
    lags_BT = batch.lags(6)
    for row, expected in enumerate(versions):
        # a version the trainer does not have yet counts as its own
        assert lags_BT[row, : len(expected)].tolist() == [max(0, 6 - each) for each in expected]
    assert (lags_BT[4:8][batch.mask_BT[4:8]] == 2).all()
    assert (lags_BT[8:][batch.mask_BT[8:]] == 5).all()  # versions of another lineage say nothing
    assert (batch.versions_BT[4:] == -1).all()
    assert batch.rewards_B.tolist() == pytest.approx([*own.rewards, *follower.rewards, *foreign.rewards])


def test_old_log_probabilities_of_the_batch_reach_the_objective(
    policy: Policy, make_training_group: Make
) -> None:
    settings = dataclasses.replace(SETTINGS, own=open_objective("copris"))
    batch = collate([make_training_group(seed=1, advantages=(1.0,) * 4)], settings.weight, policy)
    with pytest.raises(ValueError, match="gave no snapshot"):
        Trainer(policy, settings).step(batch)
    far = torch.full(batch.mask_BT.shape, -30.0)  # far below pi: clipped away
    [share] = Trainer(policy, settings).step(dataclasses.replace(batch, snapshot_BT=far)).sources
    assert share.kept == 0.0
    unknown = torch.full_like(far, math.nan)
    [share] = Trainer(policy, settings).step(dataclasses.replace(batch, snapshot_BT=unknown)).sources
    assert share.kept == 1.0


@pytest.mark.slow
def test_every_preset_for_own_groups_makes_a_step(policy: Policy, make_training_group: Make) -> None:
    """In micro-batches, on own, followers' and foreign groups; with what optional parts would fill in."""
    groups = [
        make_training_group(seed=1, lag=3),
        make_training_group("f", seed=2, own_lineage=True, treatment=Treatment.OWN),
        make_training_group("a", seed=3),
    ]
    groups = nearer(policy, groups)
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, micro_batch_tokens=60, measure_start_kl=False))
    for preset in all_presets():
        own = preset.make(**dict.fromkeys(preset.required, 0.5))
        foreign = own if preset.foreign else SETTINGS.compat
        trainer.settings = dataclasses.replace(trainer.settings, own=own, compat=foreign)
        batch = collate(groups, trainer.settings.weight, policy)
        old = dataclasses.replace(
            batch, snapshot_BT=batch.behaviour_BT + 0.1, ewma_BT=batch.behaviour_BT - 0.1
        )
        report = trainer.step(old)
        assert (report.skipped, report.nonfinite) == (False, 0), preset.name
        assert report.grad_norm > 0, preset.name
