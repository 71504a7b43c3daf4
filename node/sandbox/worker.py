"""The scoring worker: locks itself in, imports the environments, and scores each request in a fresh fork.

Three processes: a supervisor, which only waits; a helper that entered the namespaces; and below it the worker
proper, process 1 of its own pid namespace, which serves. Each dies with the one above it, and the worker ends
when the node's pipe hangs up. A fork that an answer has spoilt is gone with its request, so nothing it
changed meets the next one. Answers of an environment which evaluates them get one fork each, so none can
touch its siblings.

Started by `scorer.py` as `python -s -P -B -X utf8 -c ...` with the node's own absolute import paths, not with
`-I`: that would also ignore PYTHONHASHSEED=0, without which two nodes may give the same answer different
scores.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from node.environment.guard import guarded_score
from node.environment.tasks import (
    Completion,
    Environment,
    Prompt,
    open_environment,
    package_paths,
    registered,
)
from node.sandbox import isolation, linux
from node.sandbox.detection import Detector
from node.sandbox.forks import EXIT_FORBIDDEN, ForkRunner, Job
from node.sandbox.probes import attempt
from node.sandbox.records import (
    FRAME_HEADER_BYTES,
    ForkResult,
    ForkStatus,
    Layer,
    Outcome,
    ProbeRequest,
    ScoreRequest,
    Setup,
    Started,
    frame,
)
from node.sandbox.seccomp import seccomp_program
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.metadata import EntryPoint

__all__ = ["main"]

_WARM_UP_ANSWERS = ("", "1 + 1", "x**2 + 1", "[[1, 0], [0, 1]]", "a b c")
_OPEN_FILES = 64


def main() -> NoReturn:
    """Entry point of the process; standard input and output are the pipes from and to the node."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    setup = msgspec.msgpack.decode(_read_frame(requests), type=Setup)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _supervise(setup, requests, replies)


def _supervise(setup: Setup, requests: int, replies: int) -> NoReturn:
    """Start the worker behind as many walls as this machine allows, then wait for its end. Nothing of an
    environment is imported before they stand."""
    try:
        packages = package_paths(setup.environments)
    except ConfigError as error:
        _send(replies, Started(error=str(error)))
        sys.exit(1)
    own = registered()  # what is installed is not seen from inside
    view = isolation.readable_view(setup.hidden_paths, [str(path) for path in packages])
    missing: list[str] = []
    for walls in ([True] if Layer.NAMESPACES in setup.layers else []) + [False]:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            linux.set_parent_death_signal(signal.SIGKILL)
            with contextlib.suppress(OSError):  # when memory runs out, the kernel takes this before the node
                Path("/proc/self/oom_score_adj").write_text("900")
            try:
                if walls:
                    isolation.leave_namespaces()
                helped = os.fork()
            except OSError as error:
                os.write(theirs, str(error).encode())
                os._exit(1)
            if helped:
                for descriptor in (theirs, requests, replies):
                    os.close(descriptor)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(helped, 0)[1]) & 0xFF)
            linux.set_parent_death_signal(signal.SIGKILL)
            meter = isolation.MemoryMeter()
            try:
                if walls:
                    isolation.build_root(view, setup.hidden_paths)
            except OSError as error:
                os.write(theirs, str(error).encode())
                os._exit(1)
            os.close(theirs)
            _Worker(setup, view, replies, walls, missing).serve(requests, meter, own)
        os.close(theirs)
        problem = os.read(ours, 1000)
        os.close(ours)
        if not problem:
            os.close(requests)
            os.close(replies)
            status = os.waitpid(pid, 0)[1]
            sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)  # libraries tidy up their temporary folders
        os.waitpid(pid, 0)
        missing.append(f"no namespaces: {problem.decode(errors='replace')}")
    os._exit(1)


def _open_environments(setup: Setup, own: Mapping[str, EntryPoint]) -> dict[str, Environment]:
    """Open each environment and score harmless answers, so that what is imported late is imported now."""
    environments: dict[str, Environment] = {}
    for name, config in setup.environments.items():
        environment = open_environment(name, config, own)
        prompt = environment.prompt(0, 0)
        for text in _WARM_UP_ANSWERS:
            guarded_score(environment, prompt, Completion(text=text, finished=True))
        environments[name] = environment
    return environments


class _Worker:
    """Serves requests, one at a time, each in forks of its own."""

    def __init__(
        self,
        setup: Setup,
        view: Sequence[str],
        replies: int,
        walls: bool,
        missing: Sequence[str],
    ) -> None:
        self._setup = setup
        self._environments: dict[str, Environment] = {}
        self._view = view
        self._detector = Detector(view)
        self._replies = replies
        self._layers = [Layer.NAMESPACES] if walls else []
        self._missing = list(missing)

    def serve(self, requests: int, meter: isolation.MemoryMeter, own: Mapping[str, EntryPoint]) -> NoReturn:
        """Lock in, open the environments, report, then answer until the node closes the pipe."""
        self._lock_in()
        try:
            self._environments = _open_environments(self._setup, own)
        except Exception as error:  # whatever a third party's environment raises, the node wants a sentence
            _send(self._replies, Started(error=f"{type(error).__name__}: {error}"[:2000]))
            os._exit(1)
        self._close_files()
        os.environ.clear()
        gc.collect()
        gc.freeze()  # forks then share these pages for as long as possible
        self._runner = ForkRunner(requests, self._setup.limits, *meter.read())
        meter.close()
        self._filter_calls()
        _send(
            self._replies,
            Started(
                layers=tuple(self._layers),
                missing=tuple(self._missing),
                evaluating=tuple(name for name, each in self._environments.items() if each.evaluates_answers),
            ),
        )
        while True:
            request = msgspec.msgpack.decode(_read_frame(requests), type=ScoreRequest | ProbeRequest)
            try:
                results = self._runner.run(self._jobs(request))
            except (
                Exception
            ) as error:  # a broken environment must not cost the worker, nor be blamed on the answer
                results = (ForkResult(0, 0, ForkStatus.BROKEN, type(error).__name__, b""),)
            _send(self._replies, Outcome(nonce=request.nonce, results=results))

    def _lock_in(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard == resource.RLIM_INFINITY or hard > _OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        self._missing += isolation.lock_down(
            self._view, self._setup.limits, own_root=Layer.NAMESPACES in self._layers
        )
        linux.set_parent_death_signal(signal.SIGKILL)  # a change of user clears it

    def _close_files(self) -> None:
        """From now on files are read at most, and only libraries."""
        if Layer.NAMESPACES in self._layers:
            isolation.seal()
        if Layer.LANDLOCK in self._setup.layers:
            try:
                linux.restrict_with_landlock(self._view)
            except OSError as error:
                self._missing.append(f"no landlock: {error}")
            else:
                self._layers.append(Layer.LANDLOCK)

    def _filter_calls(self) -> None:
        """The system calls of forks."""
        wanted = self._setup.layers
        if Layer.SECCOMP in wanted:
            self._runner.filter = seccomp_program(self._setup.limits.memory_bytes)
            if self._runner.filter is None:
                self._missing.append(f"no system call filter: no table for machine {os.uname().machine!r}")
            elif (trial := self._runner.run([Job(0, 0, lambda _: b"")])[0]).status is not ForkStatus.DONE:
                self._missing.append(f"no system call filter: {trial.detail}")
                self._runner.filter = None
            else:
                self._layers.append(Layer.SECCOMP)
        self._layers += [Layer.LIMITS, *([Layer.DETECTION] if Layer.DETECTION in wanted else [])]

    def _jobs(self, request: ScoreRequest | ProbeRequest) -> list[Job]:
        if isinstance(request, ProbeRequest):
            return [Job(0, 0, lambda _: attempt(request, self._setup.limits))]
        environment = self._environments[request.environment]
        # Once, here, not in each fork: the environment is ours, only the completions are a stranger's.
        prompt = environment.prompt(request.seed, request.index)
        total = len(request.completions)
        step = 1 if environment.evaluates_answers else max(1, total)
        return [
            Job(
                first,
                min(step, total - first),
                functools.partial(
                    self._score, environment, prompt, request.completions[first : first + step]
                ),
            )
            for first in range(0, total, step)
        ]

    def _score(
        self, environment: Environment, prompt: Prompt, completions: Sequence[Completion], pipe: int
    ) -> bytes:
        """Runs in the fork."""
        write, leave = os.write, os._exit

        def report(what: str) -> NoReturn:
            write(pipe, what.encode(errors="replace"))
            leave(EXIT_FORBIDDEN)

        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if Layer.DETECTION in self._setup.layers:
            self._detector.arm(report)
        return msgspec.msgpack.encode([guarded_score(environment, prompt, each)[0] for each in completions])


def _read_frame(descriptor: int) -> bytes:
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


def _send(descriptor: int, record: msgspec.Struct) -> None:
    data = memoryview(frame(record))
    while data:
        data = data[os.write(descriptor, data) :]
