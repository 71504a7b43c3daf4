"""The node's tasks, in processes behind walls: blocking, thread-safe, never harmed by a task or an answer.

`SandboxedHost` is the `TaskHost` of every node: it starts one worker (`worker.py`) and asks it through its
doors. What a request fails at is a value, never an exception. The worker is replaced when it stops answering,
at first at once and then with a growing pause, during which the answer is `unavailable` instead of a wait.
Results depend on the arguments alone, except that an answer near the CPU limit may pass on a fast machine and
time out on a slow one.

Rewards claimed by peers never come here, and what a failure costs its author is decided in `node/verify`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup
from node.sandbox.channel import ChannelError, WorkerProcess
from node.sandbox.chunks import chunks
from node.sandbox.records import (
    Door,
    ForkResult,
    Layer,
    Outcome,
    ProbeRequest,
    QuestionRequest,
    SandboxLimits,
    ScoreRequest,
    Setup,
    Started,
)
from node.sandbox.replies import questions_of, scores_of
from node.sandbox.strength import SandboxReport, describe, measure
from protocol.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from protocol.messages import EnvironmentSpec

__all__ = ["SandboxedHost"]

_STARTED_BYTES = 256 * 1024
_REPLY_SLACK_S = 5.0
_PAUSE_FIRST_S = 0.5
_PAUSE_LONGEST_S = 60.0
_REQUEST_ITEMS = 256
"""Questions, or completions, of one request."""
_ALONE_S = 60.0
"""How long those that failed together are tried one by one."""


class SandboxedHost:
    """Asks the environments of a charter in a sandboxed worker. `start` it, or use it as a context manager.

    `blobs` are those of tasks in files, by name. `hidden_paths` (the node's home) are covered even where they
    lie beside a library. `layers` is for tests, `hash_seed` for trying whether a task depends on it.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        limits: SandboxLimits | None = None,
        *,
        blobs: Mapping[str, bytes] | None = None,
        hidden_paths: Sequence[str] = (),
        layers: Sequence[Layer] = tuple(Layer),
        hash_seed: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.restarts = 0
        self.waited_s = 0.0
        self._setup = Setup(
            environments={each.name: _config(each) for each in environments},
            limits=self.limits,
            layers=tuple(layers),
            hidden_paths=tuple(hidden_paths),
            blobs=dict(blobs or {}),
        )
        if len(self._setup.environments) != len(environments):
            raise SandboxError(
                f"environments must have different names, got {[each.name for each in environments]}"
            )
        self._hash_seed = hash_seed
        self._monotonic_s = monotonic_s
        self._at_door = {door: threading.Lock() for door in Door}
        self._lock = threading.Lock()
        """What follows belongs to whoever has it."""
        self._worker: WorkerProcess | None = None
        self._users: dict[WorkerProcess, int] = {}
        """How many threads are at a door of it."""
        self._started = Started()
        self._report: SandboxReport | None = None
        self._nonce = 0
        self._pause_s = 0.0
        self._retry_at_s = -math.inf
        self._closed = False

    # --- life ----------------------------------------------------------------------------------------------

    @property
    def report(self) -> SandboxReport:
        """How strong the sandbox is here, as measured by `start`."""
        if self._report is None:
            raise SandboxError("the sandbox was not started; call start() first")
        return self._report

    @property
    def walls(self) -> str:
        """See `TaskHost.walls`."""
        return describe(self.report)

    @property
    def evaluating(self) -> Sequence[str]:
        """Names of the environments whose scoring may run an answer; known once it was started."""
        return self._started.evaluating

    @property
    def unrepeatable(self) -> Sequence[str]:
        """Names of the environments whose questions differ between machines; known once it was started."""
        return self._started.unrepeatable

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker's supervisor, None while there is none."""
        return self._worker.pid if self._worker else None

    def start(self) -> SandboxReport:
        """Start the worker and measure the sandbox; `SandboxError` when an environment cannot be opened."""
        if self._closed:
            raise SandboxError("the sandbox was closed; make a new one")
        if sys.platform != "linux":
            raise SandboxError(f"tasks need the sandbox, which needs Linux; this system is {sys.platform!r}")
        if self._report is None:
            try:
                with self._lock:
                    self._worker = self._worker or self._opened()
            except ChannelError as error:
                raise SandboxError(f"cannot start the tasks' worker: {error}") from error
            self._report = measure(self._probe, self._started.layers, self._started.missing)
        return self._report

    def close(self) -> None:
        """End the worker and every process below it. What is in progress fails; may be called twice."""
        with self._lock:
            self._closed = True
            self._retire()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- what is asked -------------------------------------------------------------------------------------

    def questions(self, environment: str, seeds: Sequence[int]) -> Sequence[str | HostFailure | None]:
        """See `TaskHost.questions`."""
        made: list[str | HostFailure | None] = []
        if environment not in self._setup.environments:
            return [HostFailure(FailureReason.UNAVAILABLE, f"{environment!r} was not opened")] * len(seeds)
        for first in range(0, len(seeds), _REQUEST_ITEMS):
            some = tuple(seeds[first : first + _REQUEST_ITEMS])
            answered, together = self._questions(environment, some)
            for number in self._in_time(together):
                answered[number] = self._questions(environment, (some[number],))[0][0]
            made += answered
        return made

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        """See `TaskHost.score`. Strangers' groups share no process."""
        made = [self._refusal(group) for group in groups]
        asked = [number for number, refusal in enumerate(made) if refusal is None]
        scored: dict[int, ScoredGroup | HostFailure] = {}
        door = Door.PEERS if strangers else Door.OWN
        most = 1 if strangers else _REQUEST_ITEMS
        for some in chunks(asked, lambda number: len(groups[number].completions), most):
            results, together = self._scores(door, [groups[number] for number in some])
            scored |= zip(some, results, strict=True)
            for number in self._in_time([some[each] for each in together]):
                scored[number] = self._scores(door, [groups[number]])[0][0]
        return [refusal or scored[number] for number, refusal in enumerate(made)]

    def _in_time(self, numbers: Sequence[int]) -> Iterator[int]:
        """Those of these that are come to within _ALONE_S."""
        end_s = self._monotonic_s() + _ALONE_S
        return itertools.takewhile(lambda _: self._monotonic_s() < end_s, numbers)

    def _refusal(self, group: Answers) -> HostFailure | None:
        """What can be refused without asking the worker."""
        if group.environment not in self._setup.environments:
            return HostFailure(FailureReason.UNAVAILABLE, f"environment {group.environment!r} was not opened")
        if len(group.completions) > self.limits.completions:
            detail = f"{len(group.completions)} completions, more than {self.limits.completions}"
            return HostFailure(FailureReason.MALFORMED, detail)
        for position, each in enumerate(group.completions):
            try:
                size = len(each.text.encode())
            except UnicodeEncodeError:
                return HostFailure(FailureReason.MALFORMED, "not valid Unicode", position)
            if size > self.limits.completion_bytes:
                detail = f"{size} bytes, more than {self.limits.completion_bytes}"
                return HostFailure(FailureReason.MALFORMED, detail, position)
        report = self._report
        if report is not None and not report.may_evaluate and group.environment in self._started.evaluating:
            return HostFailure(FailureReason.REFUSED, describe(report))
        return None

    def _questions(
        self, environment: str, seeds: tuple[int, ...]
    ) -> tuple[list[str | HostFailure | None], list[int]]:
        limits = self.limits
        request = QuestionRequest(self._next_nonce(), environment, seeds)
        outcome = self._ask(Door.OWN, request, len(seeds) * (limits.question_bytes + 256), limits.batch_s)
        if isinstance(outcome, HostFailure):
            return [outcome] * len(seeds), []
        return questions_of(outcome, len(seeds), limits.question_bytes)

    def _scores(
        self, door: Door, groups: Sequence[Answers]
    ) -> tuple[list[ScoredGroup | HostFailure], list[int]]:
        limits = self.limits
        request = ScoreRequest(self._next_nonce(), tuple(groups))
        forks = 1 + sum(len(group.completions) for group in groups)
        within_s = limits.request_s if len(groups) == 1 else limits.batch_s
        outcome = self._ask(door, request, forks * (limits.reply_bytes + 256), within_s)
        if isinstance(outcome, HostFailure):
            return [outcome] * len(groups), []
        return scores_of(outcome, groups)

    # --- the worker ----------------------------------------------------------------------------------------

    def _next_nonce(self) -> int:
        with self._lock:
            self._nonce += 1
            return self._nonce

    def _ask(
        self, door: Door, request: QuestionRequest | ScoreRequest, max_bytes: int, within_s: float
    ) -> Outcome | HostFailure:
        if self._report is None:
            return HostFailure(FailureReason.UNAVAILABLE, "the sandbox is not running")
        began_s = self._monotonic_s()
        try:
            return self._exchange(door, request, max_bytes, within_s + _REPLY_SLACK_S)
        except ChannelError as error:
            # The worker ends forks that take too long, so its own silence is not the answer's doing.
            return HostFailure(FailureReason.UNAVAILABLE, str(error))
        finally:
            if door is Door.OWN:
                self.waited_s += self._monotonic_s() - began_s

    def _exchange(
        self,
        door: Door,
        request: QuestionRequest | ScoreRequest | ProbeRequest,
        max_bytes: int,
        patience_s: float,
    ) -> Outcome:
        with self._at_door[door], self._using_worker() as worker:
            pipes = worker.doors[door]
            pipes.send(request, patience_s)
            outcome = pipes.receive(Outcome, max_bytes + 256, patience_s)
            if outcome.nonce != request.nonce:
                raise ChannelError(f"the worker answered request {outcome.nonce}, not {request.nonce}")
            return outcome

    def _probe(self, request: ProbeRequest) -> ForkResult | None:
        try:
            outcome = self._exchange(
                Door.OWN, request, self.limits.reply_bytes, self.limits.request_s + _REPLY_SLACK_S
            )
            return outcome.results[0]
        except ChannelError:
            return None

    @contextlib.contextmanager
    def _using_worker(self) -> Iterator[WorkerProcess]:
        """The worker, started again where it is gone; after a `ChannelError` inside it is given up. Raises
        ChannelError when there is none."""
        with self._lock:
            worker = self._running()
            self._users[worker] = self._users.get(worker, 0) + 1
        try:
            yield worker
            self._pause_s = 0.0
        except ChannelError:
            with self._lock:
                if worker is self._worker:
                    self._retire()
                    self._pause()
            raise
        finally:
            with self._lock:
                self._users[worker] -= 1
                self._drop_unused()

    def _running(self) -> WorkerProcess:
        if self._closed:
            raise ChannelError("the sandbox is not running")
        if self._worker is None:
            if self._monotonic_s() < self._retry_at_s:
                raise ChannelError("the worker is down and will be started again")
            self.restarts += 1
            try:
                self._worker = self._opened()
            except ChannelError:
                self._pause()
                raise
        return self._worker

    def _opened(self) -> WorkerProcess:
        worker = WorkerProcess(self._hash_seed)
        try:
            pipes = worker.doors[Door.OWN]
            pipes.send(self._setup, self.limits.start_s)
            self._started = pipes.receive(Started, _STARTED_BYTES, self.limits.start_s)
            if self._started.error:
                raise ChannelError(self._started.error)
        except ChannelError as error:
            said = "" if self._started.error else worker.complaint()
            worker.close()
            raise ChannelError(f"{error}{said}") from error
        return worker

    def _retire(self) -> None:
        """Use the worker no more; whoever is at one of its doors gets a `ChannelError`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._users.setdefault(worker, 0)
            if self._users[worker]:
                worker.kill()
        self._drop_unused()

    def _drop_unused(self) -> None:
        for worker, users in list(self._users.items()):
            if not users and worker is not self._worker:
                del self._users[worker]
                worker.close()

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
