"""A follower's engine against the weights that were tracked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from node.rollout.adapter import AdapterSpec, adapter_state, wrap
from node.rollout.engine.base import TokenSequence
from node.rollout.engine.parity import ParityError
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.weights.follow.probe import FollowerProbe
from tests.node.weights.test_engine_sync import Drifting

pytestmark = pytest.mark.slow


class Stale(TransformersEngine):
    """Keeps the first tensor of its weights as it was unless all are loaded anew."""

    probe_each = True

    def update(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        name = next(iter(self._weights))
        super().update({**state, name: self._weights[name].clone()}, policy_version)

    def reload(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        super().update(state, policy_version)


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


def probe_of(engine: TransformersEngine, policy: Policy, adapter: AdapterSpec | None = None) -> FollowerProbe:
    return FollowerProbe(engine, policy, adapter, prompt=lambda number: f"{number}" * 7, tolerance=1e-3)


def moved(policy: Policy, version: int) -> dict[str, Tensor]:
    """Other weights for each version, in bfloat16."""
    generator = torch.Generator().manual_seed(version)
    state = policy.load_model().state_dict()
    return {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).to(torch.bfloat16)
        for name, tensor in state.items()
    }


def test_an_engine_in_this_process_is_not_probed(policy: Policy) -> None:
    engine = Drifting(policy)
    engine.off_nats = 1.0
    probe = probe_of(engine, policy)
    for version in range(3):
        assert not probe.update(moved(policy, version), version)
    assert (engine.probes, engine.policy_version, probe.not_sharing) == (0, 2, "")


def test_one_in_another_process_is_probed_at_the_first_version_and_every_eighth_after(policy: Policy) -> None:
    engine = Drifting(policy)
    engine.probe_each = True
    probe = probe_of(engine, policy)
    probed = []
    for version in range(18):
        before = engine.probes
        assert not probe.update(moved(policy, version), version)
        if engine.probes > before:
            probed.append(version)
    assert probed == [0, 8, 16]
    assert (engine.policy_version, engine.reloads, probe.not_sharing) == (17, 0, "")


def test_weights_that_did_not_arrive_are_found_and_loaded_anew(policy: Policy) -> None:
    engine = Stale(policy)
    assert probe_of(engine, policy).update(moved(policy, 1), 1)
    meant = TransformersEngine(policy)
    meant.update(moved(policy, 1), 1)
    sequences = [TokenSequence((2, 7, 9, 3), tuple(range(5, 25)))]
    assert np.array_equal(engine.logprobs(sequences)[0], meant.logprobs(sequences)[0])


def test_an_engine_that_stays_wrong_fails_once_and_takes_versions_all_the_same(policy: Policy) -> None:
    engine = Drifting(policy)
    engine.probe_each, engine.off_nats = True, 0.01
    probe = probe_of(engine, policy)
    with pytest.raises(ParityError, match=r"by 0\.01 nats"):
        probe.update(moved(policy, 0), 0)
    assert "by 0.01 nats" in probe.not_sharing
    probes = engine.probes
    for version in range(1, 20):
        assert not probe.update(moved(policy, version), version)
    assert (engine.policy_version, engine.reloads, engine.probes) == (19, 1, probes)


def test_an_adapter_is_probed_on_its_policy(policy: Policy) -> None:
    pytest.importorskip("peft")
    spec = AdapterSpec(2, 4.0)
    state = adapter_state(wrap(policy.load_model(), spec))
    state = {name: torch.full_like(tensor, 0.125) for name, tensor in state.items()}
    engine = Drifting(policy, adapter=spec)
    engine.probe_each = True
    probe = probe_of(engine, policy, spec)
    assert not probe.update(state, 1)
    assert engine.probes == 1
    other = Stale(policy, adapter=spec)
    assert probe_of(other, policy, spec).update(state, 1)
