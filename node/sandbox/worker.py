"""The environments' worker: locks itself in, imports the environments, and does each request in fresh forks.

Three processes: a supervisor, which only waits; a helper that entered the namespaces; and below it the worker
proper, process 1 of its own pid namespace, which nothing in there can kill, and which serves. Each dies with
the one above it, and the worker ends when a pipe of the node hangs up. All that an environment does after it
was opened, deriving questions and scoring, it does in a fork with limits, so it begins as it was opened,
whatever was asked before. A fork that an answer has spoilt is gone with its request. Answers of an
environment which evaluates them get one fork each, so none can touch its siblings.

Started by `channel.py` as `python -s -P -B -X utf8 -c ...` with the node's own absolute import paths, not
with `-I`: that would also ignore PYTHONHASHSEED=0, without which two nodes may give the same answer different
scores.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from node.environment.guard import guarded_score
from node.environment.installed import package_paths, registered
from node.environment.records import Completion, Environment
from node.environment.tasks import leave_random_states, open_environment
from node.sandbox import isolation, linux
from node.sandbox.detection import Detector
from node.sandbox.forks import ForkRunner, Job
from node.sandbox.records import Door, ForkStatus, Layer, Setup, Started
from node.sandbox.seccomp import seccomp_program
from node.sandbox.serve import Server, read_frame, send
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.metadata import EntryPoint

__all__ = ["main"]

_WARM_UP_ANSWERS = ("", "1 + 1", "x**2 + 1", "[[1, 0], [0, 1]]", "a b c")
_OPEN_FILES = 64
_TRIAL_S = 10.0


_Doors = dict[Door, tuple[int, int]]
"""Descriptors that requests come from and replies go to."""


def main(doors: dict[str, list[int]]) -> NoReturn:
    """Entry point of the process; `doors` names the pipes from and to the node."""
    served: _Doors = {Door(name): (requests, replies) for name, (requests, replies) in doors.items()}
    setup = msgspec.msgpack.decode(read_frame(served[Door.OWN][0]), type=Setup)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _supervise(setup, served)


def _supervise(setup: Setup, doors: _Doors) -> NoReturn:
    """Start the worker behind as many walls as this machine allows, then wait for its end. Nothing of an
    environment is imported before they stand."""
    try:
        packages = package_paths(name for name in setup.environments if name not in setup.blobs)
    except ConfigError as error:
        send(doors[Door.OWN][1], Started(error=str(error)))
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
                os.close(theirs)
                _close(doors)
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
            _Worker(setup, view, walls, missing).work(doors, meter, own)
        os.close(theirs)
        problem = os.read(ours, 1000)
        os.close(ours)
        if not problem:
            _close(doors)
            status = os.waitpid(pid, 0)[1]
            sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)  # libraries tidy up their temporary folders
        os.waitpid(pid, 0)
        missing.append(f"no namespaces: {problem.decode(errors='replace')}")
    os._exit(1)


def _open_environments(setup: Setup, own: Mapping[str, EntryPoint]) -> dict[str, Environment]:
    """Open each environment and score harmless answers, so that what is imported late is imported now."""
    environments: dict[str, Environment] = {}
    leave_random_states()
    for name, config in setup.environments.items():
        environment = open_environment(name, config, own, setup.blobs)
        try:
            prompt = environment.prompt(0, 0)
        except Exception as error:  # of a third party's code
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{name} has no question for a seed: {why}") from error
        for text in _WARM_UP_ANSWERS:
            guarded_score(environment, prompt, Completion(text=text, finished=True))
        environments[name] = environment
    return environments


def _close(doors: _Doors) -> None:
    for pair in doors.values():
        for descriptor in pair:
            os.close(descriptor)


class _Worker:
    """Opens the environments behind the walls, and serves the doors."""

    def __init__(self, setup: Setup, view: Sequence[str], walls: bool, missing: Sequence[str]) -> None:
        self._setup = setup
        self._view = view
        self._layers = [Layer.NAMESPACES] if walls else []
        self._missing = list(missing)

    def work(self, doors: _Doors, meter: isolation.MemoryMeter, own: Mapping[str, EntryPoint]) -> NoReturn:
        """Lock in, open the environments, report, then serve until the node closes a pipe."""
        replies = doors[Door.OWN][1]
        self._lock_in()
        self._limit_memory(meter)
        try:
            environments = _open_environments(self._setup, own)
        except Exception as error:  # whatever a third party's environment raises, the node wants a sentence
            said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            send(replies, Started(error=said[:2000]))
            os._exit(1)
        self._close_files()
        os.environ.clear()
        gc.collect()
        gc.freeze()  # forks then share these pages for as long as possible
        memory = meter.read()
        meter.close()
        runner = ForkRunner([requests for requests, _ in doors.values()], self._setup.limits, *memory)
        self._filter_calls(runner)
        started = Started(
            layers=tuple(self._layers),
            missing=tuple(self._missing),
            evaluating=tuple(name for name, each in environments.items() if each.evaluates_answers),
            unrepeatable=tuple(name for name, each in environments.items() if not each.reproducible),
        )
        send(replies, started)
        Server(self._setup, environments, runner, Detector(self._view)).serve(doors)

    def _limit_memory(self, meter: isolation.MemoryMeter) -> None:
        """What opening may take."""
        most = meter.read()[0] + self._setup.limits.open_bytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def _lock_in(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard == resource.RLIM_INFINITY or hard > _OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        self._missing += isolation.lock_down(self._view, own_root=Layer.NAMESPACES in self._layers)
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

    def _filter_calls(self, runner: ForkRunner) -> None:
        """The system calls of forks."""
        wanted = self._setup.layers
        if Layer.SECCOMP in wanted:
            runner.filter = seccomp_program(self._setup.limits.memory_bytes)
            trial = Job(0, 0, lambda _, __: b"", reply_bytes=1024)
            if runner.filter is None:
                self._missing.append(f"no system call filter: no table for machine {os.uname().machine!r}")
            elif (tried := runner.run(trial, _TRIAL_S)).status is not ForkStatus.DONE:
                self._missing.append(f"no system call filter: {tried.detail}")
                runner.filter = None
            else:
                self._layers.append(Layer.SECCOMP)
        self._layers += [Layer.LIMITS, *([Layer.DETECTION] if Layer.DETECTION in wanted else [])]
