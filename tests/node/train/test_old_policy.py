"""Old log-probabilities in a batch, kept up to date from step to step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.ewma import Ewma
from node.train.old_policy import OldPolicy, sequences_of
from node.train.settings import TrainSettings
from node.train.snapshots import Snapshots
from node.train.step import StepReport, Trainer
from node.weight.batch import TrainingBatch, collate
from protocol.errors import ConfigError
from tests.node.train.tolerance import near

SETTINGS = TrainSettings(measure_start_kl=False)


@pytest.fixture
def batch(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    """Rows 0 and 1 are own, 2 is a peer's. Row 0 is of versions 0 and 1, row 1 of version 2."""
    groups = [make_training_group(size=2, seed=2), make_training_group("peer", size=1, seed=5)]
    made = collate(groups, SETTINGS.weight, policy)
    versions_BT = torch.full_like(made.versions_BT, -1)
    versions_BT[0, made.mask_BT[0]] = 1
    versions_BT[0, 0] = 0
    versions_BT[1, made.mask_BT[1]] = 2
    return dataclasses.replace(made, versions_BT=versions_BT)


class Model:
    """In the trainer's place: one weight, and log pi of every token is its value. Version v has the weight
    v, and a step makes the next one."""

    def __init__(self, snapshots: Snapshots | None = None, beta: float | None = None) -> None:
        self.policy_version = 0
        self.batches: list[TrainingBatch] = []
        self.changes: dict[str, Any] = {}
        self._weight = torch.zeros(1)
        ewma = None if beta is None else Ewma(self.learning(), beta=beta)
        self.old = OldPolicy(cast("Trainer", self), self, snapshots=snapshots, ewma=ewma)

    def learning(self) -> dict[str, torch.Tensor]:
        return {"w": self._weight}

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return [np.full(len(each.token_ids), float(self._weight), np.float32) for each in sequences]

    def give(self, policy_version: int) -> None:
        """Another version, not by a step."""
        self.policy_version = policy_version
        self._weight.fill_(policy_version)

    def step(self, batch: TrainingBatch) -> StepReport:
        self.batches.append(batch)
        if not self.changes.get("skipped"):
            self.give(self.policy_version + (2 if self.changes.get("rolled_back") else 1))
        return cast("StepReport", SimpleNamespace(**{"skipped": False, "rolled_back": None, **self.changes}))

    def filled(self, batch: TrainingBatch, version: int) -> TrainingBatch:
        """As the step after this version meets it."""
        while self.policy_version < version:
            self.old.step(batch)
        self.old.step(batch)
        return self.batches[-1]


def rows(values_BT: torch.Tensor | None, batch: TrainingBatch) -> list[list[float]]:
    """Of the unmasked places; there must be nothing in the others."""
    assert values_BT is not None
    assert values_BT[~batch.mask_BT].isnan().all()
    return [row[mask].tolist() for row, mask in zip(values_BT, batch.mask_BT, strict=True)]


def test_snapshots_give_each_token_its_version_and_other_lineages_nothing(batch: TrainingBatch) -> None:
    filled = Model(Snapshots(versions=3, max_bytes=1 << 20)).filled(batch, 2)
    first, second, foreign = rows(filled.snapshot_BT, batch)
    assert first == [0.0] + [1.0] * (len(first) - 1)
    assert len(first) > 1
    assert set(second) == {2.0}
    assert all(map(math.isnan, foreign))
    assert filled.exact_BT is not None
    assert torch.equal(filled.exact_BT, batch.mask_BT & torch.tensor([[True], [True], [False]]))
    assert filled.ewma_BT is None


def test_what_is_no_longer_kept_is_the_nearest_and_not_exact(batch: TrainingBatch) -> None:
    filled = Model(Snapshots(versions=2, max_bytes=1 << 20)).filled(batch, 2)
    assert rows(filled.snapshot_BT, batch)[0][0] == 1.0
    assert filled.exact_BT is not None
    assert not filled.exact_BT[0, 0]
    assert filled.exact_BT[0, 1]


def test_the_average_is_there_for_all_rows(batch: TrainingBatch) -> None:
    """beta 0.5 over the weights 0, 1, 2: (0.25 x 0 + 0.5 x 1 + 2) / 1.75."""
    filled = Model(beta=0.5).filled(batch, 2)
    for row in rows(filled.ewma_BT, batch):
        assert row == pytest.approx([2.5 / 1.75] * len(row))
    assert (filled.snapshot_BT, filled.exact_BT) == (None, None)


def test_weights_that_were_given_are_noticed_and_begin_a_new_average(batch: TrainingBatch) -> None:
    """A merge after version 1, as 7."""
    model = Model(Snapshots(versions=3, max_bytes=1 << 20), beta=0.5)
    model.old.step(batch)
    model.give(7)
    model.old.step(batch)
    assert rows(model.batches[-1].ewma_BT, batch)[2][0] == 7.0
    # row 1 is of version 2: 1 is the newest that is not newer
    assert rows(model.batches[-1].snapshot_BT, batch)[1][0] == 1.0
    model.old.step(batch)
    assert rows(model.batches[-1].ewma_BT, batch)[2][0] == pytest.approx((0.5 * 7 + 8) / 1.5)


def test_a_skipped_step_and_one_that_was_rolled_back_are_not_in_the_average(batch: TrainingBatch) -> None:
    """Versions 0 and 1 are; then a step is skipped, and the next one ends as version 3 without any of its
    own."""
    model = Model(Snapshots(versions=8, max_bytes=1 << 20), beta=0.5)
    model.old.step(batch)
    model.changes = {"skipped": True}
    model.old.step(batch)
    model.changes = {"rolled_back": object()}
    model.old.step(batch)
    model.changes = {}
    model.old.step(batch)
    assert rows(model.batches[-1].ewma_BT, batch)[2][0] == pytest.approx((0.5 * 0 + 1) / 1.5)
    assert rows(model.batches[-1].snapshot_BT, batch)[1][0] == 1.0  # there never was a version 2


def test_nothing_kept_gives_the_batch_as_it_is(batch: TrainingBatch) -> None:
    model = Model()
    model.old.step(batch)
    assert model.batches == [batch]


def test_no_room_for_a_copy_is_told_when_it_begins() -> None:
    with pytest.raises(ConfigError, match=r"train\.snapshot_bytes is 3 and one copy of the weights takes 4"):
        Model(Snapshots(versions=2, max_bytes=3))


def test_rows_of_a_batch_become_sequences(policy: Policy, make_training_group: Callable[..., Any]) -> None:
    groups = [make_training_group(seed=1), make_training_group(seed=2, temperature=0.7)]
    found = sequences_of(collate(groups, SETTINGS.weight, policy), (0, 5))
    for sequence, group, place in ((found[0], groups[0], 0), (found[1], groups[1], 1)):
        assert sequence.prompt_ids == group.prompt_ids
        assert sequence.token_ids == tuple(group.rollouts[place].tokens_T.tolist())
        assert sequence.temperature == pytest.approx(group.temperature)


@pytest.mark.slow
def test_noise_of_an_engine_shows_as_mismatch_and_steps_as_staleness(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    """mu is log pi of version 0 with noise of deviation 0.05, whose mean size is 0.05 sqrt(2 / pi)."""
    trainer = Trainer(policy, SETTINGS)
    snapshots = Snapshots(versions=4, max_bytes=1 << 30)
    old = OldPolicy(trainer, trainer, snapshots=snapshots, ewma=None)
    batch = collate([make_training_group(seed=seed) for seed in range(4)], SETTINGS.weight, policy)
    start = old.step(batch).logprobs_BT
    noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    batch = dataclasses.replace(
        batch,
        behaviour_BT=start + 0.05 * noise,
        versions_BT=torch.where(batch.mask_BT, 0, -1),
    )
    assert old.step(batch).policy_version == 2
    filled = old.fill(batch)
    assert filled.snapshot_BT is not None
    assert filled.snapshot_BT[batch.mask_BT].numpy() == near(start[batch.mask_BT].numpy(), policy)
    report = old.step(batch)
    apart = report.gaps
    assert apart is not None
    assert apart.exact == 1.0
    assert apart.mismatch.mean_abs == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.25)
    moved = (report.logprobs_BT - start)[batch.mask_BT].abs().mean()
    assert apart.staleness.mean_abs == pytest.approx(float(moved), rel=1e-3)
