"""A state that was kept comes back whole, as a new version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from node.rollout.adapter import AdapterSpec
from node.rollout.policy import Policy
from node.train.good_state import GoodState
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from protocol.errors import LocalProtocolError

SETTINGS = TrainSettings(measure_start_kl=False)
LORA = dataclasses.replace(SETTINGS, adapter=AdapterSpec(rank=2, alpha=4.0), learning_rate=1e-2)
EIGHT_BITS = dataclasses.replace(SETTINGS, optimiser="adamw_8bit")
WAYS = [
    pytest.param(SETTINGS, id="all weights"),
    pytest.param(
        LORA,
        id="adapter",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed"),
        ],
    ),
    pytest.param(
        EIGHT_BITS,
        id="8 bits",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
        ],
    ),
]


@pytest.fixture
def batch(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    return collate([make_training_group(seed=1)], SETTINGS.weight, policy)


@pytest.fixture
def other(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    return collate([make_training_group(seed=2)], SETTINGS.weight, policy)


def held(trainer: Trainer) -> dict[str, Any]:
    """Every byte of weights and moments, and the updates."""
    found: dict[str, Any] = {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}
    for place, entries in enumerate(trainer.optimiser.state.values()):
        found |= {
            f"{place}.{field}": value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
            for field, value in entries.items()
        }
    return {**found, "updates": trainer.updates}


@pytest.mark.parametrize("settings", WAYS)
def test_training_goes_on_as_if_the_bad_steps_had_not_been(
    policy: Policy, batch: TrainingBatch, other: TrainingBatch, settings: TrainSettings
) -> None:
    torch.manual_seed(0)
    trainer = Trainer(policy, settings)
    torch.manual_seed(0)
    undisturbed = Trainer(policy, settings)
    for each in (trainer, undisturbed):
        each.step(batch)
    good = GoodState()
    good.keep(trainer)
    before = held(trainer)
    for _ in range(2):
        trainer.step(other)
    assert held(trainer) != before
    good.restore(trainer, 4)
    assert held(trainer) == before
    assert (trainer.policy_version, good.policy_version) == (4, 1)
    for each in (trainer, undisturbed):
        each.step(batch)
    assert held(trainer) == held(undisturbed)
    assert trainer.policy_version == 5


def test_before_the_first_step_there_are_no_moments_and_so_afterwards(
    policy: Policy, batch: TrainingBatch
) -> None:
    trainer, good = Trainer(policy, SETTINGS), GoodState()
    good.keep(trainer)
    trainer.step(batch)
    good.restore(trainer, 2)
    assert not trainer.optimiser.state
    assert trainer.updates == 0
    trainer.adopt(trainer.state_dict(), 3)
    good.restore(trainer, 4)
    assert trainer.policy_version == 4


def test_moments_that_are_gone_come_back(policy: Policy, batch: TrainingBatch) -> None:
    """A merge has begun the optimiser anew since."""
    trainer, good = Trainer(policy, SETTINGS), GoodState()
    trainer.step(batch)
    good.keep(trainer)
    before = held(trainer)
    trainer.adopt({name: 2 * tensor for name, tensor in trainer.state_dict().items()}, 2)
    good.restore(trainer, 3)
    assert held(trainer) == before


def test_a_state_is_kept_in_the_same_memory_and_no_step_changes_it(
    policy: Policy, batch: TrainingBatch
) -> None:
    """Weights and two moments of 4 bytes each, and a count of 4 bytes for each parameter."""
    trainer, good = Trainer(policy, SETTINGS), GoodState()
    trainer.step(batch)
    good.keep(trainer)
    place = good._weights["model.norm.weight"].data_ptr()
    size, parameters = sum(each.numel() for each in trainer.learning().values()), len(trainer.learning())
    assert good.nbytes == 3 * 4 * size + 4 * parameters
    before = held(trainer)
    trainer.step(batch)
    good.restore(trainer, 3)
    assert held(trainer) == before
    good.keep(trainer)
    assert good._weights["model.norm.weight"].data_ptr() == place
    assert good.policy_version == 3


def test_nothing_held_and_a_number_that_was_used_are_refused(policy: Policy) -> None:
    trainer, good = Trainer(policy, SETTINGS, policy_version=3), GoodState()
    with pytest.raises(LocalProtocolError, match="version None cannot come back as 4"):
        good.restore(trainer, 4)
    good.keep(trainer)
    with pytest.raises(LocalProtocolError, match="version 3 cannot come back as 3 after 3"):
        good.restore(trainer, 3)
