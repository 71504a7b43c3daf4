"""What a policy is tried for when a node opens: silent where all is well, else one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from node.config import load_config
from node.open.settings import train_settings
from node.open.trial import try_alone, try_policy
from node.rollout.engine.base import GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train.step import Trainer
from protocol.charter import found
from protocol.errors import ModelError
from protocol.identity import Identity
from protocol.messages import Rollout, TokenizerSpec


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def trainer(policy: Policy, tmp_path: Path) -> Trainer:
    rules = {
        "name": "t",
        "environments": [{"name": "chain_sum"}],
        "tokenizers": [
            {"name": "tiny", "digest": policy.tokenizer_digest, "vocab_size": 99, "end_token_ids": [1]}
        ],
    }
    config = load_config([], {"home": tmp_path, "policy.device": "cpu"})
    settings = train_settings(config, found(Identity.generate(), rules, created_at=1))
    return Trainer(policy, dataclasses.replace(settings, dtype="float32"))


def told_of(policy: Policy, engine: TransformersEngine, trainer: Trainer) -> list[str]:
    told: list[str] = []
    spec = TokenizerSpec("tiny", policy.tokenizer_digest, policy.vocab_size, policy.end_token_ids)
    try_policy(policy, spec, engine, trainer, lambda level, text: told.append(f"{level}: {text}"))
    return told


def test_a_policy_that_works_is_tried_without_a_word_or_a_trace(policy: Policy, trainer: Trainer) -> None:
    before = trainer.state_dict()
    assert told_of(policy, TransformersEngine(policy), trainer) == []
    assert all(torch.equal(before[name], each) for name, each in trainer.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_an_engine_that_scores_otherwise_than_it_samples_is_refused(policy: Policy, trainer: Trainer) -> None:
    class Off(TransformersEngine):
        def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:  # type: ignore[override]
            return [each - np.float32(0.3) for each in super().logprobs(sequences)]

    with pytest.raises(ModelError, match=r"scores what it has just sampled of .* otherwise, by 0\.3 nats"):
        told_of(policy, Off(policy), trainer)


def test_an_engine_with_other_weights_than_the_trainer_is_refused(policy: Policy, trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(-3.0)
    with pytest.raises(ModelError, match=r"trainer and transformers engine give the tokens"):
        told_of(policy, TransformersEngine(policy), trainer)


def test_weights_that_no_gradient_reaches_are_named(policy: Policy, trainer: Trainer) -> None:
    trainer.model.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(3)))
    (told,) = told_of(policy, TransformersEngine(policy), trainer)
    assert told.startswith("warning: no gradient of a short answer reaches 1 of the weights")
    assert "(forgotten)" in told


def test_a_gradient_that_is_no_number_is_one_sentence(policy: Policy, trainer: Trainer) -> None:
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ModelError, match=r"cannot be trained in float32: the gradient of .* is no number"):
        told_of(policy, TransformersEngine(policy), trainer)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_what_peers_would_refuse_is_refused_with_their_word(policy: Policy, trainer: Trainer) -> None:
    class Mumbles(TransformersEngine):
        def generate(self, requests: list[GenerationRequest]) -> list[list[Rollout]]:  # type: ignore[override]
            return [
                [msgspec.structs.replace(each, text="other") for each in rollouts]
                for rollouts in super().generate(requests)
            ]

    with pytest.raises(ModelError, match=r"peers would refuse what .* \(text_mismatch: tokens \[.*'other'\)"):
        told_of(policy, Mumbles(policy), trainer)


def test_a_gradient_of_zeros_does_not_learn_either(policy: Policy, trainer: Trainer) -> None:
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda gradient: gradient * 0)
    (told,) = told_of(policy, TransformersEngine(policy), trainer)
    assert "reaches 1 of the weights" in told


def test_a_policy_is_tried_without_a_charter_where_there_is_room(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_alone(policy) == "a sample, its scores and a gradient are right"
    monkeypatch.setattr(Policy, "load_model", None)  # is not called
    huge = dataclasses.replace(policy, params=10**12)
    assert try_alone(huge).startswith("not tried: that takes 18626.5 GiB here and ")
