"""Held-out evaluation with an engine whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from node.environment.host import TrustedHost
from node.environment.records import Completion, Prompt
from node.rollout.engine.base import Engine, Generation, GenerationRequest, TokenSequence
from node.rollout.policy import Policy
from node.rollout.prompts import Universe
from node.train.evaluate import HeldOut, Score, evaluate
from protocol.charter import swarm_id
from protocol.errors import ModelError
from protocol.messages import FinishReason, Rollout
from protocol.rollouts import single_turn
from tests.node.toy import ToyEnvironment, ToyHost, make_charter


class ScriptedEngine(Engine):
    """Answers the prompt's seed; sampled answers to seeds divisible by 4 do not end."""

    name, dtype = "scripted", "none"
    policy_version = 5

    def __init__(self) -> None:
        self.batches: list[int] = []

    def open(self, *, greedy: bool = False) -> Generation:
        raise NotImplementedError

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[list[Rollout]]:
        self.batches.append(len(requests))
        assert all(request.n == 1 and request.sampling.temperature == 1.0 for request in requests)
        return [
            [
                single_turn(
                    text=str(request.seed),
                    token_ids=b"",
                    logprobs=b"",
                    versions=b"",
                    finish=FinishReason.STOP if greedy or request.seed % 4 else FinishReason.LENGTH,
                    reward=0.0,
                    seed=request.seed,
                )
            ]
            for request in requests
        ]

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        raise NotImplementedError

    def update(self, state: Mapping[str, object], policy_version: int) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def scoring(paid: Callable[[Prompt, Completion], float]) -> Score:
    """`paid`, for many prompts at once."""

    def score(
        prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[tuple[float, ...]]:
        return [
            tuple(paid(prompt, each) for each in group)
            for prompt, group in zip(prompts, completions, strict=True)
        ]

    return score


def test_the_mean_reward_of_each_task(policy: Policy) -> None:
    """Task even: all right; task third: one in two right, the others half."""
    prompts = [Prompt("even", "1", seed, 0, {}) for seed in range(0, 16, 2)]
    prompts += [Prompt("third", "1", seed, 0, {}) for seed in range(1, 9, 2)]

    def paid(prompt: Prompt, completion: Completion) -> float:
        assert completion.text == str(prompt.seed)
        return 1.0 if prompt.environment == "even" or prompt.seed < 4 else 0.5

    engine = ScriptedEngine()
    report = evaluate(engine, policy, prompts, scoring(paid), max_new_tokens=4, batch_prompts=5)
    assert report.greedy_tasks == {"even": 1.0, "third": 0.75}
    assert report.sampled_tasks == {"even": 0.5, "third": 0.75}  # an answer that does not end is wrong
    assert report.greedy == 0.875
    assert report.sampled == 0.625
    assert report.policy_version == 5
    assert report.prompts == 12
    assert engine.batches == [5, 5, 2, 5, 5, 2]


def test_no_prompts(policy: Policy) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        evaluate(ScriptedEngine(), policy, [], scoring(lambda prompt, completion: 1.0), max_new_tokens=4)


def test_held_out_prompts_are_those_that_the_engine_has_room_for(policy: Policy) -> None:
    def held_out(context: int) -> HeldOut:
        engine = ScriptedEngine()
        engine.context = context
        charter = make_charter([policy], 0)
        universe = Universe(swarm_id(charter), charter, ToyHost())
        return HeldOut(
            engine, policy, universe, scoring(lambda prompt, completion: 1.0), per_task=3, max_new_tokens=100
        )

    prompts = held_out(128).prompts()
    assert len(prompts) == 3
    tokens = max(len(policy.encode_prompt(prompt.text)) for prompt in prompts)
    assert held_out(100 + tokens).prompts() == prompts
    with pytest.raises(ModelError, match="an answer of 100 tokens within the 101 that the engine takes"):
        held_out(101).prompts()


class Marked(ToyEnvironment):
    """Its prompts say whose they are; those of `long` are longer than any room."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prompt(self, seed: int, index: int) -> Prompt:
        text = f"{seed % 10**6:06d}" * (30 if self.name == "long" else 1)
        return Prompt(self.name, text, seed, index, {})


def probe(policy: Policy, *tasks: str) -> tuple[HeldOut, list[Prompt]]:
    """With four prompts of each task for evaluations, and what it scores: 1.0 for an odd seed."""
    engine, scored = ScriptedEngine(), list[Prompt]()
    charter = make_charter([policy], 0, environments=[{"name": task} for task in tasks])
    engine.context = 128

    def paid(prompt: Prompt, completion: Completion) -> float:
        assert completion.text == str(prompt.seed)
        if completion.finished:
            scored.append(prompt)
        return float(prompt.seed % 2)

    universe = Universe(swarm_id(charter), charter, TrustedHost({task: Marked(task) for task in tasks}))
    return HeldOut(engine, policy, universe, scoring(paid), per_task=4, max_new_tokens=10), scored


def test_rewards_of_a_probe_are_of_the_same_prompts_every_time_and_none_is_evaluated_on(
    policy: Policy,
) -> None:
    """About a quarter of the sampled answers does not end: reward 0 without being scored."""
    held_out, scored = probe(policy, "one", "two", "three")
    rewards = held_out.rewards(40)
    first = list(scored)
    assert len(rewards) == 40
    assert sum(rewards) == sum(prompt.seed % 2 for prompt in first)
    assert 0 < len(first) < 40  # seeds divisible by 4 do not end
    assert held_out.rewards(40) == rewards
    assert scored == first * 2
    evaluated = {prompt.text for prompt in held_out.prompts()}
    assert len(evaluated) == 12
    assert evaluated.isdisjoint(prompt.text for prompt in first)


def test_a_probe_takes_tasks_in_turn(policy: Policy) -> None:
    """14 each of three tasks are derived for 40; the last two are left out."""
    held_out, _ = probe(policy, "one", "two", "three")
    held_out.rewards(40)
    tasks = [prompt.environment for prompt in held_out._probes[40]]
    assert tasks == (["one", "two", "three"] * 14)[:40]


def test_a_probe_leaves_out_what_the_engine_has_no_room_for(policy: Policy) -> None:
    held_out, _ = probe(policy, "long", "short")
    held_out.rewards(20)
    assert [prompt.environment for prompt in held_out._probes[20]] == ["short"] * 10
    assert probe(policy, "long")[0].rewards(20) == []
