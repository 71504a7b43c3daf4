"""Attempts to break out, made from inside a scoring fork at the node's request.

Each attempt returns "held" with what stopped it, or "breached" with what it reached. The detection layer is
off while they run, since the walls must hold without it. They are harmless where they succeed: a connection
to the node's own listener, a file of zero bytes, a child that ends at once, signal 0.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from node.sandbox.records import ProbeRequest, SandboxLimits, Trial

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BREACHED", "HELD", "attempt"]

HELD = b"held"
BREACHED = b"breached"
_WRITABLE_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", ".")  # noqa: S108  (tried, not used)
_FORKS = 4


def attempt(request: ProbeRequest, limits: SandboxLimits) -> bytes:
    """Make the attempt that `request` names."""
    attempts: dict[Trial, Callable[[], None]] = {
        Trial.CONNECT: lambda: _connect(request.port),
        Trial.READ_SECRET: lambda: _read(request.path),
        Trial.READ_ENVIRONMENT: lambda: _read(f"/proc/{request.node_pid}/environ"),
        Trial.SIGNAL_NODE: lambda: os.kill(request.node_pid, 0),
        Trial.WRITE_FILE: lambda: _write(os.path.dirname(request.path)),
        Trial.FORK: _fork,
        Trial.EXECUTE: lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]),  # noqa: S606
        Trial.MEMORY: lambda: _fill(3 * limits.memory_bytes),
    }
    try:
        attempts[request.trial]()
    except (OSError, MemoryError) as error:
        return HELD + f": {type(error).__name__}".encode()
    return BREACHED


def _connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=1.0).close()


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _write(directory: str) -> None:
    """Raises the last error when none of the usual places takes a file."""
    last: OSError | None = None
    for place in (directory, *_WRITABLE_PLACES):
        path = os.path.join(place, f".swarm-probe-{os.getpid()}")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            last = error
            continue
        os.close(descriptor)
        os.unlink(path)
        return
    if last is not None:
        raise last


def _fork() -> None:
    for _ in range(_FORKS):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def _fill(size_bytes: int) -> None:
    block = bytearray(size_bytes)
    for offset in range(0, size_bytes, 4096):
        block[offset] = 1
