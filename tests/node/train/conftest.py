"""The tiny policy, opened once, and a batch with something of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.rollout.policy import Policy
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from node.weight.settings import Treatment


@pytest.fixture(scope="session")
def policy(tiny_policy_path: Path) -> Policy:
    """Has 46 tokens, 128 positions, end token 1."""
    return Policy.open(tiny_policy_path)


@pytest.fixture
def groups(make_training_group: Callable[..., Any]) -> list[Any]:
    """Two own groups and every treatment of foreign ones, with different trust; four rollouts each."""
    return [
        make_training_group(seed=1),
        make_training_group(seed=2, temperature=0.7),
        make_training_group("a", seed=3, trust=0.5),
        make_training_group("a", seed=4, treatment=Treatment.HACPO, uses=1),
        make_training_group("b", seed=5, treatment=Treatment.GRAFT, trust=0.9),
    ]


@pytest.fixture
def batch(policy: Policy, groups: list[Any]) -> TrainingBatch:
    """With the default settings."""
    return collate(groups, TrainSettings().weight, policy)


def gradients(trainer: Trainer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """Of the loss of a step, by parameter."""
    trainer.accumulate(batch)
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
