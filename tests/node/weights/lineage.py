"""One lineage in a simulated swarm: an owner that publishes seeded weights, and followers of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.clock import VirtualClock
from node.compute import InlineCompute
from node.supervise import StageGauge
from node.transport.memory import MemoryNetwork
from node.weights.chain.bf16 import U16, to_bits
from node.weights.chain.chains import Chains
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.store import WeightsStore
from node.weights.follow.tracker import Tracker
from node.weights.publish.publish import WeightsPublisher
from protocol.delta import weights_digest
from protocol.identity import Identity
from protocol.messages import Lineage, PeerId
from tests.node.weights.simulation import inline

__all__ = ["BASE_MODEL", "SWARM", "Member", "Weights", "identity_of", "lineage_of"]

SWARM, BASE_MODEL, TOKENIZER = "5" * 64, "b" * 64, "7" * 64


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


class Member:
    """A node of the lineage of member `owner`: everything that moves its weights."""

    def __init__(
        self, network: MemoryNetwork, number: int, folder: Path, *, owner: int = 0, keep_bytes: int = 1 << 30
    ) -> None:
        self.number = number
        self.identity = identity_of(number)
        self.lineage = lineage_of(owner)
        self.clock = VirtualClock()
        self.compute = InlineCompute({})
        self.failures: Counter[tuple[PeerId, str]] = Counter()
        self.notices: list[str] = []
        self.misled: list[str] = []
        """Reasons, one for each blob of the owner's that was not what its link says."""
        self.members: list[PeerId] = []
        """Connected peers that have the lineage."""
        self.transport = network.transport(self.identity.peer_id)
        self.store = WeightsStore(folder / f"{number}" / "weights", keep_bytes)
        self.exchange = Exchange(
            self.transport,
            self.store,
            providers=lambda root: self.members,
            failed=self.failed,
            clock=self.clock,
            rng=random.Random(number),
            run_blocking=inline,
        )
        self.chains = Chains(self.transport, SWARM, folder / f"{number}" / "chain")
        self.reached: list[tuple[int, str]] = []
        """Versions activated, with their hashes."""
        self.bits: dict[str, U16] = {}
        self.tracker: Tracker | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def version(self) -> int:
        return self.tracker.version if self.tracker is not None else -1

    def failed(self, peer_id: PeerId, reason: str) -> None:
        self.failures[peer_id, reason] += 1

    def publisher(self, base: Mapping[str, U16], *, anchor_every: int = 4) -> WeightsPublisher:
        return WeightsPublisher(
            self.identity,
            SWARM,
            self.lineage,
            base,
            self.store,
            self.chains,
            self.exchange,
            anchor_every=anchor_every,
            compute=self.compute,
            clock=self.clock,
            notice=lambda level, text: self.notices.append(text),
        )

    def follow(self, base: Mapping[str, U16], *, fetch_timeout_s: float = 60.0) -> Tracker:
        """Begin to follow, as a task."""
        self.tracker = Tracker(
            self.lineage,
            self.chains,
            self.exchange,
            self.store,
            base,
            weights_digest(base),
            on_version=self._on_version,
            providers=lambda: self.members,
            failed=self.failed,
            compute=self.compute,
            clock=self.clock,
            gauge=StageGauge("broadcast", self.clock, "a version"),
            fetch_timeout_s=fetch_timeout_s,
            misled=self.misled.append,
            notice=lambda level, text: self.notices.append(text),
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
        self.store.close()
