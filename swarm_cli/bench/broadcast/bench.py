"""The broadcast bench as a whole: what runs in which order, and the report.

For each number of receivers: ours, then naive unicast and libtorrent on the same links, each with fresh
nodes. `last_s`: from the start to the last receiver that has and has verified all. `bound_s`: size /
bandwidth, as every receiver must take each byte once. `source_copies`: what the source's link sent meanwhile,
in sizes of the blob, headers included; without namespaces, the chunks that it counted. `cpu_idle`: share of
the processor's time that was left; near 0 the processor was measured and not the network, and `cpu_s` tells
what nodes and daemons took. `cpu_ms_per_mb`: processor time for each MB that receivers passed on, of their
own processes (`node`) and their network daemons; null when nobody passed anything on. `uplinks`: share of the
receivers' upload capacity that was used. `churn`: a third of the receivers is lost after half of the bound,
once `killed`, as processes whose machines say so, and once `silent`, as whole machines; `last_s` is that of
the rest. `growth`: `last_s` at the most receivers over that at the fewest.

Files lie in memory where there is room: seventeen machines' disks would be one here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import ConfigError, OurFault
from swarm_cli.bench.broadcast.crowd import Cpu, Trace, gathered
from swarm_cli.bench.broadcast.networks import MAX_NODES, Network, open_network, set_link
from swarm_cli.bench.measure import Say, envelope
from swarm_cli.demo.processes import signals_interrupt

__all__ = ["FULL", "QUICK", "Size", "bench_broadcast", "cpu_ms_per_mb", "open_folder"]

_PREFIX = "swarm-broadcast-"
_MEMORY = Path("/dev/shm")  # noqa: S108
_SLOWEST = 6.0
"""Bounds that a broadcast may take before it counts as failed."""
_GRACE_S = 30.0
_SAY_EVERY_S = 15.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    size_bytes: int
    mbit: float
    """Of each node, up and down."""
    receivers: tuple[int, ...]
    churn_receivers: int
    baselines: bool = True

    @property
    def most(self) -> int:
        """Receivers of the largest run."""
        return max((*self.receivers, self.churn_receivers))


FULL = Size(size_bytes=32_000_000, mbit=20.0, receivers=(8, 16), churn_receivers=9)
"""About ten minutes, most of it for unicast."""
QUICK = Size(size_bytes=2_000_000, mbit=16.0, receivers=(2, 3), churn_receivers=3)
"""Shows that all of it runs; its numbers mean little."""


@dataclass(frozen=True)
class _Run:
    last_s: float
    trace: Trace
    sent_bytes: dict[int, int]
    """By each node that lived, counted by itself; 0 is the source."""


def bench_broadcast(size: Size, say: Say) -> dict[str, Any]:
    """The report. Raises ConfigError for what cannot be measured, OurFault when a node fails."""
    _check(size)
    with signals_interrupt(), open_folder(size) as folder, open_network(size.most + 1, size.mbit) as network:
        say(f"network: {network.kind}" + (f", {network.reason}" if network.reason else ""))
        bench = _Bench(size, network, folder, say)
        results: dict[str, Any] = {"mbit": size.mbit, "network": network.kind, "n": []}
        for count in size.receivers:
            results["n"].append(bench.compare(count))
        results["churn"] = {"killed": bench.churn(silent=False), "silent": None}
        if network.kind == "namespaces":
            results["churn"]["silent"] = bench.churn(silent=True)
        last_s = [each["last_s"] for each in sorted(results["n"], key=lambda each: each["n"])]
        results["growth"] = last_s[-1] / last_s[0] if len(last_s) > 1 else None
        results["reasons"] = bench.reasons
    return envelope("broadcast", results)


class _Bench:
    def __init__(self, size: Size, network: Network, folder: Path, say: Say) -> None:
        self.size = size
        self.network = network
        self.folder = folder
        self.say = say
        self.reasons = [f"no namespaces: {network.reason}"] if network.reason else []
        """Why something was not measured, or measures something else."""
        data = random.Random(0).randbytes(size.size_bytes)
        self.digest = hashlib.sha256(data).hexdigest()
        self.blob = folder / "source" / "blob"
        self.blob.parent.mkdir()
        self.blob.write_bytes(data)
        self.bound_s = size.size_bytes * 8 / (size.mbit * 1e6)

    def compare(self, count: int) -> dict[str, Any]:
        """Ours and the baselines with so many receivers."""
        run = self.run("exchange", count)
        result = {"n": count, **self._figures(run, count), "unicast_s": None, "libtorrent_s": None}
        for method in ("unicast", "libtorrent"):
            if not self._may_run(method):
                continue
            try:
                theirs = self.run(method, count)
            except OurFault as error:  # theirs, not what is measured here
                self.say(f"{method} failed: {error}")
                self.reasons.append(f"{method} with {count} receivers: {error}")
                continue
            result[f"{method}_s"] = theirs.last_s
            result[f"{method}_copies"] = self._copies(theirs)
        return result

    def churn(self, *, silent: bool) -> dict[str, Any]:
        """Ours, with a third of the receivers lost in the middle."""
        count = self.size.churn_receivers
        victims = random.Random(count).sample(range(1, count + 1), max(1, count // 3))
        run = self.run("exchange", count, victims, silent=silent)
        return {"n": count, "lost": len(victims), **self._figures(run, count)}

    def run(self, method: str, count: int, victims: Sequence[int] = (), *, silent: bool = False) -> _Run:
        """One broadcast."""
        how = "silent" if silent else "killed"
        name = f"{method}, {count} receivers" + (f", {len(victims)} {how}" if victims else "")
        self.say(f"{name}: connecting")
        slowest = (count if method == "unicast" else 1) * _SLOWEST
        said_s, alive = 0.0, True
        with gathered(method, self.network, count, self.blob, self.folder / "run") as crowd:

            def meanwhile(trace: Trace) -> None:
                nonlocal said_s, alive
                now_s = trace.samples[-1].at_s
                if victims and alive and now_s >= self.bound_s / 2:
                    alive = False
                    if silent:
                        for number in victims:
                            set_link(self.network.sites[number], up=False)
                    crowd.kill(victims)
                    self.say(f"{name}: since {now_s:.1f} s")
                if now_s - said_s >= _SAY_EVERY_S:
                    said_s = now_s
                    sent = trace.up_bytes(0)
                    copies = (
                        ""
                        if sent is None
                        else f", the source has sent {sent / self.size.size_bytes:.1f} copies"
                    )
                    self.say(f"{name}: {now_s:.0f} s{copies}")

            self.say(f"{name}: started; nobody can be faster than {self.bound_s:.1f} s")
            trace, answers = crowd.broadcast(slowest * self.bound_s + _GRACE_S, meanwhile)
            if victims and alive:
                self.reasons.append(f"{name}: all was over before anybody was lost")
            reports = crowd.ask({"do": "report"}, _GRACE_S)
            for number, answer in answers.items():
                if _digest(Path(answer["path"])) != self.digest:
                    raise OurFault(f"node {number} of the bench has other bytes than the source")
        if silent:
            for number in victims:
                set_link(self.network.sites[number], up=True)
        last_s = max(answer["at_s"] for answer in answers.values()) - trace.started_s
        self.say(
            f"{name}: {last_s:.2f} s, {last_s / self.bound_s:.2f} of the bound, cpu idle {trace.idle:.0%}"
        )
        return _Run(last_s, trace, {number: report["sent_bytes"] for number, report in reports.items()})

    def _figures(self, run: _Run, count: int) -> dict[str, Any]:
        return {
            "bytes": self.size.size_bytes,
            "last_s": run.last_s,
            "bound_s": self.bound_s,
            "ratio": run.last_s / self.bound_s,
            "source_copies": self._copies(run),
            "counted_copies": run.sent_bytes[0] / self.size.size_bytes,
            "uplinks": self._uplinks(run, count),
            "cpu_idle": run.trace.idle,
            "cpu_s": sum(cpu.node_s + cpu.daemon_s for cpu in run.trace.cpu.values()),
            "cpu_ms_per_mb": cpu_ms_per_mb(run.trace.cpu, run.sent_bytes),
        }

    def _copies(self, run: _Run) -> float:
        sent = run.trace.up_bytes(0)
        return (run.sent_bytes[0] if sent is None else sent) / self.size.size_bytes

    def _uplinks(self, run: _Run, count: int) -> float | None:
        sent = [run.trace.up_bytes(number) for number in range(1, count + 1)]
        known = [each for each in sent if each is not None]
        return sum(known) / len(known) * 8 / (self.size.mbit * 1e6 * run.last_s) if known else None

    def _may_run(self, method: str) -> bool:
        if not self.size.baselines:
            return False
        if method == "libtorrent" and importlib.util.find_spec("libtorrent") is None:
            reason = "libtorrent is not installed: install murmuration with the extra 'bench'"
            if reason not in self.reasons:
                self.reasons.append(reason)
            return False
        return True


def cpu_ms_per_mb(cpu: Mapping[int, Cpu], sent_bytes: Mapping[int, int]) -> dict[str, float] | None:
    """Processor milliseconds per MB (10^6 bytes) that receivers sent, by process; node 0, the source, is left
    out. None when they sent nothing."""
    receivers = [number for number in cpu if number]
    sent_mb = sum(sent_bytes[number] for number in receivers) / 1e6
    if not sent_mb:
        return None
    return {
        "node": 1e3 * sum(cpu[number].node_s for number in receivers) / sent_mb,
        "daemon": 1e3 * sum(cpu[number].daemon_s for number in receivers) / sent_mb,
    }


def _check(size: Size) -> None:
    """Raises ConfigError."""
    if not size.receivers or not 1 <= min(size.receivers) <= size.most < MAX_NODES:
        raise ConfigError(f"--receivers {size.receivers}; from 1 to {MAX_NODES - 1} can be measured")
    if size.mbit <= 0 or size.size_bytes <= 0:
        raise ConfigError(f"{size.size_bytes} bytes at {size.mbit:g} Mbit/s; both must be above 0")


@contextlib.contextmanager
def open_folder(size: Size) -> Iterator[Path]:
    """An empty folder for the block, in memory where there is room for everybody's copy. Those of killed
    runs are removed."""
    places = [_MEMORY, Path(tempfile.gettempdir())]
    for orphan in (each for place in places for each in place.glob(f"{_PREFIX}*")):
        owner = orphan.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(orphan, ignore_errors=True)
    needed = 2 * (size.most + 2) * size.size_bytes
    base = next((each for each in places if each.is_dir() and _free_bytes(each) > needed), places[-1])
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_bytes(folder: Path) -> int:
    free = shutil.disk_usage(folder).free
    # Files there take memory that the machine may not have.
    return min(free, psutil.virtual_memory().available // 2) if folder == _MEMORY else free


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
