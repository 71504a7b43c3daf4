"""What an update weighs, measured on checkpoints: more than nothing, less than a copy, of the newest two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.rollout.policy import Policy
from node.train.checkpoint import save_checkpoint
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weights.update_size import update_between_checkpoints
from protocol.errors import ModelError


def save(trainer: Trainer, folder: Path, version: int, change: float) -> None:
    """The trainer as it is, with one tensor moved by `change`, as this version."""
    with torch.no_grad():
        next(iter(trainer.learning().values())).add_(change)
    trainer.policy_version = version
    save_checkpoint(trainer, folder / f"v{version}")


@pytest.fixture
def trainer(compiled_delta: None, tiny_policy_path: Path) -> Trainer:
    return Trainer(Policy.open(tiny_policy_path), TrainSettings())


def test_the_newest_two_are_compared(trainer: Trainer, tmp_path: Path) -> None:
    save(trainer, tmp_path, 8, 0.0)
    save(trainer, tmp_path, 9, 1.0)
    save(trainer, tmp_path, 12, 0.0)
    found = update_between_checkpoints(tmp_path)
    assert found is not None
    assert (found.older, found.newer) == (9, 12)
    params = sum(tensor.numel() for tensor in trainer.learning().values())
    assert found.full_bytes == 2 * params
    save(trainer, tmp_path, 13, 1.0)
    moved = update_between_checkpoints(tmp_path)
    assert moved is not None
    assert found.update_bytes < moved.update_bytes < moved.full_bytes


def test_one_checkpoint_tells_nothing(trainer: Trainer, tmp_path: Path) -> None:
    save(trainer, tmp_path, 8, 0.0)
    assert update_between_checkpoints(tmp_path) is None


def test_one_that_cannot_be_read_is_a_sentence(trainer: Trainer, tmp_path: Path) -> None:
    save(trainer, tmp_path, 8, 0.0)
    save(trainer, tmp_path, 9, 0.0)
    (tmp_path / "v9" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="v9 is not a complete checkpoint"):
        update_between_checkpoints(tmp_path)
