"""The one way from the node to its tasks: questions of seeds, and scores of answers.

    seeds    --questions--> a text for each, None where the task has none
    Answers  --score------> ScoredGroup | HostFailure for each

A task is a third party's code. `SandboxedHost` (`node/sandbox/host.py`) is what a node has: the code is
imported, opened and run in processes behind walls, and none of it in the node's. `TrustedHost` runs it right
here; it is for tests and their toy tasks, and no node opens one. Both block, may be called from any thread,
and raise nothing for what a task or an answer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from node.environment.guard import guarded_question, guarded_score
from node.environment.records import Completion, Environment, Score

__all__ = [
    "Answers",
    "FailureReason",
    "HostFailure",
    "ScoredGroup",
    "TaskHost",
    "TrustedHost",
]


class FailureReason(StrEnum):
    """Why there is no score or question. An honest author scores its own group first and does not send what
    fails."""

    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    FORBIDDEN = "forbidden"
    MALFORMED = "malformed"
    REFUSED = "refused"  # evaluates answers, and the sandbox here is weak
    UNAVAILABLE = "unavailable"  # the worker is down or the environment is broken; the answer was not judged

    @property
    def is_authors_fault(self) -> bool:
        """Whether the completions, rather than this node, are to blame."""
        return self not in (FailureReason.REFUSED, FailureReason.UNAVAILABLE)


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """node -> host. What was answered to the question of one seed."""

    environment: str
    seed: int
    completions: tuple[Completion, ...]


class ScoredGroup(msgspec.Struct, frozen=True):
    """host -> node. One score per completion, in order. `fault`: what the task did wrong on the first of
    those that count as wrong for it, "" for nothing."""

    scores: tuple[Score, ...]
    fault: str = ""

    @property
    def rewards(self) -> tuple[float, ...]:
        """What is learnt from."""
        return tuple(score.reward for score in self.scores)


class HostFailure(msgspec.Struct, frozen=True):
    """host -> node. `completion` is the index of the offender, -1 for the whole group or a question."""

    reason: FailureReason
    detail: str
    completion: int = -1


class TaskHost(Protocol):
    """See the module's docstring."""

    @property
    def walls(self) -> str:
        """What stands between the tasks and this machine, as a sentence."""
        ...

    @property
    def restarts(self) -> int:
        """How often what runs the tasks was started again."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that this node's own work has waited for tasks."""
        ...

    def questions(self, environment: str, seeds: Sequence[int]) -> Sequence[str | HostFailure | None]:
        """Of each seed the question; None where the environment fails on it, which it does on every machine;
        a failure where this machine could not tell."""
        ...

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        """Of each group the scores, or why there are none. `strangers`: who wrote them is none of us, and
        nobody's own work waits for them."""
        ...


class TrustedHost:
    """Runs `environments` in this process, without any limit."""

    walls = "tasks run in the node's process, behind no wall"
    restarts = 0
    waited_s = 0.0

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments

    def questions(self, environment: str, seeds: Sequence[int]) -> Sequence[str | HostFailure | None]:
        """See `TaskHost.questions`."""
        return [guarded_question(self._environments[environment], seed) for seed in seeds]

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        """See `TaskHost.score`."""
        return [self._scored(group) for group in groups]

    def _scored(self, group: Answers) -> ScoredGroup:
        environment = self._environments[group.environment]
        prompt = environment.prompt(group.seed, 0)
        scored = [guarded_score(environment, prompt, each) for each in group.completions]
        fault = next((fault for _, fault in scored if fault), "")
        return ScoredGroup(tuple(score for score, _ in scored), fault)
