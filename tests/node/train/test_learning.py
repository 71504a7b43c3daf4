"""A whole loop in small: generate, score, train, hand the weights to the engine. Reward must rise."""

from __future__ import annotations

import dataclasses
from statistics import fmean

import pytest

from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train.objectives import Objective, open_objective
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import collate
from node.weight.groups import OWN_SOURCE, TrainingGroup, training_rollouts
from node.weight.settings import Treatment, WeightSettings
from node.weight.treatment import open_treatments
from protocol.messages import Sampling
from protocol.rollouts import parse_tokens

STEPS, GROUPS = 30, 4


def run(policy: Policy, settings: TrainSettings, *, foreign: bool) -> list[float]:
    """Mean share of the letter e per step; with `foreign`, half the groups are treated as a peer's."""
    engine, trainer = TransformersEngine(policy), Trainer(policy, settings)
    treatments = open_treatments(settings.weight)
    curve = []
    for step in range(STEPS):
        requests = [
            GenerationRequest(
                tuple(policy.encode_prompt(str(place))), 8, step * GROUPS + place, Sampling(max_new_tokens=6)
            )
            for place in range(GROUPS)
        ]
        groups, means = [], []
        for place, (request, rollouts) in enumerate(zip(requests, engine.generate(requests), strict=True)):
            rewards = [rollout.text.count("e") / 6 for rollout in rollouts]
            means.append(fmean(rewards))
            tokens = [parse_tokens(rollout) for rollout in rollouts]
            groups.append(
                TrainingGroup(
                    source="peer" if foreign and place % 2 else OWN_SOURCE,
                    group=str(place),
                    prompt=place // 2,  # the peer answers the prompts of the own groups
                    prompt_ids=request.prompt_ids,
                    rollouts=training_rollouts(rollouts, tokens, policy, same_tokenizer=True),
                    rewards=tuple(rewards),
                )
            )
        trainer.step(collate(treatments.treat(groups), settings.weight, policy))
        engine.update(trainer.state_dict(), trainer.policy_version)
        curve.append(fmean(means))
    return curve


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [None, open_objective("ppo_clip"), open_objective("tis")], ids=["dppo_tv", "ppo_clip", "tis"]
)
def test_reward_rises(policy: Policy, own: Objective | None) -> None:
    settings = TrainSettings(learning_rate=3e-3)
    curve = run(policy, settings if own is None else dataclasses.replace(settings, own=own), foreign=False)
    assert fmean(curve[:3]) < 0.15
    assert fmean(curve[-3:]) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("force", [Treatment.COMPAT, Treatment.HACPO, Treatment.GRAFT])
def test_reward_rises_with_a_peer(policy: Policy, force: Treatment) -> None:
    settings = TrainSettings(learning_rate=3e-3, weight=WeightSettings(force=force))
    curve = run(policy, settings, foreign=True)
    assert fmean(curve[:3]) < 0.15
    assert fmean(curve[-3:]) > 0.6
