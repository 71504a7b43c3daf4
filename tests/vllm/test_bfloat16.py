"""A correct engine in bfloat16 keeps its voice over hundreds of updates, and a wrong one does not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from node.config import VllmConfig
from node.rollout.engine.parity import ParityError, ParityProbe, make_probe, tolerance_of
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from node.state.paths import bundled
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weights.chain.bf16 import rounded

UPDATES = 200
MOVE = 3e-4
"""Of each weight and update, the learning rate of AdamW's first steps: 0.06 after all, or 0.004 at random."""


def test_200_updates_pass_the_probe_and_a_wrong_one_is_found() -> None:
    policy = Policy.open(bundled("models/rook"))
    trainer = Trainer(policy, TrainSettings(measure_start_kl=False))
    draw = torch.Generator().manual_seed(0)
    with contextlib.closing(VllmEngine(policy, VllmConfig(kv_cache_mib=64, dtype="bfloat16"))) as engine:
        prompts = [policy.encode_prompt(f"{each} + {each + 3} =") for each in range(4)]
        probe: ParityProbe = make_probe(
            prompts, policy.vocab_size, engine.context, tolerance_of(engine.dtype)
        )
        worst = 0.0
        for version in range(1, UPDATES + 1):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter += MOVE * torch.randn(parameter.shape, generator=draw).sign()
            state = rounded(trainer.state_dict())
            apart, reloaded = probe.update(engine, state, version, trainer.logprobs(probe.sequences))
            assert not reloaded, f"version {version} is {apart} apart"
            worst = max(worst, apart)
        assert worst < 0.05  # half of what is allowed: 0.1

        layer = "model.layers.0.mlp.down_proj.weight"
        wrong = {**state, layer: state[layer] * 3}
        reference = trainer.logprobs(probe.sequences)
        with pytest.raises(ParityError, match="differs from the trainer"):
            probe.update(engine, wrong, UPDATES + 1, reference)
