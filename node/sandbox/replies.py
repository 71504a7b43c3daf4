"""What the node makes of the bytes that forks wrote, which are an enemy's: typed, counted and bounded, or a
failure.

Plain functions from an `Outcome` to what the caller asked for. Nothing here raises for any bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from node.environment.guard import MAX_REWARD
from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup
from node.sandbox.records import ForkResult, ForkStatus, Outcome, Scored

__all__ = ["questions_of", "scores_of"]

_MAX_COMPONENTS = 32
_MAX_COMPONENT_NAME = 64
_MAX_FAULT = 200


@dataclass(frozen=True)
class _Failed:
    """In place of an item. `shared` forks say nothing about one item."""

    reason: FailureReason
    detail: str
    items: int
    """How many the fork was about; 0 for an item that no fork came to, since another one of it failed."""


def scores_of(
    outcome: Outcome, groups: Sequence[Answers]
) -> tuple[list[ScoredGroup | HostFailure], list[int]]:
    """What came of each group, and the numbers of those that failed in a fork which they shared."""
    total = sum(len(group.completions) for group in groups)
    items = _items(outcome, total, tuple[Scored, ...], _is_sound)
    made: list[ScoredGroup | HostFailure] = []
    shared: list[int] = []
    for number, group in enumerate(groups):
        own, items = items[: len(group.completions)], items[len(group.completions) :]
        failed = [(at, each) for at, each in enumerate(own) if isinstance(each, _Failed)]
        if not failed:
            fault = next((each.fault for each in own if each.fault), "")
            made.append(ScoredGroup(tuple(each.score for each in own), fault))
            continue
        at, why = max(failed, key=lambda pair: pair[1].items > 0)
        made.append(HostFailure(why.reason, why.detail, at if why.items == 1 else -1))
        if why.items > len(own):
            shared.append(number)
    return made, shared


def questions_of(
    outcome: Outcome, seeds: int, most_bytes: int
) -> tuple[list[str | HostFailure | None], list[int]]:
    """Of each seed its question, None where it has none, or why that is unknown; and the numbers of those
    that failed in a fork which they shared."""

    def is_sound(question: str | None) -> bool:
        return question is None or len(question.encode()) <= most_bytes

    items = _items(outcome, seeds, tuple[str | None, ...], is_sound)
    shared = [at for at, each in enumerate(items) if isinstance(each, _Failed) and each.items > 1]
    return [
        HostFailure(each.reason, each.detail) if isinstance(each, _Failed) else each for each in items
    ], shared


def _items(outcome: Outcome, total: int, kind: Any, is_sound: Callable[[Any], bool]) -> list[Any]:
    """Each item that was asked for, or a `_Failed`."""
    items: list[Any] = [_Failed(FailureReason.MALFORMED, "no result", 0)] * total
    for result in outcome.results:
        if not result.count:  # of the whole request
            if result.status is not ForkStatus.DONE:
                return [_failure(result)] * total
        elif result.first >= 0 and result.first + result.count <= total:
            made = _decoded(result, kind, is_sound)
            end = result.first + result.count
            items[result.first : end] = [made] * result.count if isinstance(made, _Failed) else made
    return items


def _decoded(result: ForkResult, kind: Any, is_sound: Callable[[Any], bool]) -> Sequence[Any] | _Failed:
    if result.status is not ForkStatus.DONE:
        return _failure(result)
    try:
        made: Sequence[Any] = msgspec.msgpack.decode(result.payload, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return _Failed(FailureReason.MALFORMED, type(error).__name__, result.count)
    if len(made) != result.count:
        return _Failed(FailureReason.MALFORMED, f"{len(made)} results for {result.count}", result.count)
    if not all(map(is_sound, made)):
        return _Failed(FailureReason.MALFORMED, "a result is out of bounds", result.count)
    return made


def _failure(result: ForkResult) -> _Failed:
    broken = result.status is ForkStatus.BROKEN
    reason = FailureReason.UNAVAILABLE if broken else FailureReason(result.status)
    return _Failed(reason, result.detail, result.count)


def _is_sound(scored: Scored) -> bool:
    score = scored.score
    return (
        math.isfinite(score.reward)
        and abs(score.reward) <= MAX_REWARD
        and len(scored.fault) <= _MAX_FAULT
        and scored.fault.isprintable()
        and len(score.components) <= _MAX_COMPONENTS
        and all(
            math.isfinite(value) and name.isprintable() and len(name) <= _MAX_COMPONENT_NAME
            for name, value in score.components
        )
    )
