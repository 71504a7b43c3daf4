"""One group asked of a task host, as strangers' are."""

from __future__ import annotations

from collections.abc import Sequence

from node.environment.host import Answers, HostFailure, ScoredGroup, TaskHost
from node.environment.records import Completion

__all__ = ["scored"]


def scored(
    host: TaskHost, environment: str, seed: int, completions: Sequence[Completion]
) -> ScoredGroup | HostFailure:
    """The scores of `completions` of a stranger, or why there are none."""
    (outcome,) = host.score([Answers(environment, seed, tuple(completions))], strangers=True)
    return outcome
