"""One lineage in a simulated swarm: an owner that publishes seeded weights, and followers of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from node.clock import VirtualClock
from node.compute import InlineCompute
from node.config import BroadcastConfig
from node.events import Event
from node.peers.trust import Hardness
from node.state.paths import Home
from node.transport.memory import MemoryNetwork, MemoryTransport
from node.weights.chain.base import Base, BaseWeights
from node.weights.chain.bf16 import U16, to_bits
from node.weights.follow.tracker import Tracker, useless_blobs
from node.weights.publish import VersionPublisher
from node.weights.sharing import GIB, WeightsSharing
from protocol.delta import weights_digest
from protocol.identity import Identity
from protocol.messages import Digest, Lineage, PeerId
from tests.node.runtimes import make_runtime, notices_of

if TYPE_CHECKING:
    from node.membership import Membership
    from node.network import Network
    from node.peers.book import PeerBook
    from node.train.step import Trainer

__all__ = ["BASE_MODEL", "SWARM", "WINDOW_MS", "Member", "Weights", "identity_of", "lineage_of"]

SWARM, BASE_MODEL, TOKENIZER = "5" * 64, "b" * 64, "7" * 64
WINDOW_MS = 1000
"""Of the swarm's time, which begins with virtual time."""


def identity_of(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "little"))


def lineage_of(number: int) -> Lineage:
    return Lineage(identity_of(number).peer_id, BASE_MODEL, TOKENIZER)


class Weights:
    """Float32 masters that drift: each step changes about `share` of their bf16 values."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, share: float = 0.02, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._share = share
        self.state = {
            name: 0.1 * torch.randn(tuple(shape), generator=self._generator) for name, shape in shapes.items()
        }
        self.base = to_bits(self.state)

    def step(self) -> dict[str, Tensor]:
        """The next version's weights; the ones before stay as they are."""
        self.state = {name: tensor.clone() for name, tensor in self.state.items()}
        for tensor in self.state.values():
            count = int(self._share * tensor.numel()) + 1
            chosen = torch.randint(tensor.numel(), (count,), generator=self._generator)
            tensor.view(-1)[chosen] *= 1.01
        return self.state


class Neighbours:
    """In place of a network: who is connected."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.presence = SimpleNamespace(lineage=None)
        self.connected: list[PeerId] = []

    def members_of(self, lineage: Lineage | None) -> list[PeerId]:
        return self.connected

    def trainers_of(self, base_model: Digest) -> list[PeerId]:
        return sorted(self.connected)


class Peers:
    """In place of the book about peers: what was said of them, and a trust that a test sets."""

    def __init__(self) -> None:
        self.failures: Counter[tuple[PeerId, str]] = Counter()
        self.hard: Counter[PeerId] = Counter()
        """Proofs against a peer."""
        self.distrusted: set[PeerId] = set()
        self.known: set[PeerId] | None = None
        """Who has earned trust; None for all."""

    def refused(self, peer_id: PeerId, reason: str) -> None:
        self.failures[peer_id, reason] += 1

    def judged(self, peer_id: PeerId, found: Hardness) -> None:
        self.hard[peer_id] += found is Hardness.HARD

    def has_earned_trust(self, peer_id: PeerId) -> bool:
        return peer_id not in self.distrusted and (self.known is None or peer_id in self.known)

    def quarantined(self, peer_id: PeerId) -> bool:
        return peer_id in self.distrusted


class Source:
    """In place of a trainer: the weights that it is given."""

    policy_version = 0

    def __init__(self) -> None:
        self.state: Mapping[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)


class Member:
    """A node of the lineage of member `owner`: everything that moves its weights."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        folder: Path,
        *,
        owner: int = 0,
        keep_bytes: int = 1 << 30,
    ) -> None:
        self.number = number
        self.identity = identity_of(number)
        self.lineage = lineage_of(owner)
        self.events: list[Event] = []
        self.clock = VirtualClock()
        self.runtime = make_runtime(self.clock, events=self.events, seed=number)
        self.membership = cast(
            "Membership",
            SimpleNamespace(
                identity=self.identity,
                peer_id=self.peer_id,
                swarm_id=SWARM,
                charter=SimpleNamespace(window_ms=WINDOW_MS, members=()),
                window=self.window,
            ),
        )
        self.transport = network.transport(self.peer_id)
        self.network = Neighbours(self.transport)
        self.peers = Peers()
        self.sharing = WeightsSharing(
            self.runtime,
            self.membership,
            cast("Network", self.network),
            cast("PeerBook", self.peers),
            BroadcastConfig(keep_gib=keep_bytes / GIB, fetch_timeout_s=60.0),
            Home(folder / f"{number}"),
        )
        self.store, self.exchange, self.chains = (
            self.sharing.store,
            self.sharing.exchange,
            self.sharing.chains,
        )
        self.source = Source()
        self.reached: list[tuple[int, str]] = []
        """Versions activated, with their hashes."""
        self.bits: dict[str, U16] = {}
        self.tracker: Tracker | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def members(self) -> list[PeerId]:
        """Connected peers that have the lineage."""
        return self.network.connected

    @members.setter
    def members(self, peer_ids: list[PeerId]) -> None:
        self.network.connected = peer_ids

    @property
    def failures(self) -> Counter[tuple[PeerId, str]]:
        return self.peers.failures

    @property
    def notices(self) -> list[str]:
        return notices_of(self.events)

    @property
    def version(self) -> int:
        return self.tracker.version if self.tracker is not None else -1

    def window(self) -> float:
        return self.clock.monotonic_s() * 1000 / WINDOW_MS

    def costs(self, **costs_s: float) -> None:
        """Of work by lane, in virtual seconds, for what is made from now on."""
        self.runtime = dataclasses.replace(self.runtime, compute=InlineCompute(costs_s))

    def publisher(self, base: Mapping[str, U16], *, anchor_every: int = 4) -> VersionPublisher:
        """Of this member's lineage; offered versions are taken from `source`."""
        self.sharing.settings = self.sharing.settings.model_copy(update={"anchor_every": anchor_every})
        return VersionPublisher(
            self.runtime,
            self.membership,
            self.lineage,
            cast("Trainer", self.source),
            BaseWeights(self.runtime, lambda: base),
            self.sharing,
        )

    def follow(
        self,
        base: Mapping[str, U16],
        on_version: Callable[[int, dict[str, U16]], Awaitable[None]] | None = None,
    ) -> Tracker:
        """Begin to follow, as a task; what `on_version` is given is kept here without one."""
        made = Base(base, weights_digest(base))
        self.tracker = Tracker(
            self.runtime, self.lineage, made, self.sharing, useless_blobs(), on_version or self._on_version
        )
        self.task = asyncio.create_task(self.tracker.run())
        return self.tracker

    async def _on_version(self, version: int, bits: dict[str, U16]) -> None:
        assert self.tracker is not None
        self.reached.append((version, self.tracker.digest))
        self.bits = {name: np.array(array) for name, array in bits.items()}

    async def until(self, version: int, *, within_s: float = 120.0) -> None:
        """Wait until this version is here; what the tracker raised is raised."""
        async with asyncio.timeout(within_s):
            while self.version < version:
                assert self.task is not None
                if self.task.done():
                    await self.task
                    raise AssertionError(f"stopped: {self.tracker.stopped if self.tracker else ''}")
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.transport.close()
