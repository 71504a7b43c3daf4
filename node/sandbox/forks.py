"""Runs jobs of the worker in forked children, a few at a time, and says how each of them ended.

A child gets a pipe to write to, limits, and nothing else; the worker reads the pipe up to a cap, waits with a
deadline, and judges the child by its exit status and its memory, never by what the child says about itself.
A job has two parts: what the environment does alone, and what it does with an answer. The first byte on the
pipe parts them: whatever happens before it is the environment's fault, whatever happens later the answer's.
Ends the worker when the node goes away. Knows nothing about environments or scores.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import select
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from node.sandbox import linux
from node.sandbox.isolation import limit_fork
from node.sandbox.records import ForkResult, ForkStatus, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["EXIT_FORBIDDEN", "Batch", "ForkRunner", "Job"]

EXIT_FORBIDDEN = 97
_EXIT_RAISED = 98
_BROKEN = 255
"""First byte of a child whose preparation raised; else the seconds of CPU that it took, up to 254."""
_READ_BYTES = 65536
_DETAIL_BYTES = 64
_HIGHEST_DESCRIPTOR = 256  # the worker itself opens fewer than forty
_NOT_PLAIN = re.compile(rb"[^A-Za-z0-9_. ]")


@dataclass(frozen=True)
class Job:
    """Work on items `first` to `first + count`. `prepare` is the environment's own part; `run` gets what it
    made, and the pipe, and returns the payload. A failure ends the other jobs of `group`."""

    first: int
    count: int
    run: Callable[[Any, int], bytes]
    reply_bytes: int
    prepare: Callable[[], Any] = lambda: None
    group: int = 0


@dataclass
class _Child:
    job: Job
    pid: int
    process: int  # pidfd
    pipe: int  # -1 once the child has closed its end
    deadline_s: float
    end_s: float
    """Of the whole request."""
    data: bytearray = field(default_factory=bytearray)
    begun: bool = False
    """Its first byte has come."""
    prepared: bool = False
    """The environment's own part went well."""
    verdict: ForkStatus | None = None  # set when we ended it ourselves
    ended: bool = False


class Batch:
    """The jobs of one request, under way."""

    def __init__(self, jobs: Sequence[Job], end_s: float, niceness: int) -> None:
        self.end_s = end_s
        self.niceness = niceness
        self.waiting = deque(jobs)
        self.children: list[_Child] = []
        self.results: list[ForkResult] = []

    @property
    def done(self) -> bool:
        """Whether no job is left."""
        return not self.waiting and not self.children

    def outcome(self) -> tuple[ForkResult, ...]:
        """Results in order of `first`."""
        return tuple(sorted(self.results, key=lambda result: result.first))


class ForkRunner:
    """Forks for each job. `requests` are the pipes from the node: when one hangs up, the worker ends.

    `base_bytes` and `resident_bytes` are what the worker itself takes, so that limits count only the growth.
    """

    def __init__(
        self, requests: Sequence[int], limits: SandboxLimits, base_bytes: int, resident_bytes: int
    ) -> None:
        self.filter: bytes | None = None  # the system call program, once it is known to work
        self._requests = requests
        self._limits = limits
        self._base_bytes = base_bytes
        self._resident_bytes = resident_bytes
        self._batches: list[Batch] = []

    def run(self, job: Job, within_s: float) -> ForkResult:
        """The result of one job, done alone."""
        batch = self.begin([job], within_s)
        while not batch.done:
            self.wait(listening=())
        return batch.results[0]

    def begin(self, jobs: Sequence[Job], within_s: float, niceness: int = 0) -> Batch:
        """Have these done within so many seconds, beside what is under way; `wait` until they are."""
        batch = Batch(jobs, time.monotonic() + within_s, niceness)
        self._batches.append(batch)
        self._refill(batch)
        return batch

    def wait(self, listening: Collection[int]) -> list[int]:
        """Until a job has ended, or one of the pipes `listening` has a request; returns those pipes."""
        heard = self._poll(listening)
        now_s = time.monotonic()
        for batch in self._batches:
            for child in batch.children:
                if not child.ended and now_s >= child.deadline_s:
                    self._kill(child, ForkStatus.TIMEOUT)
            self._collect(batch)
            self._refill(batch)
        self._batches = [batch for batch in self._batches if not batch.done]
        return heard

    def _refill(self, batch: Batch) -> None:
        while batch.waiting and len(batch.children) < self._limits.parallel_forks:
            batch.children.append(self._launch(batch.waiting.popleft(), batch))

    def _collect(self, batch: Batch) -> None:
        """Results of children that have ended. A failure ends the jobs of its group: a group with a hole is
        useless."""
        while ended := next((child for child in batch.children if child.ended), None):
            batch.children.remove(ended)
            result = self._finish(ended)
            batch.results.append(result)
            if result.status is ForkStatus.DONE:
                continue
            group = ended.job.group
            batch.waiting = deque(job for job in batch.waiting if job.group != group)
            for other in [other for other in batch.children if other.job.group == group]:
                batch.children.remove(other)
                self._kill(other, ForkStatus.CRASHED)
                self._finish(other)

    def _launch(self, job: Job, batch: Batch) -> _Child:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(job, theirs, batch.niceness)
        os.close(theirs)
        deadline_s = min(batch.end_s, time.monotonic() + self._limits.derive_wall_s)
        return _Child(job, pid, os.pidfd_open(pid), ours, deadline_s, batch.end_s)

    def _be_child(self, job: Job, pipe: int, niceness: int) -> NoReturn:
        write, leave = os.write, os._exit  # before the answer can replace them
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            os.nice(niceness)
            os.closerange(3, pipe)
            os.closerange(pipe + 1, _HIGHEST_DESCRIPTOR)
            limit_fork(self._limits, self._base_bytes, self.filter)
            try:
                prepared = job.prepare()
            except BaseException as error:
                write(pipe, bytes([_BROKEN]) + type(error).__name__.encode()[:_DETAIL_BYTES])
                leave(_EXIT_RAISED)
            write(pipe, bytes([min(_BROKEN - 1, math.ceil(time.process_time()))]))
            payload = memoryview(job.run(prepared, pipe))
            while payload:
                payload = payload[write(pipe, payload) :]
        except BaseException as error:  # the fork must not return into the worker's loop, whatever happens
            write(pipe, type(error).__name__.encode()[:_DETAIL_BYTES])
            leave(_EXIT_RAISED)
        finally:
            leave(0)

    def _poll(self, listening: Collection[int]) -> list[int]:
        """Pipes with a request; marks children that ended."""
        poll = select.poll()
        for pipe in self._requests:
            poll.register(pipe, select.POLLIN if pipe in listening else 0)  # hang-up always
        children = [child for batch in self._batches for child in batch.children]
        watched = {child.process if child.pipe < 0 else child.pipe: child for child in children}
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        wait_ms = None
        if children:
            first_s = min(child.deadline_s for child in children)
            wait_ms = max(0.0, first_s - time.monotonic()) * 1000.0 + 1.0
        heard = []
        for descriptor, event in poll.poll(wait_ms):
            if descriptor in self._requests:
                if event & select.POLLIN:
                    heard.append(descriptor)
                elif event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    self._leave(children)
            elif watched[descriptor].pipe < 0:
                watched[descriptor].ended = True
            else:
                self._read(watched[descriptor])
        return heard

    def _read(self, child: _Child) -> None:
        block = os.read(child.pipe, _READ_BYTES)
        if not block:
            os.close(child.pipe)
            child.pipe = -1
            return
        if not child.begun:
            child.begun = True
            if block[0] != _BROKEN:
                self._begin_answer(child, block[0])
            block = block[1:]
        child.data += block
        if len(child.data) > child.job.reply_bytes:
            child.data.clear()
            self._kill(child, ForkStatus.MALFORMED)

    def _begin_answer(self, child: _Child, used_s: int) -> None:
        """The environment's own part is done: from now on the limits of an answer hold."""
        child.prepared = True
        child.deadline_s = min(child.end_s, time.monotonic() + self._limits.wall_s)
        limit_s = used_s + self._limits.cpu_s
        with contextlib.suppress(OSError, ValueError):  # it has ended, or has less already
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit_s, limit_s + 1))

    @staticmethod
    def _kill(child: _Child, verdict: ForkStatus) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.verdict = verdict
        child.ended = True

    def _leave(self, children: Sequence[_Child]) -> NoReturn:
        """The node is gone. As process 1 of its namespace the worker takes all others with it."""
        for child in children:
            self._kill(child, ForkStatus.CRASHED)
        os._exit(0)

    def _finish(self, child: _Child) -> ForkResult:
        _, status, usage = os.wait4(child.pid, 0)
        os.close(child.process)
        if child.pipe >= 0:
            os.close(child.pipe)
        grown_bytes = usage.ru_maxrss * 1024 - self._resident_bytes
        verdict, detail = child.verdict, ""
        if verdict is None:
            verdict, detail = _judge(status, bytes(child.data))
        if verdict in (ForkStatus.DONE, ForkStatus.CRASHED) and grown_bytes > self._limits.memory_bytes:
            verdict, detail = ForkStatus.MEMORY, f"{grown_bytes >> 20} MiB"
        if not child.prepared:
            verdict, detail = ForkStatus.BROKEN, detail or f"{verdict}"
        payload = bytes(child.data) if verdict is ForkStatus.DONE else b""
        return ForkResult(child.job.first, child.job.count, verdict, detail, payload)


def _judge(status: int, data: bytes) -> tuple[ForkStatus, str]:
    said = _NOT_PLAIN.sub(b"?", data[:_DETAIL_BYTES]).decode()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return ForkStatus.TIMEOUT, "CPU time"
        if number == signal.SIGSYS:
            return ForkStatus.FORBIDDEN, "system call or oversized allocation"
        return ForkStatus.CRASHED, f"signal {number}"
    code = os.WEXITSTATUS(status)
    if code == 0:
        return ForkStatus.DONE, ""
    known = {EXIT_FORBIDDEN: ForkStatus.FORBIDDEN, _EXIT_RAISED: ForkStatus.CRASHED}
    return (known[code], said) if code in known else (ForkStatus.CRASHED, f"exit status {code}")
