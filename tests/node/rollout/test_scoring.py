"""Own completions: in process where text is only compared, in the sandbox where it may be executed."""

from __future__ import annotations

from typing import cast

import pytest

from node.environment.guard import guarded_score
from node.environment.tasks import Completion, Score
from node.rollout.scoring import OwnScorer
from node.sandbox.scorer import FailureReason, ScoreFailure, Scorer
from tests.node.toy import TASK, ToyEnvironment, ToySandbox

COMPLETIONS = [Completion("a", True), Completion("ab", True), Completion("abc", False)]


class Dangerous(ToyEnvironment):
    evaluates_answers = True

    def score(self, prompt: object, completion: object) -> object:  # type: ignore[override]
        raise AssertionError("an answer that may be code was scored in the node's process")


def scorer(environment: ToyEnvironment) -> tuple[OwnScorer, ToySandbox]:
    sandbox = ToySandbox()
    return OwnScorer({TASK: environment}, cast("Scorer", sandbox)), sandbox


def test_harmless_answers_are_scored_here() -> None:
    own, sandbox = scorer(ToyEnvironment())
    prompt = ToyEnvironment().prompt(5, 0)
    assert own.rewards(prompt, COMPLETIONS) == (1.0, 0.0, 1.0)
    assert own.reward(prompt, COMPLETIONS[0]) == 1.0
    assert sandbox.calls == 0


def test_answers_that_may_be_executed_go_to_the_sandbox() -> None:
    own, sandbox = scorer(Dangerous())
    prompt = ToyEnvironment().prompt(5, 0)
    assert own.rewards(prompt, COMPLETIONS) == (1.0, 0.0, 1.0)
    assert own.reward(prompt, COMPLETIONS[1]) == 0.0
    assert sandbox.calls == 2


def test_what_cannot_be_scored_is_a_failure_and_no_reward_in_an_evaluation() -> None:
    own, sandbox = scorer(Dangerous())
    prompt = ToyEnvironment().prompt(5, 0)
    sandbox.failure = FailureReason.TIMEOUT
    failed = own.rewards(prompt, COMPLETIONS)
    assert isinstance(failed, ScoreFailure)
    assert failed.reason is FailureReason.TIMEOUT
    assert own.reward(prompt, COMPLETIONS[0]) == 0.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (KeyError("answer"), "it raised KeyError"),
        (RecursionError(), "it raised RecursionError"),
        (Score(reward=None, components=()), "it returned the reward None"),  # type: ignore[arg-type]
        (Score(reward="1.0", components=()), "it returned the reward '1.0'"),  # type: ignore[arg-type]
        (Score(reward=float("nan"), components=()), "it returned the reward nan"),
        (Score(reward=float("-inf"), components=()), "it returned the reward -inf"),
        (Score(reward=2e6, components=()), "it returned the reward 2000000.0"),
        (Score(reward=True, components=()), "it returned the reward True"),
        (Score(reward=1.0, components=None), "it raised TypeError"),  # type: ignore[arg-type]
        (0.5, "it returned a float instead of a Score"),
        (None, "it returned a NoneType instead of a Score"),
    ],
)
def test_what_a_task_does_wrong_is_a_zero_and_told_once(given: object, says: str) -> None:
    class Broken(ToyEnvironment):
        def score(self, prompt: object, completion: object) -> object:  # type: ignore[override]
            if isinstance(given, Exception):
                raise given
            return given

    own, _ = scorer(Broken())
    prompt = ToyEnvironment().prompt(5, 0)
    assert own.rewards(prompt, COMPLETIONS) == (0.0, 0.0, 0.0)
    assert own.reward(prompt, COMPLETIONS[0]) == 0.0
    assert own.take_faults() == [f"{TASK} cannot score an answer: {says}; it counts as wrong"]
    assert own.take_faults() == []


def test_components_that_are_no_numbers_are_left_out() -> None:
    class Odd(ToyEnvironment):
        def score(self, prompt: object, completion: object) -> Score:  # type: ignore[override]
            return Score(reward=1, components=(("a", 0.5), ("b", float("nan")), ("c", None)))  # type: ignore[arg-type]

    score, fault = guarded_score(Odd(), ToyEnvironment().prompt(5, 0), COMPLETIONS[0])
    assert (score, fault) == (Score(reward=1.0, components=(("a", 0.5),)), "")
