"""What crosses the pipes between the node, the environments' worker and the worker's forks.

Every record is msgpack of a typed struct behind a four-byte length; unknown fields, wrong types and oversized
frames are refused on both sides. The bytes that a fork writes are an enemy's bytes: they travel as an opaque
`ForkResult.payload` through the worker and are decoded once, in the node: a `Scored` for each completion, a
question or nil for each seed.

Flow: Setup -> Started, then at each door (QuestionRequest | ScoreRequest | ProbeRequest) -> Outcome, one at a
time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from node.environment.host import Answers
from node.environment.records import Score

__all__ = [
    "FRAME_HEADER_BYTES",
    "Door",
    "ForkResult",
    "ForkStatus",
    "Layer",
    "Outcome",
    "ProbeRequest",
    "QuestionRequest",
    "SandboxLimits",
    "ScoreRequest",
    "Scored",
    "Setup",
    "Started",
    "Trial",
    "frame",
]

FRAME_HEADER_BYTES = 4


class Door(StrEnum):
    """The ways into the worker, each with a pair of pipes and forks of its own: what strangers' answers take
    is not waited for by the node's own work."""

    OWN = "own"
    PEERS = "peers"


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
    BROKEN = "broken"  # the environment's own part failed: nobody's answer is to blame


class SandboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one fork may use, and for `request_s` all forks of one group together, for `batch_s` those of all
    groups or questions that one request is about.

    `derive_*` is the environment's own part, deriving questions; `cpu_s` and `wall_s` begin after it, with
    the answers. The wall clock is wider than the CPU time because training shares the cores.
    """

    cpu_s: int = 2
    wall_s: float = 6.0
    derive_cpu_s: int = 10
    derive_wall_s: float = 30.0
    request_s: float = 42.0
    batch_s: float = 90.0
    memory_bytes: int = 256 * 1024 * 1024
    open_bytes: int = 4 * 1024**3
    """Address space for opening all environments."""
    open_files: int = 32
    niceness: int = 5
    """Of strangers' answers."""
    parallel_forks: int = 2
    completions: int = 64
    completion_bytes: int = 256 * 1024
    reply_bytes: int = 64 * 1024
    question_bytes: int = 64 * 1024
    fork_items: int = 128
    """Questions, or completions that are only compared, that may share a fork."""
    start_s: float = 60.0


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """node -> worker, once. `hidden_paths` are covered even where they lie inside a readable directory."""

    environments: dict[str, dict[str, Any]]
    """Configuration by name."""
    limits: SandboxLimits
    layers: tuple[Layer, ...]
    hidden_paths: tuple[str, ...]
    blobs: dict[str, bytes] = {}
    """Of the tasks in files, by name."""


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker -> node, once. `error` is empty when it serves; `missing` says why a layer does not hold."""

    error: str = ""
    layers: tuple[Layer, ...] = ()
    missing: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()
    """Environments whose scoring may run an answer."""
    unrepeatable: tuple[str, ...] = ()
    """Environments whose questions depend on Python's hash order."""


class QuestionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="questions"):
    """node -> worker. The question of each seed."""

    nonce: int
    environment: str
    seeds: tuple[int, ...]


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="score"):
    """node -> worker. The worker derives each prompt again from environment and seed."""

    nonce: int
    groups: tuple[Answers, ...]


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="probe"):
    """node -> worker. Lets a fork try to break out in one named way; only the node can ask for it."""

    nonce: int
    trial: Trial
    port: int
    path: str
    node_pid: int


class Scored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """fork -> node. A completion's score, and what the task did wrong on it, "" for nothing."""

    score: Score
    fault: str


class ForkResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one fork ended; `first` is the number of its first completion or seed in the request, `payload`
    what it made of each, in order."""

    first: int
    count: int
    status: ForkStatus
    detail: str
    payload: bytes


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """worker -> node: the answer to one request, in order of `first`; a group stops at its first failure."""

    nonce: int
    results: tuple[ForkResult, ...]


def frame(record: msgspec.Struct) -> bytes:
    """The bytes that go down a pipe for `record`."""
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(FRAME_HEADER_BYTES, "big") + body
