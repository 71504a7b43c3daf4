"""One node of a broadcast: where it stands, and what every way of broadcasting does there.

For `peer.py`, the process in which it lives; `swarm.py` and `torrent.py` are the ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_cli.bench.broadcast.networks import Site

__all__ = ["Member", "Place"]


@dataclass(frozen=True)
class Place:
    """What a node is told at its birth."""

    number: int
    """0 is the source."""
    site: Site
    folder: Path
    """Its own, empty."""
    blob: Path
    """What the source sends; receivers do not look at it."""
    cap_mbit: float
    """Up and down; 0: the network sees to it."""

    @property
    def is_source(self) -> bool:
        return self.number == 0


class Member(ABC):
    """One way of broadcasting, at one node. Calls come in this order."""

    @abstractmethod
    async def open(self) -> dict[str, Any]:
        """Start; returns what the others must know of this node."""

    @abstractmethod
    async def join(self, others: list[dict[str, Any]], timeout_s: float) -> None:
        """Connect to all others (in the order of their numbers, this one among them), and be ready."""

    @abstractmethod
    async def start(self, timeout_s: float) -> Path | None:
        """Give, or get everything; returns at once at the source, and at a receiver the file of the verified
        blob."""

    @abstractmethod
    async def report(self) -> dict[str, Any]:
        """What it counted."""

    @abstractmethod
    async def close(self) -> None:
        """Leave nothing behind but files."""
