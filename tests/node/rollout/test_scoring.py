"""Own completions: in process where text is only compared, in the sandbox where it may be executed."""

from __future__ import annotations

from typing import cast

from node.environment.tasks import Completion
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
