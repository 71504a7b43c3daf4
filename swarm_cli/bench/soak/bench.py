"""Six real nodes for half an hour, and everything that happens in a month: kills, a full disk, a wrong clock.

    plan of a demo --> processes, 256 descriptors each --> faults by a timetable --> events --> record

Half of the nodes are killed by turns and started again; the others live as long as the soak, and their
descriptors, tasks and memory, and those of their network daemons, must not grow. One of these has its disk
filled once (a small tmpfs, where this may be mounted), one its clock set an hour ahead for twelve seconds.
Slopes leave out the first third, in which caches fill. Not for speed or learning.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarm_cli.bench.measure import Say, envelope
from swarm_cli.bench.soak.record import NodeRecord, Slope, slope
from swarm_cli.demo.plan import DemoOptions, PlannedNode, make_plan
from swarm_cli.demo.processes import DemoError, EventTail, last_words, start_node, stop

__all__ = ["bench_soak"]

TRAINERS, FOLLOWERS = 4, 2
KILL_EVERY_S = 20.0
START_S = 300.0
"""For all nodes to load torch on a busy machine."""
WRONG_CLOCK_S = 12.0
FULL_DISK_S = 15.0
DISK_BYTES = 96 * 2**20
POLL_S = 0.5
SAY_S = 30.0
SETTINGS = {
    "evaluate.prompts_per_task": 1,
    "evaluate.every": 1_000_000,
    "train.local_groups": 1,
    "train.external_groups": 1,
    "train.external_wait_s": 1.0,
}
"""Steps as quick as they get: this is about versions."""
ENDLESS = 10**9
GROWTH = {"fd_slope": 0.5, "task_slope": 0.5}
MEMORY_GROWTH = {"rss_slope_mb_min": 1.0, "p2pd_slope_mb_min": 1.0}
"""A minute, at the lower end of the interval; memory counts from WARM_S on, when what is cached is there."""
WARM_S = 600.0
LOST_STEPS = 1
LOST_TRUST = 0.05


@dataclass(slots=True)
class _Member:
    node: PlannedNode
    child: subprocess.Popen[bytes]
    tail: EventTail
    record: NodeRecord = field(default_factory=NodeRecord)

    @property
    def name(self) -> str:
        return self.node.config.name


def bench_soak(seconds: float, say: Say) -> dict[str, Any]:
    """Run it for so long, and report. Raises DemoError when a node ends by itself."""
    with tempfile.TemporaryDirectory(prefix="swarm-soak-") as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        small_disk = stack.enter_context(_small_disk(root / "wren"))
        options = DemoOptions(nodes=TRAINERS, followers=FOLLOWERS, steps=ENDLESS)
        plan = make_plan(options, root, SETTINGS)
        soak = _Soak(plan.nodes, seconds, small_disk, say)
        stack.callback(soak.stop)
        soak.run()
        return envelope("soak", soak.report())


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """`folder` on a disk of its own that is soon full; False where this machine does not let us mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


class _Soak:
    def __init__(self, nodes: Sequence[PlannedNode], seconds: float, small_disk: bool, say: Say) -> None:
        self._seconds = seconds
        self._small_disk = small_disk
        self._say = say
        self._kills = 0
        self._members: list[_Member] = []
        for node in nodes:
            metrics = node.home.run(node.config.run).metrics
            self._members.append(_Member(node, _start(node), EventTail(metrics)))
        self._mortal = self._members[1::2]
        self._steady = self._members[0::2]

    def stop(self) -> None:
        """End all processes."""
        stop([each.child for each in self._members])

    def run(self) -> None:
        """Wait for the first steps, then let the timetable happen."""
        self._say(f"starting {len(self._members)} nodes with {len(self._mortal)} to be killed by turns")
        self._until(START_S, lambda: all(each.record.versions or _follows(each) for each in self._members))
        began_s = time.monotonic()
        timetable = self._timetable()
        said_s = began_s
        while (elapsed_s := time.monotonic() - began_s) < self._seconds:
            while timetable and timetable[0][0] <= elapsed_s:
                timetable.pop(0)[1]()
            self._poll()
            if time.monotonic() - said_s > SAY_S:
                said_s = time.monotonic()
                self._say(f"{elapsed_s:.0f} s: {self._versions()} versions, {self._kills} kills")
            time.sleep(POLL_S)

    def report(self) -> dict[str, Any]:
        """The figures, by name."""
        records = [each.record for each in self._members]
        steady = [each.record for each in self._steady]
        slopes = {
            "fd_slope": [_slope([(s, float(h.descriptors)) for s, h in each.health]) for each in steady],
            "task_slope": [_slope([(s, float(h.tasks)) for s, h in each.health]) for each in steady],
            "rss_slope_mb_min": [_slope([(s, h.rss_bytes / 1e6) for s, h in each.health]) for each in steady],
            "p2pd_slope_mb_min": [_slope([(s, b / 1e6) for s, b in each.daemon_bytes]) for each in steady],
        }
        worst = {name: max(found, key=lambda each: each.per_minute) for name, found in slopes.items()}
        recovered: dict[str, float] = {}
        for record in records:
            for name, took_s in record.recovered_s.items():
                recovered[name] = max(took_s, recovered.get(name, 0.0))
        growth = GROWTH | (MEMORY_GROWTH if self._seconds >= WARM_S else {})
        figures: dict[str, Any] = {
            "nodes": len(self._members),
            "seconds": self._seconds,
            "versions": self._versions(),
            "kills": self._kills,
            "lost_steps_max": max(each.lost_steps for each in records),
            "trained_twice": sum(each.twice for each in records),
            "trust_lost_max": max(each.trust_lost for each in records),
            **{name: each.per_minute for name, each in worst.items()},
            "noise": {name: each.noise for name, each in worst.items()},
            "descriptors_max": max(health.descriptors for each in steady for _, health in each.health),
            "stalls_unexplained": sum(len(each.stalls) for each in records),
            "stalls": {each.name: each.record.stalls for each in self._members if each.record.stalls},
            "recovered_s": recovered,
            "full_disk": self._small_disk,
        }
        faults = {"clock", "kill", *(["disk"] if self._small_disk else [])}
        passed = (
            figures["lost_steps_max"] <= LOST_STEPS
            and not figures["trained_twice"]
            and figures["trust_lost_max"] <= LOST_TRUST
            and not figures["stalls_unexplained"]
            and recovered.keys() == faults
            and all(worst[name].per_minute - worst[name].noise <= most for name, most in growth.items())
        )
        return figures | {"passed": passed}

    # --- faults -------------------------------------------------------------------------------------------

    def _timetable(self) -> list[tuple[float, Callable[[], None]]]:
        """What happens when, in seconds, in order."""
        seconds, rng = self._seconds, random.Random(1)
        acts: list[tuple[float, Callable[[], None]]] = []
        for number in range(1, int(seconds / KILL_EVERY_S)):
            victim = self._mortal[number % len(self._mortal)]
            acts.append((number * KILL_EVERY_S + rng.uniform(0, 3), _bound(self._kill, victim)))
        wrong, full = self._steady[1], self._steady[0]
        acts.append((0.25 * seconds, _bound(self._set_clock, wrong)))
        acts.append((0.25 * seconds + WRONG_CLOCK_S, _bound(self._mend_clock, wrong)))
        if self._small_disk:
            acts.append((0.5 * seconds, _bound(self._fill, full)))
            acts.append((0.5 * seconds + FULL_DISK_S, _bound(self._empty, full)))
        return sorted(acts, key=lambda act: act[0])

    def _kill(self, member: _Member) -> None:
        """kill -9, and a new start in the same home."""
        os.killpg(member.child.pid, signal.SIGKILL)
        member.child.wait()
        self._poll()
        member.record.killed(time.monotonic())
        member.child = _start(member.node)
        self._kills += 1

    def _set_clock(self, member: _Member) -> None:
        self._say(f"the clock of {member.name} is an hour ahead")
        member.record.fault("clock", time.monotonic())
        member.child.send_signal(signal.SIGUSR1)

    def _mend_clock(self, member: _Member) -> None:
        member.child.send_signal(signal.SIGUSR2)
        self._poll()
        member.record.mended("clock", time.monotonic())

    def _fill(self, member: _Member) -> None:
        self._say(f"the disk of {member.name} is full")
        member.record.fault("disk", time.monotonic())
        with (member.node.home.root / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def _empty(self, member: _Member) -> None:
        (member.node.home.root / "filler").unlink()
        self._poll()
        member.record.mended("disk", time.monotonic())

    # --- reading ------------------------------------------------------------------------------------------

    def _until(self, timeout_s: float, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline_s:
                raise DemoError(f"not all nodes have begun within {timeout_s:.0f} s")
            self._poll()
            time.sleep(POLL_S)

    def _poll(self) -> None:
        now_s = time.monotonic()
        for member in self._members:
            for event in member.tail.read():
                member.record.take(event, now_s)
            if member.child.poll() is not None and member.child.returncode != -signal.SIGKILL:
                code = member.child.returncode
                raise DemoError(
                    f"{member.name} ended with {code}; its last words: {last_words(member.node)!r}"
                )
        for member in self._steady:
            if (used := _daemon_bytes(member.child.pid)) is not None:
                member.record.daemon_bytes.append((now_s, used))

    def _versions(self) -> int:
        return sum(each.record.versions for each in self._members)


def _start(node: PlannedNode) -> subprocess.Popen[bytes]:
    return start_node(node, ("swarm_cli.bench.soak.member", str(node.home.root / "node.json")))


def _bound(act: Callable[[_Member], None], member: _Member) -> Callable[[], None]:
    return lambda: act(member)


def _follows(member: _Member) -> bool:
    return member.node.config.role == "follower" and bool(member.record.health)


def _slope(readings: Sequence[tuple[float, float]]) -> Slope:
    return slope(readings[len(readings) // 3 :])


def _daemon_bytes(process_id: int) -> float | None:
    """Resident memory of the network daemon that this process has started; None while there is none."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process_id).children():
            if child.name().startswith("p2pd"):
                return float(child.memory_info().rss)
    return None
