"""What of a node outlives its process: sequence numbers, envelopes counted, windows begun, peers' conduct."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.peers.trust import Standing, load_standings
from node.state.paths import Home
from node.state.stores import (
    MemorySequence,
    ReplayGuard,
    ReplayStore,
    SequenceSource,
    SequenceStore,
)
from node.state.windows import MemoryWindows, WindowStore
from protocol.errors import ConfigError
from protocol.messages import Digest
from protocol.replay import ReplayCache

__all__ = ["Stores", "memory_stores", "open_stores"]


@dataclass(frozen=True, kw_only=True)
class Stores:
    """State of one node in one swarm; on disk for a real node, in memory for a simulated one."""

    sequence: SequenceSource
    """Numbers of this node's envelopes."""
    replay: ReplayGuard
    """Envelopes of others that were counted."""
    windows: MemoryWindows
    """Windows whose slots were answered."""
    standings: Sequence[Standing] = ()
    """What is remembered of peers' conduct."""
    trust: Path | None = None
    """Where that is kept; None: nowhere."""


@contextlib.contextmanager
def open_stores(home: Home, swarm_id: Digest, now_ms: Callable[[], int]) -> Iterator[Stores]:
    """The stores under `home`, for the process that has its lock. Raises ConfigError where it cannot write
    there."""
    try:
        replay = ReplayStore(home.state, ReplayCache(), now_ms())
    except OSError as error:
        raise ConfigError(f"cannot write in {home.state}: {error.strerror}") from None
    try:
        yield Stores(
            sequence=SequenceStore(home.state / "sequence", now_ms),
            replay=replay,
            windows=WindowStore(home.state / "window"),
            standings=load_standings(home.trust, swarm_id),
            trust=home.trust,
        )
    finally:
        replay.close()


def memory_stores(now_ms: int) -> Stores:
    """Empty stores that end with the process: for simulations."""
    return Stores(sequence=MemorySequence(now_ms), replay=ReplayCache(), windows=MemoryWindows())
