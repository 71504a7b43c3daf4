"""The other weights that updates bring, and what parity sees of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from swarm_cli.bench.updates import DENSITY, Weights, disturbed


def test_so_large_a_share_of_every_tensor_moves_and_tied_ones_stay_tied() -> None:
    tied = torch.ones(200, 100)
    state = {"embed": tied, "norm": torch.ones(10), "head": tied}
    other = disturbed(state, seed=0)
    assert other["head"] is other["embed"]
    assert torch.equal(tied, torch.ones(200, 100)), "the original stays"
    moved = int((other["embed"] != tied).sum())
    assert 0.95 * DENSITY * tied.numel() <= moved <= DENSITY * tied.numel()
    assert int((other["norm"] != 1).sum()) == 1, "at least one"


def test_zero_moves_as_well() -> None:
    assert int((disturbed({"bias": torch.zeros(4)}, seed=0)["bias"] != 0).sum()) == 1


def test_parity_is_of_the_weights_that_the_engine_was_given(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    engine = TransformersEngine(policy)
    weights = Weights(policy)
    assert weights.parity(engine) < 1e-4
    weights.update(engine)
    assert weights.parity(engine) < 1e-4
    assert weights.moved() > 0.01, "and the probe sees an update"
    engine.update(policy.load_model().state_dict(), 9)
    assert weights.parity(engine) == pytest.approx(weights.moved(), abs=1e-4)
