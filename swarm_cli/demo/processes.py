"""The demo's processes: start them, follow their event streams, stop them, leave nothing behind.

Every child leads a process group of its own, so stopping one takes its network daemon and scoring worker with
it; children are told to end with SIGTERM, and killed when they do not within `STOP_S`. A child whose parent
is gone, even by `kill -9`, gets SIGTERM from the kernel. Not for what the nodes do.
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
from types import FrameType

import msgspec

from node.events import Event, decode_event, inert
from node.sandbox.linux import set_parent_death_signal
from protocol.errors import SwarmError
from swarm_cli.demo.plan import DemoRole, PlannedNode

__all__ = [
    "DemoError",
    "EventTail",
    "check_alive",
    "last_words",
    "running",
    "signals_interrupt",
    "start_node",
    "stop",
]

STOP_S = 8.0
MAX_WORDS_CHARS = 400


class DemoError(SwarmError):
    """A process of the demo failed; the message quotes its last words."""


class EventTail:
    """Reads the new events of a growing `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Events completed since the last call. A line that a kill has cut short is left out."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for line in whole.splitlines() for event in _decoded(line)]


def _decoded(line: bytes) -> list[Event]:
    try:
        return [decode_event(line)]
    except msgspec.DecodeError:
        return []


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal all raise KeyboardInterrupt in the block, so that all is cleaned
    up. A handler of our own: Python's default one is replaced by asyncio, and the screen then ends without a
    word. A signal that is ignored (SIGINT in the background of a script) stays so."""
    before = {
        number: signal.signal(number, _interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def running(nodes: Sequence[PlannedNode]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process per node; on leaving, stop them all."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.extend(map(_start, nodes))  # one by one: what has started is stopped
        yield children
    finally:
        stop(children)


def _start(node: PlannedNode) -> subprocess.Popen[bytes]:
    config = str(node.home.root / "node.json")
    if node.role is DemoRole.LIAR:
        return start_node(node, ("swarm_cli.demo.liar_node", config))
    return start_node(node, ("swarm_cli", "run", "--config", config))


def start_node(node: PlannedNode, module: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `python -m <module>` for a node, in a group of its own; it ends when this process is gone."""
    # SWARM_... variables are in the configuration already, where the demo's own values replaced them.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARM_")}
    parent = os.getpid()

    def die_with_parent() -> None:
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with _log(node).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )


def _log(node: PlannedNode) -> Path:
    return node.home.root / "output.log"


def last_words(node: PlannedNode) -> str:
    """The last line that a node's process has printed, harmless."""
    text = _log(node).read_text(encoding="utf-8", errors="replace")
    words = [line.strip() for line in text.splitlines() if line.strip()] or ["none"]
    return inert(words[-1].removeprefix("swarm: "), MAX_WORDS_CHARS)


def check_alive(nodes: Sequence[PlannedNode], children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise DemoError when a process has ended by itself with an error."""
    for node, child in zip(nodes, children, strict=True):
        if child.poll() not in (None, 0):
            raise DemoError(
                f"{node.config.name} failed with exit code {child.returncode}, "
                f"its last words: {last_words(node)!r}; "
                "--keep FOLDER keeps its whole log"
            )


def stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes and all they started. An interrupt meanwhile ends the patience, not the work."""
    try:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline_s - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
