"""A policy on its tasks before there is a swarm: how long it answers, how often it ends, what it is paid.

    tasks --host--> questions --embedded engine--> answers --host--> scores  =>  Sample

For whoever drafts a charter (`node/open/propose.py` makes one of the figures). Bounded: a few groups, so many
seconds of sampling, and the host's own limits. Blocks. Not an evaluation: questions may be held-out ones,
they are few, and nothing is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.environment.host import Answers, HostFailure, TaskHost
from node.environment.records import Completion
from node.open.estimate import BYTES, GIB, TORCH_RAM, ModelFacts
from node.open.machine import machine_of
from node.open.propose import GROUP, Sample, TaskSample
from node.rollout.policy import Policy
from protocol.errors import CharterError, ModelError
from protocol.messages import FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from node.rollout.engine.base import Engine

__all__ = ["Asking", "Progress", "open_sampler", "sample_policy"]

Progress = Callable[[int, int], None]
"""Hears how many answers ended, and of how many."""
LEAST_ROWS, MOST_ROWS = 8, 256
TOKENS_A_LOOK = 512
"""Sampled between two looks at the clock."""


@dataclass(frozen=True)
class Asking:
    """How much is asked, and for how long."""

    questions: int = 10
    """Of each task."""
    max_tokens: int = 256
    """Of an answer."""
    within_s: float = 120.0
    """Sampling with one policy ends then; what is not complete counts as cut."""


@dataclass(frozen=True)
class _Question:
    environment: str
    seed: int
    prompt_ids: tuple[int, ...]


def open_sampler(config: NodeConfig, policy: Policy, asking: Asking) -> Engine:
    """The embedded engine on the configured device, for as many answers at a time as have room. The caller
    closes it. Raises ModelError for weights that do not fit into the memory that is free."""
    from node.rollout.engine.transformers import TransformersEngine

    machine, facts = machine_of(config), ModelFacts.of(policy)
    dtype = "bfloat16" if machine.device == "cuda" else "float32"
    weights = facts.params * BYTES[dtype] + TORCH_RAM
    row = facts.cache_bytes(dtype) * min(policy.max_positions, 2 * asking.max_tokens)
    if weights + LEAST_ROWS * row > machine.usable_bytes:
        raise ModelError(
            f"sampling {policy.path} takes {(weights + LEAST_ROWS * row) / GIB:.1f} GiB on {machine.name}, "
            f"and {machine.usable_bytes / GIB:.1f} may be used; --sample 0 drafts without measuring"
        )
    # As much again as the cache stays free, since rows that leave are copied out.
    rows = (machine.usable_bytes - weights) // max(1, 2 * row)
    engine = TransformersEngine(
        policy, device=machine.device, dtype=dtype, max_rows=max(LEAST_ROWS, min(MOST_ROWS, rows))
    )
    engine.require_cache()
    return engine


def sample_policy(
    policy: Policy,
    engine: Engine,
    host: TaskHost,
    tasks: Sequence[str],
    asking: Asking,
    progress: Progress = lambda ended, of: None,
    now_s: Callable[[], float] = time.monotonic,
) -> Sample:
    """Answer the first questions of each of `tasks` in groups at T = 1, and score them. Raises CharterError
    for a task without any question, ModelError for a question that the policy has no room for, and
    EngineError."""
    from node.rollout.engine.base import GenerationRequest

    questions = [each for task in tasks for each in _questions(policy, engine, host, task, asking.questions)]
    cap = min(asking.max_tokens, engine.context - max(len(each.prompt_ids) for each in questions))
    # Each answer by itself, so that those which are complete count when time is up.
    requests = [
        GenerationRequest(each.prompt_ids, 1, GROUP * number + place, Sampling(cap))
        for number, each in enumerate(questions)
        for place in range(GROUP)
    ]
    done: dict[int, Rollout] = {}
    began_s = now_s()
    generation = engine.open()
    try:
        tickets = generation.start(requests)
        while generation.in_flight and now_s() < began_s + asking.within_s:
            done |= {ticket: rollout for ticket, (rollout,) in generation.wait(tokens=TOKENS_A_LOOK)}
            progress(len(done), len(requests))
        took_s = max(now_s() - began_s, 1e-6)
        sampled = generation.sampled
    finally:
        generation.close()
    rollouts = [done.get(ticket) for ticket in tickets]
    answered = [
        (question, rollouts[GROUP * number : GROUP * (number + 1)])
        for number, question in enumerate(questions)
    ]
    return Sample(
        model=policy.path.name,
        tasks=tuple(
            _judged(host, task, asking.questions, [each for each in answered if each[0].environment == task])
            for task in tasks
        ),
        cap=cap,
        tokens_per_s=sampled / took_s,
        late=len(requests) - len(done),
    )


def _questions(policy: Policy, engine: Engine, host: TaskHost, task: str, count: int) -> list[_Question]:
    made = host.questions(task, range(count))
    texts = [(seed, text) for seed, text in enumerate(made) if isinstance(text, str)]
    if not texts:
        failed = next((each for each in made if isinstance(each, HostFailure)), None)
        why = f"{failed.reason}: {failed.detail}" if failed else "it fails on every seed"
        raise CharterError(f"the task {task} gives no question ({why}); set it otherwise, or leave it out")
    questions = [_Question(task, seed, tuple(policy.encode_prompt(text))) for seed, text in texts]
    longest = max(len(each.prompt_ids) for each in questions)
    if longest >= engine.context:
        long = sum(len(each.prompt_ids) >= engine.context for each in questions)
        raise ModelError(
            f"{long} of {len(questions)} questions of {task} leave {policy.path.name} no room for an answer: "
            f"the longest takes {longest} tokens and the model has {engine.context} positions; set the task "
            "smaller, or take another model"
        )
    return questions


def _judged(
    host: TaskHost, task: str, asked: int, answered: Sequence[tuple[_Question, Sequence[Rollout | None]]]
) -> TaskSample:
    scored = host.score(
        [Answers(task, question.seed, tuple(map(_completion, group))) for question, group in answered]
    )
    rewards = [each.rewards for each in scored if not isinstance(each, HostFailure)]
    rollouts = [rollout for _, group in answered for rollout in group]
    paid = [
        rollout
        for (_, group), each in zip(answered, scored, strict=True)
        if not isinstance(each, HostFailure)
        for rollout, reward in zip(group, each.rewards, strict=True)
        if reward > 0
    ]
    return TaskSample(
        environment=task,
        answers=len(rollouts),
        lengths=tuple(
            _tokens(rollout)
            for rollout in rollouts
            if rollout is not None and rollout.finish is FinishReason.STOP
        ),
        groups=len(rewards),
        mixed=sum(max(group) > min(group) for group in rewards),
        reward=fmean(reward for group in rewards for reward in group) if rewards else 0.0,
        paid=tuple(map(_tokens, paid)),
        lost=asked - len(rewards),
    )


def _tokens(rollout: Rollout | None) -> int:
    return len(rollout.answer.token_ids) // 4 if rollout is not None else 0


def _completion(rollout: Rollout | None) -> Completion:
    """What is scored of an answer, nothing where it was not complete in time."""
    if rollout is None:
        return Completion("", finished=False)
    return Completion(rollout.text, rollout.finish is FinishReason.STOP)
