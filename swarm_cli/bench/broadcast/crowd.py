"""The nodes' processes from the bench's side: start them, tell them what to do, watch their links, end them.

Peers are forked from one server that has imported what is heavy (torch, by way of hivemind: 2 s and 290 MB),
so that seventeen of them start in a second. Every wait has a deadline. A peer that fails fails the run, but
for those that were killed on purpose.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import DeadlineError, OurFault
from swarm_cli.bench.broadcast import peer
from swarm_cli.bench.broadcast.member import Place
from swarm_cli.bench.broadcast.networks import Network, sent_bytes

__all__ = ["Cpu", "Crowd", "Trace", "gathered"]

_HEAVY = [
    "node.transport.hivemind",
    "node.weights.exchange.exchange",
    "swarm_cli.app",
    "swarm_cli.bench.broadcast.swarm",
]
_OPEN_S = 90.0
_REPORT_S = 20.0
_END_S = 10.0
_KILLED_S = 2.0
_SAMPLE_S = 0.5


@dataclass(frozen=True)
class Sample:
    """Links and processor at one moment of a run."""

    at_s: float
    """Since the start."""
    sent: dict[int, int]
    """Bytes over the link so far, by node; those that are alive."""
    idle_s: float
    busy_s: float
    """Of all cores since the machine started."""


@dataclass(frozen=True)
class Cpu:
    """Processor seconds of one node: of its own process, and of its network daemon."""

    node_s: float
    daemon_s: float


@dataclass
class Trace:
    """What was seen while a blob travelled."""

    started_s: float
    samples: list[Sample] = field(default_factory=list)
    cpu: dict[int, Cpu] = field(default_factory=dict)
    """By node; those that are alive at the end."""

    @property
    def idle(self) -> float:
        """Share of the processor's time in which it had nothing to do."""
        first, last = self.samples[0], self.samples[-1]
        idle_s, busy_s = last.idle_s - first.idle_s, last.busy_s - first.busy_s
        return idle_s / max(idle_s + busy_s, 1e-9)

    def up_bytes(self, number: int) -> int | None:
        """What a node sent during the run; None without a link of its own."""
        first, last = (each.sent.get(number) for each in (self.samples[0], self.samples[-1]))
        return None if first is None or last is None else last - first

    def take(self, processes: dict[int, int]) -> None:
        """One more sample, of these process ids by node."""
        now = psutil.cpu_times()
        idle_s = now.idle + getattr(now, "iowait", 0.0)
        self.samples.append(
            Sample(
                time.monotonic() - self.started_s,
                {number: seen for number, pid in processes.items() if (seen := sent_bytes(pid)) is not None},
                idle_s,
                sum(now) - idle_s - getattr(now, "guest", 0.0) - getattr(now, "guest_nice", 0.0),
            )
        )


class _Peer:
    """One process."""

    def __init__(self, process: BaseProcess, connection: Connection, number: int) -> None:
        self.process = process
        self.connection = connection
        self.number = number

    def tell(self, order: dict[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(order).encode())
        except OSError as error:
            raise OurFault(f"node {self.number} of the bench is gone: {error}") from None

    def answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise OurFault(f"the process of node {self.number} of the bench died") from None
        if "error" in answer:
            raise OurFault(f"node {self.number} of the bench failed: {answer['error']}")
        return answer

    def kill(self) -> None:
        """With its network daemon."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)


class Crowd:
    """Nodes that are connected to each other; number 0 is the source."""

    def __init__(self, peers: Sequence[_Peer]) -> None:
        self._peers = {each.number: each for each in peers}

    def kill(self, numbers: Collection[int]) -> None:
        """These nodes are gone without a word."""
        for number in numbers:
            self._peers.pop(number).kill()

    def ask(self, order: dict[str, Any], timeout_s: float) -> dict[int, dict[str, Any]]:
        """Tell all, and wait for all answers."""
        for each in self._peers.values():
            each.tell(order)
        return self._answers(order["do"], timeout_s)

    def broadcast(self, timeout_s: float, meanwhile: Callable[[Trace], None]) -> tuple[Trace, dict[int, Any]]:
        """Let the blob travel: what was seen, and each receiver's answer. `meanwhile` is called every half
        second and may kill."""
        before = _cpu(self._process_ids())
        trace = Trace(time.monotonic())
        trace.take(self._process_ids())
        trace.started_s = time.monotonic()
        for number in sorted(self._peers):
            self._peers[number].tell({"do": "start", "timeout_s": timeout_s})

        def tick() -> None:
            trace.take(self._process_ids())
            meanwhile(trace)

        answers = self._answers("start", timeout_s + _REPORT_S, tick)
        trace.take(self._process_ids())
        for number, cpu in _cpu(self._process_ids()).items():
            was = before[number]
            trace.cpu[number] = Cpu(cpu.node_s - was.node_s, cpu.daemon_s - was.daemon_s)
        del answers[0]
        return trace, answers

    def _process_ids(self) -> dict[int, int]:
        return {number: each.process.pid or 0 for number, each in self._peers.items()}

    def _answers(
        self, waiting_for: str, timeout_s: float, tick: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        ends_s, tick_s = time.monotonic() + timeout_s, time.monotonic() + _SAMPLE_S
        while open_ones := {
            each.connection: number for number, each in self._peers.items() if number not in answers
        }:
            now_s = time.monotonic()
            if now_s > ends_s:
                raise DeadlineError(f"{waiting_for} of {len(open_ones)} nodes of the bench", timeout_s)
            for connection in wait(list(open_ones), max(0.0, tick_s - now_s)):
                number = open_ones[connection]  # type: ignore[index]
                answers[number] = self._peers[number].answer()
            if time.monotonic() >= tick_s:
                tick_s += _SAMPLE_S
                tick()
        return {number: answer for number, answer in answers.items() if number in self._peers}


@contextlib.contextmanager
def gathered(method: str, network: Network, receivers: int, blob: Path, folder: Path) -> Iterator[Crowd]:
    """A source and so many receivers, each in its own process and connected to all others; gone after the
    block, with the files they made in `folder`. Raises OurFault."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    peers: list[_Peer] = []
    try:
        for number in range(receivers + 1):
            own = folder / f"node{number}"
            own.mkdir(parents=True)
            place = Place(number, network.sites[number], own, blob, network.cap_mbit)
            ours, theirs = context.Pipe()
            process = context.Process(target=peer.main, args=(theirs, method, place), daemon=True)
            process.start()
            theirs.close()
            peers.append(_Peer(process, ours, number))
        crowd = Crowd(peers)
        opened = crowd.ask({"do": "open"}, _OPEN_S)
        others = [opened[number] for number in range(receivers + 1)]
        crowd.ask({"do": "join", "others": others, "timeout_s": _OPEN_S}, _OPEN_S + _REPORT_S)
        yield crowd
    finally:
        _end(peers)
        shutil.rmtree(folder, ignore_errors=True)


def _end(peers: Sequence[_Peer]) -> None:
    """A peer ends when its pipe does; one that does not is killed."""
    try:
        for each in peers:
            each.connection.close()
        ends_s = time.monotonic() + _END_S
        for each in peers:
            each.process.join(max(0.0, ends_s - time.monotonic()))
    finally:
        for each in peers:
            each.kill()
            each.process.join(_KILLED_S)
            with contextlib.suppress(ValueError):  # it cannot be killed, and so cannot be forgotten
                each.process.close()


def _cpu(processes: dict[int, int]) -> dict[int, Cpu]:
    """What each node has used so far. `processes`: the id of each node's own process, which leads a group of
    all that it started."""
    numbers = {process_id: number for number, process_id in processes.items()}
    used_s = {number: [0.0, 0.0] for number in processes}
    for process in psutil.process_iter(["cpu_times"]):
        with contextlib.suppress(OSError):
            times, leader = process.info["cpu_times"], os.getpgid(process.pid)
            if times is not None and leader in numbers:
                used_s[numbers[leader]][process.pid != leader] += times.user + times.system
    return {number: Cpu(node_s, daemon_s) for number, (node_s, daemon_s) in used_s.items()}
