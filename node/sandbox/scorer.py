"""What the node uses to score completions: blocking, thread-safe, and never harmed by an answer.

`Scorer.score` returns the scores of one group, or a `ScoreFailure` with a typed reason; it raises nothing for
any text. The worker is replaced when it stops answering, at first at once and then with a growing pause,
during which `score` returns `unavailable` instead of waiting. Results depend on the arguments alone, except
that an answer near the CPU limit may pass on a fast machine and time out on a slow one.

Rewards claimed by peers never come here, and what a failure costs its author is decided in `node/verify`.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

import msgspec

from node.environment.tasks import Completion, Score
from node.sandbox.channel import ChannelError, WorkerChannel
from node.sandbox.records import (
    ForkResult,
    ForkStatus,
    Layer,
    Outcome,
    ProbeRequest,
    SandboxLimits,
    ScoreRequest,
    Setup,
    Started,
)
from node.sandbox.strength import SandboxReport, describe, measure
from protocol.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from protocol.messages import EnvironmentSpec

__all__ = ["FailureReason", "ScoreFailure", "ScoredGroup", "Scorer"]

_STARTED_BYTES = 256 * 1024
_REPLY_SLACK_S = 5.0
_CLOSE_PATIENCE_S = 0.5
_PAUSE_FIRST_S = 0.5
_PAUSE_LONGEST_S = 60.0
_MAX_COMPONENTS = 32
_MAX_COMPONENT_NAME = 64


class FailureReason(StrEnum):
    """Why a group has no score. An honest author scores its own group first and does not send what fails."""

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


class ScoredGroup(msgspec.Struct, frozen=True):
    """scorer -> verify. One score per completion, in order."""

    scores: tuple[Score, ...]


class ScoreFailure(msgspec.Struct, frozen=True):
    """scorer -> verify. `completion` is the index of the offender, -1 for the whole group."""

    reason: FailureReason
    detail: str
    completion: int = -1


class Scorer:
    """Scores groups of completions in a sandboxed worker. `start` it, or use it as a context manager.

    `hidden_paths` (the node's home) are covered even where they lie beside a library; `layers` is for tests.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        limits: SandboxLimits | None = None,
        *,
        hidden_paths: Sequence[str] = (),
        layers: Sequence[Layer] = tuple(Layer),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.restarts = 0
        self._setup = Setup(
            environments={each.name: _config(each) for each in environments},
            limits=self.limits,
            layers=tuple(layers),
            hidden_paths=tuple(hidden_paths),
        )
        if len(self._setup.environments) != len(environments):
            raise SandboxError(
                f"environments must have different names, got {[each.name for each in environments]}"
            )
        self._lock = threading.Lock()
        self._monotonic_s = monotonic_s
        self._channel: WorkerChannel | None = None
        self._started = Started()
        self._report: SandboxReport | None = None
        self._nonce = 0
        self._pause_s = 0.0
        self._retry_at_s = -math.inf
        self._closed = False

    @property
    def report(self) -> SandboxReport:
        """How strong the sandbox is here, as measured by `start`."""
        if self._report is None:
            raise SandboxError("the scorer was not started; call start() first")
        return self._report

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker's supervisor, None while there is none."""
        return self._channel.pid if self._channel else None

    def start(self) -> SandboxReport:
        """Start the worker and measure the sandbox; `SandboxError` when an environment cannot be opened."""
        with self._lock:
            if self._closed:
                raise SandboxError("the scorer was closed; make a new one")
            if sys.platform != "linux":
                raise SandboxError(
                    f"scoring needs the sandbox, which needs Linux; this system is {sys.platform!r}"
                )
            if self._channel is None:
                try:
                    self._open()
                except ChannelError as error:
                    raise SandboxError(f"cannot start the scoring worker: {error}") from error
            if self._report is None:
                self._report = measure(self._probe, self._started.layers, self._started.missing)
            return self._report

    def close(self) -> None:
        """End the worker and every process below it. A `score` in progress fails; may be called twice."""
        self._closed = True
        channel = self._channel
        if not self._lock.acquire(timeout=_CLOSE_PATIENCE_S):
            if channel is not None:
                channel.kill()
            self._lock.acquire()
        try:
            self._drop()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def score(
        self, environment: str, seed: int, index: int, completions: Sequence[Completion]
    ) -> ScoredGroup | ScoreFailure:
        """The scores of `completions` to the prompt (environment, seed, index), or why there are none."""
        refusal = self._refusal(environment, completions)
        with self._lock:
            return refusal or self._ask(environment, seed, index, tuple(completions))

    def _refusal(self, environment: str, completions: Sequence[Completion]) -> ScoreFailure | None:
        """What can be refused without asking the worker."""
        if environment not in self._setup.environments:
            return ScoreFailure(FailureReason.UNAVAILABLE, f"environment {environment!r} was not opened")
        if len(completions) > self.limits.completions:
            detail = f"{len(completions)} completions, more than {self.limits.completions}"
            return ScoreFailure(FailureReason.MALFORMED, detail)
        for position, each in enumerate(completions):
            try:
                size = len(each.text.encode())
            except UnicodeEncodeError:
                return ScoreFailure(FailureReason.MALFORMED, "not valid Unicode", position)
            if size > self.limits.completion_bytes:
                detail = f"{size} bytes, more than {self.limits.completion_bytes}"
                return ScoreFailure(FailureReason.MALFORMED, detail, position)
        if (
            self._report is not None
            and not self._report.may_evaluate
            and environment in self._started.evaluating
        ):
            return ScoreFailure(FailureReason.REFUSED, describe(self._report))
        return None

    def _ask(
        self, environment: str, seed: int, index: int, completions: tuple[Completion, ...]
    ) -> ScoredGroup | ScoreFailure:
        if self._report is None or self._closed:
            return ScoreFailure(FailureReason.UNAVAILABLE, "the scorer is not running")
        if self._channel is None and self._monotonic_s() < self._retry_at_s:
            return ScoreFailure(
                FailureReason.UNAVAILABLE, "the scoring worker is down and will be started again"
            )
        try:
            if self._channel is None:
                self.restarts += 1
                self._open()
            self._nonce += 1
            request = ScoreRequest(self._nonce, environment, seed, index, completions)
            forks = len(completions) if environment in self._started.evaluating else 1
            outcome = self._exchange(request, forks)
        except ChannelError as error:
            self._drop()
            self._pause()
            # The worker ends forks that take too long, so its own silence is not the answer's doing.
            return ScoreFailure(FailureReason.UNAVAILABLE, str(error))
        self._pause_s = 0.0
        return _read_outcome(outcome, len(completions))

    def _exchange(self, request: ScoreRequest | ProbeRequest, forks: int) -> Outcome:
        if self._channel is None:
            raise ChannelError("the scoring worker is not running")
        limits = self.limits
        patience_s = limits.request_s + _REPLY_SLACK_S
        self._channel.send(request, patience_s)
        max_bytes = max(1, forks) * (limits.reply_bytes + 256) + 256
        outcome = self._channel.receive(Outcome, max_bytes, patience_s)
        if outcome.nonce != request.nonce:
            raise ChannelError(f"the scoring worker answered request {outcome.nonce}, not {request.nonce}")
        return outcome

    def _probe(self, request: ProbeRequest) -> ForkResult | None:
        try:
            return self._exchange(request, forks=1).results[0]
        except ChannelError:
            self._drop()
            self._open()
            return None

    def _open(self) -> None:
        self._channel = WorkerChannel()
        try:
            self._channel.send(self._setup, self.limits.start_s)
            self._started = self._channel.receive(Started, _STARTED_BYTES, self.limits.start_s)
            if self._started.error:
                raise ChannelError(self._started.error)
        except ChannelError:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _pause(self) -> None:
        """The first replacement comes at once; the next ones after 0.5, 1, 2 ... 60 seconds."""
        self._retry_at_s = self._monotonic_s() + self._pause_s
        self._pause_s = min(_PAUSE_LONGEST_S, max(_PAUSE_FIRST_S, 2 * self._pause_s))


def _config(environment: EnvironmentSpec) -> dict[str, Any]:
    config = environment.config
    try:
        parsed = json.loads(config)
    except json.JSONDecodeError as error:
        raise SandboxError(f"config of environment {environment.name!r} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise SandboxError(
            f"config of environment {environment.name!r} must be a JSON object, got {config[:80]!r}"
        )
    return parsed


def _read_outcome(outcome: Outcome, expected: int) -> ScoredGroup | ScoreFailure:
    scores: list[Score] = []
    for result in outcome.results:
        offender = result.first if result.count == 1 else -1
        if result.status is ForkStatus.BROKEN:
            return ScoreFailure(FailureReason.UNAVAILABLE, result.detail, offender)
        if result.status is not ForkStatus.DONE:
            return ScoreFailure(FailureReason(result.status), result.detail, offender)
        try:
            claimed = msgspec.msgpack.decode(result.payload, type=tuple[Score, ...])
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            return ScoreFailure(FailureReason.MALFORMED, type(error).__name__, offender)
        if len(claimed) != result.count:
            return ScoreFailure(
                FailureReason.MALFORMED, f"{len(claimed)} scores for {result.count}", offender
            )
        for position, each in enumerate(claimed, result.first):
            if not _is_sound(each):
                return ScoreFailure(FailureReason.MALFORMED, "reward or component out of bounds", position)
        scores += claimed
    if len(scores) != expected:
        return ScoreFailure(FailureReason.MALFORMED, f"{len(scores)} scores for {expected} completions")
    return ScoredGroup(tuple(scores))


def _is_sound(score: Score) -> bool:
    return (
        math.isfinite(score.reward)
        and len(score.components) <= _MAX_COMPONENTS
        and all(
            math.isfinite(value) and name.isprintable() and len(name) <= _MAX_COMPONENT_NAME
            for name, value in score.components
        )
    )
