"""One node per home: an advisory lock on `<home>/lock` for the life of the process.

Sequence numbers, the replay journal and the answered windows belong to one process; a second one would repeat
numbers and answer slots twice, which peers rightly take for cheating. The kernel releases the lock when the
process ends, however it ends, so there is no stale lock to remove.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ConfigError

__all__ = ["hold", "is_held"]

_PROCESS_ID_BYTES = 16


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Own the lock file at `path` for the block. Raises ConfigError when another process does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, _PROCESS_ID_BYTES).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"another node (process {owner}) runs with the home {path.parent}; stop it, or give this one "
                "a home of its own: --home or SWARM_HOME"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot lock {path}: {error.strerror}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process owns the lock file at `path`; False when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
