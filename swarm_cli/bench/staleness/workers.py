"""Runs side by side: one process for each core, one thread in each, what is finished is kept at once.

For: `Crew.finish`, which does only what a ledger lacks. A run that fails is told and left out, the rest goes
on; a second start tries it again. Processes are forked from one that has imported what they need and done
nothing yet, since torch holds threads once it has computed; they end with this one, however it ends, because
their pipe does. What goes through it is JSON. A crew of none works in this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import msgspec

from protocol.errors import OurFault, SwarmError
from swarm_cli.bench.measure import Say
from swarm_cli.bench.staleness.ledger import Job, Ledger

__all__ = ["Crew", "Finished"]

Settings = TypeVar("Settings", bound=msgspec.Struct)
Result = TypeVar("Result", bound=msgspec.Struct)
Jobs = Mapping[str, Job[Any, Any]]

_PRELOADED = [
    "swarm_cli.bench.staleness.lagged",
    "swarm_cli.bench.staleness.swarm",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "reasoning_gym",
]
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SAY_EVERY_S = 20.0


_Order = tuple[str, msgspec.Raw]
"""crew -> process: name of the job, settings."""
_Outcome = tuple[msgspec.Raw, str | None]
"""process -> crew: result, or why there is none."""


@dataclass
class Finished:
    """What a crew did."""

    made: int = 0
    reused: int = 0
    failures: list[str] = field(default_factory=list)


class Crew:
    """The processes. To be used in a `with` block."""

    def __init__(self, size: int, jobs: Sequence[Job[Any, Any]], say: Say) -> None:
        self._size = size
        self._jobs = {job.name: job for job in jobs}
        self._say = say
        self._hands: list[tuple[BaseProcess, Connection]] = []
        self.finished = Finished()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._hands:
            process.terminate()
            process.join()
            process.close()
            pipe.close()
        self._hands.clear()

    def finish(
        self,
        title: str,
        job: Job[Settings, Result],
        runs: Sequence[Settings],
        ledger: Ledger[Settings, Result],
    ) -> None:
        """Make the runs that the ledger lacks. Raises OurFault when a process dies."""
        wanted = list(dict.fromkeys(runs))
        missing = [settings for settings in wanted if ledger.get(settings) is None]
        self.finished.reused += len(wanted) - len(missing)
        if not missing:
            return
        self._say(f"{title}: {len(missing)} runs to do of {len(wanted)}")
        began_s = said_s = time.monotonic()
        for done, (settings, (result, failure)) in enumerate(self._outcomes(job, missing), start=1):
            if failure is None:
                ledger.add(settings, msgspec.json.decode(result, type=job.result))
                self.finished.made += 1
            else:
                self.finished.failures.append(f"{_named(settings)}: {failure}")
                self._say(self.finished.failures[-1])
            now_s = time.monotonic()
            if now_s - said_s >= _SAY_EVERY_S or done == len(missing):
                said_s = now_s
                left_s = (now_s - began_s) / done * (len(missing) - done)
                self._say(f"{title}: {done} of {len(missing)}, about {left_s / 60:.0f} minutes left")

    def _outcomes(
        self, job: Job[Settings, Any], runs: Sequence[Settings]
    ) -> Iterator[tuple[Settings, _Outcome]]:
        """As they come. The order of starts is that of `runs`."""
        waiting = [
            (settings, (job.name, msgspec.Raw(msgspec.json.encode(settings)))) for settings in reversed(runs)
        ]
        while waiting and not self._size:
            settings, order = waiting.pop()
            yield settings, _obey(order, self._jobs)
        busy: dict[Connection, Settings] = {}
        free = [pipe for _, pipe in self._open()]
        while waiting or busy:
            while free and waiting:
                pipe, (settings, order) = free.pop(), waiting.pop()
                busy[pipe] = settings
                with _alive(settings):
                    pipe.send_bytes(msgspec.json.encode(order))
            ready = set(wait(list(busy)))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                settings = busy.pop(pipe)
                with _alive(settings):
                    outcome: _Outcome = msgspec.json.decode(pipe.recv_bytes(), type=_Outcome)
                free.append(pipe)
                yield settings, outcome

    def _open(self) -> list[tuple[BaseProcess, Connection]]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        with _single_threaded():
            while len(self._hands) < self._size:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self._jobs), daemon=True)
                process.start()
                theirs.close()
                self._hands.append((process, ours))
        return self._hands


@contextlib.contextmanager
def _alive(settings: msgspec.Struct) -> Iterator[None]:
    """For words with a process that is to make this run. Raises OurFault."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise OurFault(f"a process of the lab died in {_named(settings)}") from error


def _work(pipe: Connection, jobs: Jobs) -> None:
    """What a process does: one run after the other, until nobody asks."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the crew's own process ends this one
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = msgspec.json.decode(pipe.recv_bytes(), type=_Order)
            pipe.send_bytes(msgspec.json.encode(_obey(order, jobs)))


def _obey(order: _Order, jobs: Jobs) -> _Outcome:
    name, settings = order
    job = jobs[name]
    try:
        result = job.run(msgspec.json.decode(settings, type=job.settings))
    except SwarmError as error:
        return msgspec.Raw(b"null"), str(error)
    return msgspec.Raw(msgspec.json.encode(result)), None


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Processes started meanwhile have one thread each."""
    before = {name: os.environ[name] for name in _THREADS if name in os.environ}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name in _THREADS:
            del os.environ[name]
        os.environ.update(before)


def _named(settings: msgspec.Struct) -> str:
    return msgspec.json.encode(settings).decode()
