"""The folder of a demo: temporary and removed at the end, or kept where the person says.

While a demo runs it holds the lock in its folder. A demo that was killed could not clean up: the next one
removes what it finds unlocked, its own user's folders only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from node.state.lock import hold, is_held
from protocol.errors import ConfigError

__all__ = ["demo_folder", "remove_orphans"]

PREFIX = "swarm-demo-"


@contextlib.contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    """An empty folder for the block. Raises ConfigError when `keep` cannot be one."""
    remove_orphans(Path(tempfile.gettempdir()))
    if keep is not None:
        yield _kept(keep)
        return
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise ConfigError(f"cannot make a temporary folder: {error}; set TMPDIR, or use --keep") from None
    try:
        with hold(root / "lock"):
            yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def remove_orphans(folder: Path) -> int:
    """Delete the folders of demos that were killed, and say how many."""
    removed = 0
    for orphan in folder.glob(f"{PREFIX}*"):
        lock = orphan / "lock"
        # Without a lock file it may be one that is being made right now.
        with contextlib.suppress(OSError):
            if orphan.lstat().st_uid == os.getuid() and lock.is_file() and not is_held(lock):
                shutil.rmtree(orphan, ignore_errors=True)
                removed += 1
    return removed


def _kept(keep: Path) -> Path:
    root = keep.expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        is_empty = not any(root.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot use the folder --keep {keep}: {error.strerror}") from None
    if not is_empty:
        raise ConfigError(f"the folder --keep {keep} is not empty; choose a new one")
    return root
