"""Held-out evaluation: what the policy's answers are worth that end, sampled at T = 1 and greedily.

For: the same fixed prompts before, during and after training, so that two evaluations are paired (each prompt
keeps its seed). The training reward is too noisy to compare, and a mean over tasks hides one that falls: the
mean reward is reported per task, which is the share of right answers where answers are right or wrong.
`evaluate` is a pure function of engine, prompts and scorer; `HeldOut` is it with the swarm's held-out
prompts, which `protocol.prompts` chooses. It also answers what a merge is judged by
(`weights/merge/adopt.py`), on prompts of their own: choosing weights by those that are evaluated on would
flatter the evaluation. All of that blocks; `Evaluator` runs it beside the event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import fmean

from node.compute import Lane
from node.environment.records import Completion, Prompt
from node.events import Evaluated
from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.policy import Policy
from node.rollout.prompts import Universe
from node.runtime import Runtime
from protocol.errors import ModelError
from protocol.messages import FinishReason, Sampling

__all__ = ["EvaluationReport", "Evaluator", "HeldOut", "evaluate"]

Score = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], Sequence[Sequence[float]]]
"""The rewards of completions of each prompt."""


@dataclass(frozen=True)
class EvaluationReport:
    """evaluate -> events. Mean rewards; the totals are means over tasks."""

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
    score: Score,
    *,
    max_new_tokens: int,
    batch_prompts: int = 128,
) -> EvaluationReport:
    """Answer every prompt twice and score; a completion that did not end is worth nothing."""
    if not prompts:
        raise ValueError("an evaluation needs at least one prompt")
    began_s = time.perf_counter()
    sampled, best = (
        _answers(engine, policy, prompts, max_new_tokens, greedy=greedy, batch_prompts=batch_prompts)
        for greedy in (False, True)
    )
    rewards = _rewards(prompts, list(zip(sampled, best, strict=True)), score)
    sampled_tasks, greedy_tasks = (_means(prompts, [pair[which] for pair in rewards]) for which in (0, 1))
    return EvaluationReport(
        policy_version=engine.policy_version,
        prompts=len(prompts),
        sampled=fmean(sampled_tasks.values()),
        greedy=fmean(greedy_tasks.values()),
        sampled_tasks=sampled_tasks,
        greedy_tasks=greedy_tasks,
        evaluate_s=time.perf_counter() - began_s,
    )


def _means(prompts: Sequence[Prompt], rewards: Sequence[float]) -> dict[str, float]:
    paid: dict[str, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        paid.setdefault(prompt.environment, []).append(reward)
    return {task: fmean(each) for task, each in sorted(paid.items())}


def _rewards(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], score: Score
) -> list[tuple[float, ...]]:
    """Of completions of each prompt; 0.0 for what did not end."""
    return [
        tuple(reward if each.finished else 0.0 for reward, each in zip(scored, group, strict=True))
        for scored, group in zip(score(prompts, completions), completions, strict=True)
    ]


def _answers(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    greedy: bool = False,
    batch_prompts: int = 128,
) -> list[Completion]:
    """One answer to each prompt, drawn by the prompt's seed."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    requests = [
        GenerationRequest(
            tuple(policy.encode_prompt(prompt.text, prompt.environment)), 1, prompt.seed, sampling
        )
        for prompt in prompts
    ]
    answers: list[Completion] = []
    for first in range(0, len(prompts), batch_prompts):
        for (rollout,) in engine.generate(requests[first : first + batch_prompts], greedy=greedy):
            answers.append(Completion(rollout.text, rollout.finish is FinishReason.STOP))
    return answers


class HeldOut:
    """The same held-out prompts of every task at every moment of a run, and how well they are answered."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        universe: Universe,
        score: Score,
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
        self._probes: dict[int, list[Prompt]] = {}

    def evaluate(self) -> EvaluationReport:
        """Answer and score all of them with the engine's weights."""
        return evaluate(
            self._engine, self._policy, self.prompts(), self._score, max_new_tokens=self._max_new_tokens
        )

    def rewards(self, prompts: int) -> list[float]:
        """Rewards of so many held-out prompts, spread over the tasks, none of which is evaluated on. The same
        prompts, order and seeds at every call, at T = 1; 0.0 for an answer that did not end. Fewer where the
        engine has no room for some, and then perhaps none."""
        probe = self._probes.get(prompts)
        if probe is None:
            probe = self._probes[prompts] = self._beyond_evaluation(prompts)
        answers = _answers(self._engine, self._policy, probe, self._max_new_tokens)
        return [reward for (reward,) in _rewards(probe, [(each,) for each in answers], self._score)]

    def _beyond_evaluation(self, prompts: int) -> list[Prompt]:
        per_task = math.ceil(prompts / len(self._universe.held_out(0)))
        listed = self._universe.held_out(per_task, after=self._per_task).values()
        fitting = [self._fitting(each) for each in listed]
        in_turn = chain.from_iterable(zip_longest(*fitting))
        return [each for each in in_turn if each is not None][:prompts]

    def prompts(self) -> list[Prompt]:
        """Those that leave the engine room for an answer. Derived the first time: seconds. Raises ModelError
        when none does."""
        if not self._prompts:
            listed = self._universe.held_out(self._per_task).values()
            self._prompts = self._fitting(list(chain.from_iterable(listed)))
        if not self._prompts:
            raise ModelError(
                f"no prompt of this swarm leaves room for an answer of {self._max_new_tokens} tokens within "
                f"the {self._engine.context} that the engine takes with {self._policy.path}; choose another "
                "policy, or raise vllm.max_context if it is what limits them"
            )
        return self._prompts

    def _fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        room = self._engine.context - self._max_new_tokens
        return [each for each in prompts if self._tokens(each) <= room]

    def _tokens(self, prompt: Prompt) -> float:
        """How many a prompt takes; no number is enough for one with a word that the model has no row for."""
        try:
            return len(self._policy.encode_prompt(prompt.text, prompt.environment))
        except ModelError:
            return math.inf


class Evaluator:
    """Evaluates beside the event loop, and tells the result."""

    def __init__(self, runtime: Runtime, held_out: HeldOut) -> None:
        self._runtime = runtime
        self._held_out = held_out

    async def evaluate(self, moment: str) -> None:
        """Answer all held-out prompts with the engine's weights; `moment` is before, during or after."""
        report = await self._runtime.run(Lane.EVALUATE, self._held_out.evaluate)
        event = Evaluated(
            at=self._runtime.now_ms(),
            policy_version=report.policy_version,
            moment=moment,
            prompts=report.prompts,
            sampled=report.sampled,
            greedy=report.greedy,
            sampled_tasks=report.sampled_tasks,
            greedy_tasks=report.greedy_tasks,
            evaluate_s=report.evaluate_s,
        )
        self._runtime.emit(event)

    async def rewards(self, prompts: int) -> list[float]:
        """`HeldOut.rewards`."""
        return await self._runtime.run(Lane.EVALUATE, self._held_out.rewards, prompts)
