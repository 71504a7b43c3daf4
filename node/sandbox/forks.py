"""Runs jobs of the worker in forked children, a few at a time, and says how each of them ended.

A child gets a pipe to write to, limits, and nothing else; the worker reads the pipe up to a cap, waits with a
deadline, and judges the child by its exit status and its memory, never by what the child says about itself.
Ends the worker when the node goes away. Knows nothing about environments or scores.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from node.sandbox import linux
from node.sandbox.isolation import limit_fork
from node.sandbox.records import ForkResult, ForkStatus, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["EXIT_FORBIDDEN", "ForkRunner", "Job"]

EXIT_FORBIDDEN = 97
_EXIT_RAISED = 98
_READ_BYTES = 65536
_DETAIL_BYTES = 64
_HIGHEST_DESCRIPTOR = 256  # the worker itself opens fewer than forty
_NOT_PLAIN = re.compile(rb"[^A-Za-z0-9_. ]")


@dataclass(frozen=True)
class Job:
    """Work on completions `first` to `first + count`; `run` gets the pipe and returns the payload."""

    first: int
    count: int
    run: Callable[[int], bytes]


@dataclass
class _Child:
    job: Job
    pid: int
    process: int  # pidfd
    pipe: int  # -1 once the child has closed its end
    deadline_s: float
    data: bytearray = field(default_factory=bytearray)
    verdict: ForkStatus | None = None  # set when we ended it ourselves
    ended: bool = False


class ForkRunner:
    """Forks for each job. `requests` is the pipe from the node: when it hangs up, the worker ends.

    `base_bytes` and `resident_bytes` are what the worker itself takes, so that limits count only the growth.
    """

    def __init__(self, requests: int, limits: SandboxLimits, base_bytes: int, resident_bytes: int) -> None:
        self.filter: bytes | None = None  # the system call program, once it is known to work
        self._requests = requests
        self._limits = limits
        self._base_bytes = base_bytes
        self._resident_bytes = resident_bytes

    def run(self, jobs: Sequence[Job]) -> tuple[ForkResult, ...]:
        """Results in order of `first`. The first failure ends the others: a group with a hole is useless."""
        waiting = deque(jobs)
        end_s = time.monotonic() + self._limits.request_s
        children: list[_Child] = []
        results: list[ForkResult] = []
        while children or waiting:
            while waiting and len(children) < self._limits.parallel_forks:
                children.append(self._launch(waiting.popleft(), end_s))
            self._wait(children)
            for child in [child for child in children if child.ended]:
                children.remove(child)
                results.append(self._finish(child))
                if results[-1].status is not ForkStatus.DONE:
                    waiting.clear()
            if not waiting and any(result.status is not ForkStatus.DONE for result in results):
                for child in children:
                    self._kill(child, ForkStatus.CRASHED)
                    self._finish(child)
                children.clear()
        return tuple(sorted(results, key=lambda result: result.first))

    def _launch(self, job: Job, end_s: float) -> _Child:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(job, theirs)
        os.close(theirs)
        deadline_s = min(end_s, time.monotonic() + self._limits.wall_s)
        return _Child(job, pid, os.pidfd_open(pid), ours, deadline_s)

    def _be_child(self, job: Job, pipe: int) -> NoReturn:
        write, leave = os.write, os._exit  # before the answer can replace them
        try:
            linux.set_parent_death_signal(signal.SIGKILL)
            os.closerange(3, pipe)
            os.closerange(pipe + 1, _HIGHEST_DESCRIPTOR)
            limit_fork(self._limits, self._base_bytes, self.filter)
            payload = memoryview(job.run(pipe))
            while payload:
                payload = payload[write(pipe, payload) :]
        except BaseException as error:  # the fork must not return into the worker's loop, whatever happens
            write(pipe, type(error).__name__.encode()[:_DETAIL_BYTES])
            leave(_EXIT_RAISED)
        finally:
            leave(0)

    def _wait(self, children: Sequence[_Child]) -> None:
        """Until something happened to one of `children`; marks those that ended."""
        poll = select.poll()
        poll.register(self._requests, 0)  # hang-up only
        watched = {child.process if child.pipe < 0 else child.pipe: child for child in children}
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        wait_s = max(0.0, min(child.deadline_s for child in children) - time.monotonic())
        for descriptor, event in poll.poll(wait_s * 1000.0 + 1.0):
            if descriptor == self._requests:
                if event & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    self._leave(children)
            elif watched[descriptor].pipe < 0:
                watched[descriptor].ended = True
            else:
                self._read(watched[descriptor])
        for child in children:
            if not child.ended and time.monotonic() >= child.deadline_s:
                self._kill(child, ForkStatus.TIMEOUT)

    def _read(self, child: _Child) -> None:
        block = os.read(child.pipe, _READ_BYTES)
        child.data += block
        if not block:
            os.close(child.pipe)
            child.pipe = -1
        elif len(child.data) > self._limits.reply_bytes:
            child.data.clear()
            self._kill(child, ForkStatus.MALFORMED)

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
