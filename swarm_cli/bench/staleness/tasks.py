"""The lab's questions: the demo's tasks, drawn once, with a scorer in this process.

For: the same questions for every preset, lag and machine. Those to train on are never held out, as in a
swarm; the held-out ones are distinct. Rewards are the environment's own; equal answers to one question are
scored once. Scoring in this process is sound because the demo's scorers only compare text
(`evaluates_answers`), and the policies are ours. Not for: which question a step trains on (`answers.py`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

from node.environment.installed import DEMO_ENVIRONMENTS
from node.environment.records import Completion, Environment, Prompt
from node.environment.tasks import open_environment
from protocol.errors import OurFault
from protocol.prompts import is_held_out

__all__ = ["Question", "Tasks", "open_tasks"]

SEED = 5
"""Of the questions: the same ones for all runs."""
TRAIN, HELD_OUT = 512, 64
"""Questions of each task; held-out ones up to what the task has."""
_TRIES = 6_000
"""Draws after which a task has given all the held-out questions that it has: sums have 26."""


@dataclass(frozen=True, eq=False)
class Question:
    """One item of a task."""

    task: int
    """Index into the tasks."""
    prompt: Prompt
    scored: dict[tuple[str, bool], float] = field(default_factory=dict, repr=False)
    """Rewards of answers given so far."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Questions to train on and held-out ones, by task."""

    environments: tuple[Environment, ...]
    train: tuple[tuple[Question, ...], ...]
    held_out: tuple[tuple[Question, ...], ...]

    def reward(self, question: Question, text: str, finished: bool) -> float:
        """The environment's reward of an answer."""
        known = question.scored.get((text, finished))
        if known is None:
            environment = self.environments[question.task]
            known = environment.score(question.prompt, Completion(text, finished)).reward
            question.scored[text, finished] = known
        return known


@functools.cache
def open_tasks() -> Tasks:
    """All questions. Seconds, once a process. Raises OurFault when an environment may run answers."""
    environments = tuple(open_environment(each.name, json.loads(each.config)) for each in DEMO_ENVIRONMENTS)
    unsafe = [each.name for each in environments if each.evaluates_answers]
    if unsafe:
        raise OurFault(f"{unsafe[0]} may run answers as code; the lab scores in its own process")
    drawn = [_draw(place, environment) for place, environment in enumerate(environments)]
    return Tasks(environments, tuple(each[0] for each in drawn), tuple(each[1] for each in drawn))


def _draw(task: int, environment: Environment) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    training: list[Question] = []
    testing: dict[str, Question] = {}
    for index in range(_TRIES):
        if len(training) == TRAIN and len(testing) == HELD_OUT:
            break
        prompt = environment.prompt(SEED, index)
        question = Question(task, prompt)
        if is_held_out(prompt.text):
            if len(testing) < HELD_OUT:
                testing.setdefault(prompt.text, question)
        elif len(training) < TRAIN:
            training.append(question)
    return tuple(training), tuple(testing.values())
