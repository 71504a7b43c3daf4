"""The trainer after the last step outlives a kill, and only a kill."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train import recent
from node.train.recent import save_recent, state_bytes, take_recent
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch

SETTINGS = TrainSettings()


def stepped(policy: Policy, batch: TrainingBatch, count: int = 2) -> Trainer:
    trainer = Trainer(policy, SETTINGS)
    for _ in range(count):
        trainer.step(batch)
    return trainer


def test_weights_moments_and_counters_come_back_bit_for_bit(
    policy: Policy, batch: TrainingBatch, tmp_path: Path
) -> None:
    before = stepped(policy, batch)
    save_recent(before, tmp_path / "recent")
    after, engine = Trainer(policy, SETTINGS), TransformersEngine(policy)
    assert take_recent(after, engine, tmp_path / "recent")
    assert engine.policy_version == after.policy_version == before.policy_version
    assert after.updates == before.updates
    for trainer in (before, after):
        trainer.step(batch)
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(before.learning().values(), after.learning().values(), strict=True)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["recent"]
    assert (tmp_path / "recent").stat().st_size < 1.1 * state_bytes(before)


@pytest.mark.parametrize("what", ["another boot", "older", "damaged", "missing", "another optimiser"])
def test_what_is_not_gone_on_from(
    policy: Policy, batch: TrainingBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "recent"
    if what != "missing":
        save_recent(stepped(policy, batch, 1), path)
    trainer = stepped(policy, batch, 1 if what == "older" else 0)
    if what == "another boot":
        monkeypatch.setattr(recent, "_BOOT", tmp_path / "boot_id")
        (tmp_path / "boot_id").write_text("another")
    if what == "damaged":
        path.write_bytes(path.read_bytes()[:-100])
    if what == "another optimiser":
        trainer.settings = dataclasses.replace(SETTINGS, optimiser="adamw_8bit")
    weights = {name: tensor.clone() for name, tensor in trainer.learning().items()}
    assert not take_recent(trainer, TransformersEngine(policy), path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.learning().items())


def test_a_full_disk_leaves_the_old_file(
    policy: Policy, batch: TrainingBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = stepped(policy, batch, 1)
    save_recent(trainer, tmp_path / "recent")
    kept = (tmp_path / "recent").read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recent, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_recent(trainer, tmp_path / "recent")
    assert (tmp_path / "recent").read_bytes() == kept
    assert len(list(tmp_path.iterdir())) == 1
