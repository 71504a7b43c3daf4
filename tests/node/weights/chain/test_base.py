"""What anchors start from is what every member has, under the names that trainer and engine use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from node.rollout.adapter import AdapterSpec
from node.rollout.policy import Policy
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weights.chain.base import base_bits, travelling
from node.weights.chain.bf16 import to_bits
from protocol.delta import weights_digest


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, AdapterSpec(2, 4.0)])
def test_names_and_shapes_are_those_that_a_trainer_publishes(
    policy: Policy, adapter: AdapterSpec | None
) -> None:
    before = torch.random.get_rng_state()
    base = base_bits(policy, adapter)
    assert torch.equal(torch.random.get_rng_state(), before)
    trainer = Trainer(policy, TrainSettings(adapter=adapter, measure_start_kl=False))
    weights = travelling(trainer.state_dict(), base)
    assert {name: array.shape for name, array in base.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    if adapter is None:
        assert weights_digest(to_bits(weights)) == weights_digest(base)  # version 0 is the base
    else:
        assert not any(array.any() for array in base.values())


def test_tied_weights_travel_once_and_buffers_not_at_all() -> None:
    shared = np.zeros(3, np.uint16)
    base = {"embed": shared, "head": shared, "other": np.zeros(3, np.uint16)}
    state = {name: torch.full((3,), float(place)) for place, name in enumerate(base)}
    weights = travelling({**state, "positions": torch.arange(3)}, base)
    assert list(weights) == ["embed", "head", "other"]
    assert weights["head"] is weights["embed"]
    assert weights["other"] is state["other"]


@pytest.mark.slow
def test_loading_it_leaves_the_default_type_of_other_threads_alone(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may happen while a step runs, whose new tensors have torch's default type."""
    set_default, given = torch.set_default_dtype, []

    def recorded(dtype: torch.dtype) -> None:
        given.append(dtype)
        set_default(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", recorded)
    base_bits(policy, None)
    assert set(given) <= {torch.float32}
