"""What a policy of the lab generates, scores and is measured by.

For: groups whose question and random numbers depend on the seed and on the step that uses them, on nothing
else, so that runs of one seed are paired over presets, lags and learning rates. Held-out reward is that of
`HELD_OUT_ANSWERS` completions of each task at temperature 1, mean over tasks, always with the same questions
and draws: of two equal policies it is the same, and over the points of a curve its noise averages out. (The
probability of the right answer would have none, but a sorting has up to 27 right answers: the scorer lets
every number be off by one, and policies find out.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.policy import Policy
from node.rollout.tiny import MAX_NEW_TOKENS
from node.weight.groups import TrainingRollout
from swarm_cli.bench.staleness.buffer import Place
from swarm_cli.bench.staleness.mismatch import Mismatch, engine_weights, reported
from swarm_cli.bench.staleness.plain import Drawn, Plain
from swarm_cli.bench.staleness.tasks import Question, Tasks

__all__ = ["Answered", "Answers"]

HELD_OUT_ANSWERS = 128
"""To each task's held-out questions in turn."""
_ROWS = 512
"""Rollouts of one pass; more do not make it faster."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Answered:
    """A group as it left the engine."""

    question: Question
    prompt: list[int]
    drawn: tuple[Drawn, ...]
    """With the log-probabilities that the engine reported."""
    old: tuple[NDArray[np.float32], ...]
    """log pi_old of each, by the trainer's weights of that version; empty unless asked for."""
    rewards: tuple[float, ...]
    born: int
    """The version that generated it."""

    def rollouts(self) -> tuple[TrainingRollout, ...]:
        """As a trainer with the same tokenizer takes them."""
        return tuple(
            TrainingRollout(
                each.tokens,
                float(each.logprobs.sum(dtype=np.float64)),
                each.logprobs,
                versions_T=np.full(len(each.tokens), self.born),
            )
            for each in self.drawn
        )


class Answers:
    """The engine and the judge of one policy in one run."""

    def __init__(self, policy: Policy, tasks: Tasks, *, seed: int, group_size: int, salt: int = 0) -> None:
        """`salt` gives another policy other draws on the same questions."""
        self.policy = policy
        self._tasks = tasks
        self.plain = Plain(policy)
        self._seed = seed
        self._salt = salt
        self._group_size = group_size
        self._prompts: dict[Question, list[int]] = {}
        self._held_out = [
            questions[number % len(questions)]
            for questions in tasks.held_out
            for number in range(HELD_OUT_ANSWERS)
        ]
        self._held_out_prompts = [self.prompt(question) for question in self._held_out]
        draw = np.random.default_rng((seed, 3))
        self._held_out_uniforms = draw.random((len(self._held_out), 1, MAX_NEW_TOKENS))

    def prompt(self, question: Question) -> list[int]:
        """Token ids of a question."""
        known = self._prompts.get(question)
        if known is None:
            known = self._prompts[question] = self.policy.encode_prompt(question.prompt.text)
        return known

    def question(self, place: Place) -> Question:
        """What the group at this place is about; tasks in turn."""
        draw = np.random.default_rng((self._seed, place.step, place.number, 0))
        questions = self._tasks.train[(place.step + place.number) % len(self._tasks.train)]
        return questions[int(draw.integers(len(questions)))]

    def answer(
        self,
        weights: Weights,
        places: Sequence[Place],
        version: int,
        *,
        mismatch: Mismatch = Mismatch.NONE,
        old: bool = False,
    ) -> list[Answered]:
        """A group for every place, by an engine with this version's weights; with log pi_old if `old`."""
        engine = engine_weights(weights, mismatch)
        chunk = max(1, _ROWS // self._group_size)
        answered: list[Answered] = []
        for first in range(0, len(places), chunk):
            some = places[first : first + chunk]
            questions = [self.question(place) for place in some]
            uniforms = np.stack([self._uniforms(place) for place in some])
            groups = self.plain.draw(engine, [self.prompt(question) for question in questions], uniforms)
            answered.extend(
                self._answered(weights, place, question, drawn, version, mismatch, old)
                for place, question, drawn in zip(some, questions, groups, strict=True)
            )
        return answered

    def held_out(self, weights: Weights) -> float:
        """Held-out reward of these weights."""
        groups = self.plain.draw(weights, self._held_out_prompts, self._held_out_uniforms)
        rewards = [
            self._reward(question, drawn) for question, (drawn,) in zip(self._held_out, groups, strict=True)
        ]
        return fmean(rewards)  # every task has as many answers

    def _answered(
        self,
        weights: Weights,
        place: Place,
        question: Question,
        drawn: Sequence[Drawn],
        version: int,
        mismatch: Mismatch,
        old: bool,
    ) -> Answered:
        prompt = self.prompt(question)
        exact: Sequence[NDArray[np.float32]] = [each.logprobs for each in drawn]
        if old and mismatch in (Mismatch.BF16, Mismatch.INT8):
            exact = self.plain.logprobs(weights, [(prompt, each.tokens.tolist()) for each in drawn])
        seed = (self._seed, place.step, place.number, 2, self._salt)
        told = tuple(
            replace(each, logprobs=reported(each.logprobs, mismatch, (*seed, number)))
            for number, each in enumerate(drawn)
        )
        rewards = tuple(self._reward(question, each) for each in drawn)
        return Answered(question, prompt, told, tuple(exact) if old else (), rewards, version)

    def _reward(self, question: Question, drawn: Drawn) -> float:
        return self._tasks.reward(question, self.policy.decode(drawn.tokens.tolist()), drawn.finished)

    def _uniforms(self, place: Place) -> NDArray[np.float64]:
        draw = np.random.default_rng((self._seed, place.step, place.number, 1, self._salt))
        return draw.random((self._group_size, MAX_NEW_TOKENS))
