"""Own completions are scored by the host, and what a task does wrong on them is told once."""

from __future__ import annotations

import pytest

from node.environment.guard import guarded_score
from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup
from node.environment.records import Completion, Score
from node.rollout.scoring import OwnScorer
from tests.node.toy import TASK, ToyEnvironment, ToyHost

COMPLETIONS = (Completion("a", True), Completion("ab", True), Completion("abc", False))


def rewards(own: OwnScorer) -> tuple[float, ...] | HostFailure:
    (made,) = own.score([Answers(TASK, 5, COMPLETIONS)])
    return made.rewards if isinstance(made, ScoredGroup) else made


def test_one_request_scores_many_groups_in_their_order() -> None:
    own = OwnScorer(ToyHost())
    made = own.score([Answers(TASK, 5, COMPLETIONS), Answers(TASK, 6, ()), Answers(TASK, 7, COMPLETIONS[1:])])
    assert [each.rewards for each in made if isinstance(each, ScoredGroup)] == [
        (1.0, 0.0, 1.0),
        (),
        (0.0, 1.0),
    ]


def test_what_cannot_be_scored_is_a_failure_and_no_reward_in_an_evaluation() -> None:
    host = ToyHost()
    own, prompt = OwnScorer(host), ToyEnvironment().prompt(5, 0)
    assert own.rewards([prompt], [COMPLETIONS[:2]]) == [(1.0, 0.0)]
    host.failure = FailureReason.TIMEOUT
    assert rewards(own) == HostFailure(FailureReason.TIMEOUT, "as told")
    assert own.rewards([prompt], [COMPLETIONS[:2]]) == [(0.0, 0.0)]
    assert own.take_faults() == [f"{TASK} gave no score of an answer (timeout: as told); it counts as wrong"]


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

    own = OwnScorer(ToyHost(Broken()))
    assert rewards(own) == rewards(own) == (0.0, 0.0, 0.0)
    assert own.take_faults() == [f"{TASK} cannot score an answer: {says}; it counts as wrong"]
    assert own.take_faults() == []


def test_components_that_are_no_numbers_are_left_out() -> None:
    class Odd(ToyEnvironment):
        def score(self, prompt: object, completion: object) -> Score:  # type: ignore[override]
            return Score(reward=1, components=(("a", 0.5), ("b", float("nan")), ("c", None)))  # type: ignore[arg-type]

    score, fault = guarded_score(Odd(), ToyEnvironment().prompt(5, 0), COMPLETIONS[0])
    assert (score, fault) == (Score(reward=1.0, components=(("a", 0.5),)), "")
