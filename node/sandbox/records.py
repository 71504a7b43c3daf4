"""What crosses the pipes between the node, the scoring worker and the worker's forks.

Every record is msgpack of a typed struct behind a four-byte length; unknown fields, wrong types and oversized
frames are refused on both sides. The bytes that a fork writes are an enemy's bytes: they travel as an opaque
`ForkResult.payload` through the worker and are decoded once, in the node, as one `Score` per completion.

Flow: Setup -> Started, then (ScoreRequest | ProbeRequest) -> Outcome, one at a time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from node.environment.tasks import Completion

__all__ = [
    "FRAME_HEADER_BYTES",
    "ForkResult",
    "ForkStatus",
    "Layer",
    "Outcome",
    "ProbeRequest",
    "SandboxLimits",
    "ScoreRequest",
    "Setup",
    "Started",
    "Trial",
    "frame",
]

FRAME_HEADER_BYTES = 4


class Layer(StrEnum):
    """The independent walls of the sandbox. Tests remove some, to see the others measured honestly."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    LIMITS = "limits"
    DETECTION = "detection"


class Trial(StrEnum):
    """What a probe really tries from inside a fork; `strength.py` says what each one proves."""

    CONNECT = "connect"
    READ_SECRET = "read_secret"  # noqa: S105
    READ_ENVIRONMENT = "read_environment"
    SIGNAL_NODE = "signal_node"
    WRITE_FILE = "write_file"
    FORK = "fork"
    EXECUTE = "execute"
    MEMORY = "memory"


class ForkStatus(StrEnum):
    """How one fork ended, as the worker (never the fork itself) saw it."""

    DONE = "done"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    FORBIDDEN = "forbidden"
    MALFORMED = "malformed"
    BROKEN = "broken"  # the environment could not derive its own prompt: nobody's answer is to blame


class SandboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one fork may use, and for `request_s` all forks of one group together.

    The wall clock is wider than the CPU time because training shares the cores.
    """

    cpu_s: int = 2
    wall_s: float = 6.0
    request_s: float = 12.0
    memory_bytes: int = 256 * 1024 * 1024
    open_files: int = 32
    niceness: int = 5
    parallel_forks: int = 2
    completions: int = 64
    completion_bytes: int = 256 * 1024
    reply_bytes: int = 64 * 1024
    start_s: float = 60.0


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """node -> worker, once. `hidden_paths` are covered even where they lie inside a readable directory."""

    environments: dict[str, dict[str, Any]]
    """Configuration by name."""
    limits: SandboxLimits
    layers: tuple[Layer, ...]
    hidden_paths: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker -> node, once. `error` is empty when it serves; `missing` says why a layer does not hold."""

    error: str = ""
    layers: tuple[Layer, ...] = ()
    missing: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="score"):
    """node -> worker. The worker re-derives the prompt from (environment, seed, index)."""

    nonce: int
    environment: str
    seed: int
    index: int
    completions: tuple[Completion, ...]


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="probe"):
    """node -> worker. Lets a fork try to break out in one named way; only the node can ask for it."""

    nonce: int
    trial: Trial
    port: int
    path: str
    node_pid: int


class ForkResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one fork ended; `first` is the index of its first completion, `payload` its scores, in order."""

    first: int
    count: int
    status: ForkStatus
    detail: str
    payload: bytes


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker -> node: the answer to one request, in order of `first`; stops at the first failure."""

    nonce: int
    results: tuple[ForkResult, ...]


def frame(record: msgspec.Struct) -> bytes:
    """The bytes that go down a pipe for `record`."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(FRAME_HEADER_BYTES, "big") + body
