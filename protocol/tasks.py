"""A task in a file, as it travels: its code and its questions in one blob, which the charter pins by SHA-256.

`file/NAME` brings code; `rows/NAME` brings none, only questions with answers, which are compared by a rule of
the program. Members fetch the blob from each other over `TASK_PROTOCOL` and check the hash. What the code and
the columns mean is the node's business (`node/environment/own_task.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from protocol.codec import decode
from protocol.constants import MAX_TASK_BYTES
from protocol.errors import ConfigError, RemoteProtocolError
from protocol.messages import Digest, EnvironmentSpec, Record, Uint

__all__ = [
    "FILE",
    "MAX_CODE_CHARS",
    "MAX_ROWS_BYTES",
    "PIECE_BYTES",
    "ROWS",
    "TaskBundle",
    "TaskReply",
    "TaskRequest",
    "is_bundled",
    "pinned",
    "unpack",
    "wanted",
]

FILE = "file/"
"""Before the name of a task with code of its own."""
ROWS = "rows/"
"""Before the name of questions with answers, without code."""
MAX_CODE_CHARS = 64 * 1024
MAX_ROWS_BYTES = MAX_TASK_BYTES - 2**20
PIECE_BYTES = 2**20
"""A blob is sent in frames of so many bytes, the last one shorter."""
_PIN = "sha256:"


class TaskBundle(Record, frozen=True):
    """`code` is Python, "" for none; `rows` are lines of JSON objects, empty where the code makes its own."""

    code: Annotated[str, Meta(max_length=MAX_CODE_CHARS)]
    rows: Annotated[bytes, Meta(max_length=MAX_ROWS_BYTES)]


class TaskRequest(Record, frozen=True):
    """member -> member: the blob of this SHA-256."""

    digest: Digest


class TaskReply(Record, frozen=True):
    """The size of the blob, which follows in frames of PIECE_BYTES; 0 where it is not here."""

    size: Uint


def is_bundled(name: str) -> bool:
    """Whether a task of this name is in a file that travels."""
    return name.startswith((FILE, ROWS))


def pinned(spec: EnvironmentSpec) -> Digest:
    """Which blob a task in a file is. Raises ConfigError where the charter does not say."""
    if not spec.pin.startswith(_PIN):
        raise ConfigError(
            f'the charter does not say which file the task {spec.name} is: give `file = "..."` in its '
            "[[environments]] table"
        )
    return spec.pin.removeprefix(_PIN)


def wanted(environments: Iterable[EnvironmentSpec]) -> dict[str, Digest]:
    """The blobs of a charter's tasks in files, by the task's name. Raises ConfigError."""
    return {spec.name: pinned(spec) for spec in environments if is_bundled(spec.name)}


def unpack(blob: bytes) -> TaskBundle:
    """Raises ConfigError for bytes that are no task."""
    try:
        return decode(blob, TaskBundle, max_bytes=MAX_TASK_BYTES)
    except RemoteProtocolError as error:
        raise ConfigError(f"these bytes are no task: {error}") from None
