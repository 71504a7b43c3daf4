"""Held-out evaluation: how often the policy answers exactly right and ends, sampled at T = 1 and greedily.

For: the same fixed prompts before, during and after training, so that two evaluations are paired (each prompt
keeps its seed). The training reward is too noisy to compare, and a mean over tasks hides one that falls:
accuracy is reported per task. A pure function of engine, prompts and scorer; not for choosing prompts
(held-out ones come from `protocol.prompts`). Blocking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.environment import Completion, Prompt
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Sampling

__all__ = ["EvaluationReport", "evaluate"]

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
