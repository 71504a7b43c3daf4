"""The demo's processes: start them, follow their event streams, stop them, leave nothing behind.

Every child leads a process group of its own, so stopping one takes its network daemon and scoring worker with
it; children are told to end with SIGTERM, and killed when they do not within `STOP_S`. Not for what the nodes
do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from node.events import Event, decode_event
from protocol.errors import SwarmError
from swarm_cli.demo.plan import DemoRole, PlannedNode

__all__ = ["DemoError", "EventTail", "check_alive", "running", "stop"]

STOP_S = 8.0


class DemoError(SwarmError):
    """A process of the demo failed; the message quotes its last words."""


class EventTail:
    """Reads the new events of a growing `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Events completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [decode_event(line) for line in whole.splitlines()]


@contextlib.contextmanager
def running(nodes: Sequence[PlannedNode]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process per node; on leaving, stop them all."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.extend(_start(node) for node in nodes)
        yield children
    finally:
        stop(children)


def _start(node: PlannedNode) -> subprocess.Popen[bytes]:
    config = str(node.home.root / "node.json")
    module = ["swarm_cli", "run", "--config", config]
    if node.role is DemoRole.LIAR:
        module = ["swarm_cli.demo.liar_node", config]
    log = (node.home.root / "output.log").open("wb")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )


def check_alive(nodes: Sequence[PlannedNode], children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise DemoError when a process has ended by itself with an error."""
    for node, child in zip(nodes, children, strict=True):
        if child.poll() not in (None, 0):
            lines = (node.home.root / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
            raise DemoError(
                f"{node.config.name} ended with code {child.returncode}: {' | '.join(lines[-4:])}"
            )


def stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes and all they started."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, deadline_s - time.monotonic()))
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
