"""Held-out evaluation: how often the policy answers exactly right and ends, sampled at T = 1 and greedily.

For: the same fixed prompts before, during and after training, so that two evaluations are paired (each prompt
keeps its seed). The training reward is too noisy to compare, and a mean over tasks hides one that falls:
accuracy is reported per task. `evaluate` is a pure function of engine, prompts and scorer; `HeldOut` is it
with the swarm's held-out prompts, which `protocol.prompts` chooses. Blocking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.environment import Completion, Prompt
from node.rollout.policy import Policy
from node.rollout.prompts import Universe
from protocol.errors import ModelError
from protocol.messages import FinishReason, Sampling

__all__ = ["EvaluationReport", "HeldOut", "evaluate"]

EXACT = 1.0 - 1e-6


@dataclass(frozen=True)
class EvaluationReport:
    """evaluate -> events. Shares in [0, 1]; the totals are means over tasks."""

    policy_version: int
    prompts: int
    sampled: float
    greedy: float
    sampled_tasks: dict[str, float]
    greedy_tasks: dict[str, float]
    evaluate_s: float


def evaluate(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    score: Callable[[Prompt, Completion], float],
    *,
    max_new_tokens: int,
    batch_prompts: int = 128,
) -> EvaluationReport:
    """Answer every prompt twice and score: right is a reward of 1 and a completion that ended."""
    if not prompts:
        raise ValueError("an evaluation needs at least one prompt")
    began_s = time.perf_counter()
    sampling = Sampling(max_new_tokens=max_new_tokens)
    requests = [
        GenerationRequest(tuple(policy.encode_prompt(prompt.text)), 1, prompt.seed, sampling)
        for prompt in prompts
    ]
    accuracies = []
    for greedy in (False, True):
        right: dict[str, list[bool]] = {}
        for first in range(0, len(prompts), batch_prompts):
            chunk = slice(first, first + batch_prompts)
            for prompt, (rollout,) in zip(
                prompts[chunk], engine.generate(requests[chunk], greedy=greedy), strict=True
            ):
                finished = rollout.finish is FinishReason.STOP
                reward = score(prompt, Completion(rollout.text, finished)) if finished else 0.0
                right.setdefault(prompt.environment, []).append(reward >= EXACT)
        accuracies.append({task: fmean(answers) for task, answers in sorted(right.items())})
    sampled_tasks, greedy_tasks = accuracies
    return EvaluationReport(
        policy_version=engine.policy_version,
        prompts=len(prompts),
        sampled=fmean(sampled_tasks.values()),
        greedy=fmean(greedy_tasks.values()),
        sampled_tasks=sampled_tasks,
        greedy_tasks=greedy_tasks,
        evaluate_s=time.perf_counter() - began_s,
    )


class HeldOut:
    """The same held-out prompts of every task at every moment of a run, and how well they are answered."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        universe: Universe,
        score: Callable[[Prompt, Completion], float],
        *,
        per_task: int,
        max_new_tokens: int,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._universe = universe
        self._score = score
        self._per_task = per_task
        self._max_new_tokens = max_new_tokens
        self._prompts: list[Prompt] = []

    def evaluate(self) -> EvaluationReport:
        """Answer and score all of them with the engine's weights."""
        return evaluate(
            self._engine, self._policy, self.prompts(), self._score, max_new_tokens=self._max_new_tokens
        )

    def prompts(self) -> list[Prompt]:
        """Those that leave the engine room for an answer. Derived the first time: seconds. Raises ModelError
        when none does."""
        if not self._prompts:
            room = self._engine.context - self._max_new_tokens
            derived = [each for listed in self._universe.held_out(self._per_task).values() for each in listed]
            self._prompts = [each for each in derived if len(self._policy.encode_prompt(each.text)) <= room]
        if not self._prompts:
            raise ModelError(
                f"no prompt of this swarm leaves room for an answer of {self._max_new_tokens} tokens within "
                f"the {self._engine.context} that the engine takes with {self._policy.path}; choose another "
                "policy, or raise vllm.max_context if it is what limits them"
            )
        return self._prompts
