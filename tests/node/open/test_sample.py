"""What a policy does on its tasks, with an engine that answers by a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from node.environment.host import TrustedHost
from node.environment.records import Completion, Prompt, Score
from node.open.sample import Asking, sample_policy
from node.rollout.engine.base import Engine, Generation, GenerationRequest
from node.rollout.policy import Policy
from protocol.errors import CharterError, ModelError
from protocol.messages import FinishReason, Rollout
from protocol.rollouts import single_turn


class Speaker:
    """A policy that takes a token for each character."""

    path = Path("models/ada")

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


class Even:
    """Pays finished answers of an even length; its questions are seeds."""

    name, evaluates_answers, reproducible = "even", False, True

    def __init__(self, *, broken: Sequence[int] = ()) -> None:
        self._broken = broken

    def prompt(self, seed: int, index: int) -> Prompt:
        if seed in self._broken:
            raise ValueError(seed)
        return Prompt(self.name, f"{seed:08d}", seed, index)

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(float(completion.finished and len(completion.text) % 2 == 0), ())


class Scripted(Generation):
    """Gives one answer at a look: of one letter to the first question, and of one, two, one ... to others.
    Those to the third question are cut."""

    def __init__(self) -> None:
        self.sampled = 0
        self._left: list[tuple[int, GenerationRequest]] = []

    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        self._left = list(enumerate(requests))
        return list(range(len(requests)))

    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        ticket, request = self._left.pop(0)
        question, place = request.prompt_ids[-1] - ord("0"), ticket % 8
        letters = 1 + (place % 2 if question else 0)
        self.sampled += letters + 1
        tokens_T = np.zeros(letters + 1, "<u4").tobytes()
        finish = FinishReason.LENGTH if question == 2 else FinishReason.STOP
        return [
            (
                ticket,
                [
                    single_turn(
                        "x" * letters,
                        token_ids=tokens_T,
                        logprobs=tokens_T,
                        versions=tokens_T,
                        finish=finish,
                        seed=0,
                    )
                ],
            )
        ]

    @property
    def in_flight(self) -> int:
        return len(self._left)

    def close(self) -> None:
        self._left = []


class Voice:
    """An engine with room for 40 tokens."""

    context = 40

    def open(self, *, greedy: bool = False) -> Generation:
        return Scripted()


def sampled(*, within_s: float = 1000.0, broken: Sequence[int] = (), context: int = 40) -> tuple[object, ...]:
    ticks = iter(range(1000))
    engine = Voice()
    engine.context = context
    made = sample_policy(
        cast("Policy", Speaker()),
        cast("Engine", engine),
        TrustedHost({"even": Even(broken=broken)}),
        ["even"],
        Asking(questions=3, max_tokens=100, within_s=within_s),
        now_s=lambda: float(next(ticks)),
    )
    (task,) = made.tasks
    assert (made.model, made.late) == ("ada", 0 if within_s > 6 else 19)
    assert task.paid == ((3,) * 4 if task.mixed else ())  # "xx" and its end token
    return made.cap, task.answers, task.lengths, task.groups, task.mixed, round(task.reward, 3), task.lost


def test_lengths_ends_and_mixed_groups_are_counted() -> None:
    """8 answers of 2 tokens, then 2 and 3 in turn; those to the third question are cut. Only the second group
    is mixed: 4 of its answers are even, 4 of 24 in all."""
    lengths = (2,) * 8 + (2, 3) * 4
    assert sampled() == (32, 24, lengths, 3, 1, 0.167, 0)


def test_what_is_not_there_in_time_counts_as_cut() -> None:
    """The clock goes on by a second a look: it begins at 0, and the looks at 1 to 5 are in time."""
    assert sampled(within_s=6.0) == (32, 24, (2,) * 5, 3, 0, 0.0, 0)


def test_questions_that_the_task_has_not_are_lost() -> None:
    assert sampled(broken=(2,)) == (32, 16, (2,) * 8 + (2, 3) * 4, 2, 1, 0.25, 1)
    with pytest.raises(CharterError, match="the task even gives no question"):
        sampled(broken=(0, 1, 2))


def test_a_question_without_room_for_an_answer_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"3 of 3 questions of even leave ada no room .* takes 8 tokens and"):
        sampled(context=8)
