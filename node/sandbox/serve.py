"""What the worker does at its doors: requests -> jobs -> forks -> outcomes, until the node hangs up.

Runs inside the walls, on environments that `worker.py` has opened; only its forks ask them anything.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import msgspec

from node.environment.guard import guarded_question, guarded_score
from node.environment.host import Answers
from node.environment.records import Completion, Environment, Prompt
from node.sandbox.chunks import chunks
from node.sandbox.detection import Detector
from node.sandbox.forks import EXIT_FORBIDDEN, Batch, ForkRunner, Job
from node.sandbox.probes import attempt
from node.sandbox.records import (
    FRAME_HEADER_BYTES,
    Door,
    Layer,
    Outcome,
    ProbeRequest,
    QuestionRequest,
    Scored,
    ScoreRequest,
    Setup,
    frame,
)

__all__ = ["Server", "read_frame", "send"]

_Request = QuestionRequest | ScoreRequest | ProbeRequest


class Server:
    """Serves all doors with `runner`."""

    def __init__(
        self,
        setup: Setup,
        environments: Mapping[str, Environment],
        runner: ForkRunner,
        detector: Detector,
    ) -> None:
        self._limits = setup.limits
        self._detects = Layer.DETECTION in setup.layers
        self._environments = environments
        self._runner = runner
        self._detector = detector

    def serve(self, doors: Mapping[Door, tuple[int, int]]) -> NoReturn:
        """Answer at each door, one request at a time there and all doors at once, until the node closes a
        pipe, which ends this process."""
        under_way: dict[Door, tuple[int, Batch]] = {}
        while True:
            idle = {requests: door for door, (requests, _) in doors.items() if door not in under_way}
            for pipe in self._runner.wait(listening=idle.keys()):
                request: _Request = msgspec.msgpack.decode(read_frame(pipe), type=_Request)
                door = idle[pipe]
                under_way[door] = request.nonce, self._begin(request, door)
            for door, (nonce, batch) in list(under_way.items()):
                if batch.done:
                    del under_way[door]
                    send(doors[door][1], Outcome(nonce=nonce, results=batch.outcome()))

    def _begin(self, request: _Request, door: Door) -> Batch:
        many = isinstance(request, QuestionRequest) or (
            isinstance(request, ScoreRequest) and len(request.groups) > 1
        )
        within_s = self._limits.batch_s if many else self._limits.request_s
        niceness = self._limits.niceness if door is Door.PEERS else 0
        return self._runner.begin(list(self._jobs(request)), within_s, niceness)

    def _jobs(self, request: _Request) -> Iterator[Job]:
        limits = self._limits
        if isinstance(request, ProbeRequest):
            yield Job(0, 0, lambda _, __: attempt(request, limits), limits.reply_bytes)
        elif isinstance(request, QuestionRequest):
            environment = self._environments[request.environment]
            for first in range(0, len(request.seeds), limits.fork_items):
                seeds = request.seeds[first : first + limits.fork_items]
                derive = functools.partial(self._questions, environment, seeds)
                most = len(seeds) * limits.question_bytes
                yield Job(first, len(seeds), _encoded, most, derive, group=first)
        else:
            first = 0
            for group, shared in enumerate(_sharing(request.groups, self._environments, limits.fork_items)):
                items = sum(len(each.completions) for each in shared)
                environment = self._environments[shared[0].environment]
                step = 1 if environment.evaluates_answers else max(1, items)
                for begin in range(0, items, step):
                    score = functools.partial(self._score, environment, begin if step == 1 else None)
                    prepare = functools.partial(_prompts, environment, shared)
                    yield Job(
                        first + begin, min(step, items), score, limits.reply_bytes, prepare, group=group
                    )
                first += items

    def _questions(self, environment: Environment, seeds: Sequence[int]) -> list[str | None]:
        """Runs in the fork. What is too long to be told is no question."""
        asked = [guarded_question(environment, seed) for seed in seeds]
        most = self._limits.question_bytes - 8  # what msgpack puts before it
        return [None if text is None or len(text.encode()) > most else text for text in asked]

    def _score(
        self,
        environment: Environment,
        only: int | None,
        prepared: Sequence[tuple[Prompt, Sequence[Completion]]],
        pipe: int,
    ) -> bytes:
        """Runs in the fork. Of all completions, or of one of them."""
        write, leave = os.write, os._exit

        def report(what: str) -> NoReturn:
            write(pipe, what.encode(errors="replace"))
            leave(EXIT_FORBIDDEN)

        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if self._detects:
            self._detector.arm(report)
        pairs = [(prompt, each) for prompt, completions in prepared for each in completions]
        if only is not None:
            pairs = pairs[only : only + 1]
        return msgspec.msgpack.encode([Scored(*guarded_score(environment, *pair)) for pair in pairs])


def _encoded(questions: Sequence[str | None], _: int) -> bytes:
    return msgspec.msgpack.encode(questions)


def _prompts(
    environment: Environment, groups: Sequence[Answers]
) -> list[tuple[Prompt, tuple[Completion, ...]]]:
    """Runs in the fork."""
    return [(environment.prompt(each.seed, 0), each.completions) for each in groups]


def _sharing(
    groups: Sequence[Answers], environments: Mapping[str, Environment], most: int
) -> Iterator[list[Answers]]:
    """Groups that share their forks: neighbours of one environment that only compares, up to `most`
    completions."""
    return chunks(
        groups,
        lambda each: len(each.completions),
        most,
        lambda first, each: (
            each.environment == first.environment and not environments[each.environment].evaluates_answers
        ),
    )


def read_frame(descriptor: int) -> bytes:
    """One frame from the node; ends the process when the node has closed the pipe."""
    size = int.from_bytes(_read_exactly(descriptor, FRAME_HEADER_BYTES), "big")
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        block = os.read(descriptor, min(1 << 20, size - len(data)))
        if not block:
            os._exit(0)
        data += block
    return bytes(data)


def send(descriptor: int, record: msgspec.Struct) -> None:
    """Write one frame to the node."""
    data = memoryview(frame(record))
    while data:
        data = data[os.write(descriptor, data) :]
