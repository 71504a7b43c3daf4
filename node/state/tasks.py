"""Tasks in files, as they lie in the home: one blob each, named by its SHA-256, checked at each reading."""

from __future__ import annotations

from collections.abc import Iterable

from node.state.paths import Home
from node.state.stores import write_atomically
from protocol.codec import digest
from protocol.constants import MAX_TASK_BYTES
from protocol.errors import ConfigError
from protocol.messages import Digest, EnvironmentSpec
from protocol.tasks import wanted

__all__ = ["blobs_of", "keep_blob", "kept_blob", "missing_blobs"]


def keep_blob(home: Home, blob: bytes) -> Digest:
    """Put a task's blob where the node finds it. Raises ConfigError."""
    name = digest(blob)
    if kept_blob(home, name) is None:
        path = home.task(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, blob)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return name


def kept_blob(home: Home, name: Digest) -> bytes | None:
    """The blob of this digest, None where it is not here; one that was changed is as good as none."""
    try:
        with home.task(name).open("rb") as file:
            blob = file.read(MAX_TASK_BYTES + 1)
    except OSError:
        return None
    return blob if digest(blob) == name else None


def missing_blobs(home: Home, environments: Iterable[EnvironmentSpec]) -> dict[str, Digest]:
    """Of a charter's tasks in files those that are not here, by name. Raises ConfigError."""
    names = wanted(environments)
    return {task: name for task, name in names.items() if kept_blob(home, name) is None}


def blobs_of(home: Home, environments: Iterable[EnvironmentSpec]) -> dict[str, bytes]:
    """The blobs of a charter's tasks in files, by name. Raises ConfigError for one that is not here."""
    found = {}
    for task, name in wanted(environments).items():
        blob = kept_blob(home, name)
        if blob is None:
            raise ConfigError(
                f"the file of the task {task} is not here ({home.task(name)}): join the swarm again, or copy "
                "it from another member"
            )
        found[task] = blob
    return found
