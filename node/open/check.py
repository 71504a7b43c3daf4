"""A task in a file, tried as a node would run it: behind the walls, twice, under two hash seeds.

    file --pack--> two workers --questions, scores of fixed answers--> what is refused, what is told, a table

For whoever wrote the task, before anybody trains on it: what differs between two machines cannot be verified,
and what pays anything teaches nothing. The same faults end the founding of a swarm, or its training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.environment.host import Answers, HostFailure, ScoredGroup
from node.environment.pack import pack
from node.environment.probe import CONSTANTS, PAID, SENSELESS, Probe, probe
from node.environment.records import Completion
from node.environment.rows import solution_of
from node.sandbox.host import SandboxedHost
from protocol.charter import canonical_json
from protocol.codec import digest
from protocol.errors import ConfigError, SandboxError
from protocol.messages import EnvironmentSpec
from protocol.prompts import is_held_out

__all__ = ["Shown", "TaskCheck", "check_task"]

SEEDS = 512
"""Questions that are asked for."""
COMPARED = 64
"""Questions whose scores are compared between the two workers."""
SHOWN = 10
FEW = 64
"""Different questions below which a policy learns them by heart."""
LONG_CHARS = 4096
SLOW_S = 0.05
"""A question, or the score of an answer, that takes longer holds training up."""


@dataclass(frozen=True)
class Shown:
    """One question of the table."""

    question: str
    held_out: bool
    answer: str
    """What was tried: the row's own solution, else the constant that pays most."""
    reward: float | None
    """None where it has no score."""


@dataclass(frozen=True)
class TaskCheck:
    """What came of it."""

    name: str
    pin: str
    bytes: int
    distinct: int
    """Different questions among SEEDS."""
    held_out: int
    """Of those, for evaluation only."""
    evaluates_answers: bool
    question_ms: float
    score_ms: float
    probe: Probe
    refused: tuple[str, ...]
    """Why no swarm can train on it, sentences."""
    told: tuple[str, ...]
    """What its author should know."""
    table: tuple[Shown, ...]


def check_task(path: Path, config: Mapping[str, object]) -> TaskCheck:
    """Raises ConfigError for a file that is no task, SandboxError where it cannot be opened."""
    name, blob = pack(path)
    spec = EnvironmentSpec(name, canonical_json(dict(config)), pin=f"sha256:{digest(blob)}")
    try:
        with SandboxedHost([spec], blobs={name: blob}) as first:
            began_s = time.perf_counter()
            asked = first.questions(name, range(SEEDS))
            question_ms = (time.perf_counter() - began_s) / SEEDS * 1e3
            seeds = [seed for seed, text in enumerate(asked) if isinstance(text, str)]
            texts = [str(asked[seed]) for seed in seeds]
            began_s = time.perf_counter()
            scored = first.score(_tried(name, seeds[:COMPARED]))
            answers = max(1, len(scored) * len(SENSELESS + CONSTANTS))
            score_ms = (time.perf_counter() - began_s) / answers * 1e3
            paid = probe(first, name)
            table = tuple(_table(first, name, blob, config, list(zip(seeds, texts, strict=True)), paid.best))
            evaluates = name in first.evaluating
        with SandboxedHost([spec], blobs={name: blob}, hash_seed=1) as second:
            again = second.questions(name, range(SEEDS))
            scored_again = second.score(_tried(name, seeds[:COMPARED]))
    except SandboxError as error:
        raise ConfigError(str(error).removeprefix("cannot start the tasks' worker: ")) from None
    held_out = sum(map(is_held_out, set(texts)))
    refused = [*_failures(asked), *_differences(asked, again, scored, scored_again)]
    if texts and (not held_out or held_out == len(set(texts))):
        kind = "no question is held out" if not held_out else "every question is held out"
        refused.append(f"{kind} of {len(set(texts))} different ones: give it more rows")
    if paid.pays_anything:
        refused.append(f"it pays {paid.senseless:.2f} for senseless text: nothing is learnt from that")
    told = [*_faults(scored)]
    if paid.constant >= PAID:
        told.append(f"it pays {paid.constant:.2f} for answering {paid.best!r} always; that is learnt first")
    if 0 < len(set(texts)) < FEW:
        told.append(f"it has {len(set(texts))} different questions; a policy may learn them by heart")
    longest = max(map(len, texts), default=0)
    if longest > LONG_CHARS:
        told.append(f"its longest question has {longest} characters; many policies have no room for it")
    if max(question_ms, score_ms) > SLOW_S * 1e3:
        told.append(f"it takes {question_ms:.0f} ms a question and {score_ms:.0f} ms an answer: that is slow")
    wrong = [each for each in table if each.reward is not None and each.reward <= 0]
    if table and len(wrong) == len(table) and solution_of(blob, config, 0) is not None:
        refused.append(f"it pays nothing for its own answers, as {table[0].answer!r:.60}")
    return TaskCheck(
        name=name,
        pin=spec.pin,
        bytes=len(blob),
        distinct=len(set(texts)),
        held_out=held_out,
        evaluates_answers=evaluates,
        question_ms=question_ms,
        score_ms=score_ms,
        probe=paid,
        refused=tuple(refused),
        told=tuple(told),
        table=table,
    )


_Scored = Sequence[ScoredGroup | HostFailure]
_Asked = Sequence[str | HostFailure | None]


def _tried(name: str, seeds: Sequence[int]) -> list[Answers]:
    completions = tuple(Completion(text, finished=True) for text in (*SENSELESS, *CONSTANTS))
    return [Answers(name, seed, completions) for seed in seeds]


def _failures(asked: _Asked) -> Iterator[str]:
    failed = [each for each in asked if not isinstance(each, str)]
    if failed:
        first = next((each for each in failed if each is not None), None)
        why = f": {first.reason} ({first.detail})" if isinstance(first, HostFailure) else ""
        yield f"{len(failed)} of {len(asked)} seeds have no question{why}"


def _differences(asked: _Asked, again: _Asked, scored: _Scored, scored_again: _Scored) -> Iterator[str]:
    pairs = zip(asked, again, strict=True)
    other = next(((one, two) for one, two in pairs if one != two and isinstance(one, str)), None)
    if other is not None:
        one, two = other
        yield (
            f"a question differs between two runs ({one!r:.60} and {two!r:.60}): members could not derive it"
        )
    for number, (mine, theirs) in enumerate(zip(scored, scored_again, strict=True)):
        if isinstance(mine, ScoredGroup) and isinstance(theirs, ScoredGroup) and mine != theirs:
            texts = (*SENSELESS, *CONSTANTS)
            rewards = zip(texts, mine.rewards, theirs.rewards, strict=True)
            text, one_paid, two_paid = next(
                (each for each in rewards if each[1] != each[2]),
                (texts[0], mine.rewards[0], theirs.rewards[0]),
            )
            yield (
                f"the score of {text!r} on question {number} differs between two runs ({one_paid:g} and "
                f"{two_paid:g}): members would call each other liars"
            )
            return


def _faults(scored: _Scored) -> Iterator[str]:
    for each in scored:
        if isinstance(each, HostFailure):
            yield f"some answers have no score: {each.reason} ({each.detail})"
            return
        if each.fault:
            yield f"some answers count as wrong for a fault of the task: {each.fault}"
            return


def _table(
    host: SandboxedHost,
    name: str,
    blob: bytes,
    config: Mapping[str, object],
    asked: Sequence[tuple[int, str]],
    best: str,
) -> Iterator[Shown]:
    for seed, question in asked[:SHOWN]:
        solution = solution_of(blob, config, seed)
        answer = best if solution is None else solution
        (scored,) = host.score([Answers(name, seed, (Completion(answer, finished=True),))])
        reward = scored.rewards[0] if isinstance(scored, ScoredGroup) else None
        yield Shown(question, is_held_out(question), answer, reward)
