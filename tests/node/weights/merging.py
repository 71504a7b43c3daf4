"""A simulated swarm of trainers of one base model that merge: unlike weights, a round a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from node.clock import VirtualClock
from node.config import MergeConfig
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork
from node.weights.chain.base import Base
from node.weights.chain.bf16 import U16, to_bits
from node.weights.merge.merger import Merge, Merger
from node.weights.merge.resolve import MergeRule
from protocol.delta import encode, weights_digest
from protocol.links import sign_link
from protocol.messages import Lineage, LinkKind, SignedLink, WeightsLink
from tests.node.weights.lineage import BASE_MODEL, SWARM, WINDOW_MS, Member, Weights, lineage_of

if TYPE_CHECKING:
    from node.weights.engine_sync import EngineSync
    from node.weights.publish import VersionPublisher

__all__ = [
    "EVERY",
    "RULE",
    "SETTINGS",
    "SETTLE_S",
    "SHAPES",
    "WINDOW_MS",
    "Swarm",
    "Trainer",
    "drifted",
    "expected_mean",
]

SHAPES = {"w": (64, 32), "norm": (32,)}
EVERY = 60
SETTLE_S = 5.0
SETTINGS = MergeConfig(every_windows=EVERY, settle_s=SETTLE_S, norm_limit=1e6)
RULE = MergeRule.of(SETTINGS, WINDOW_MS)

Bits = Mapping[str, U16]


def drifted(base: Weights, seed: int, count: int = 3) -> dict[str, U16]:
    """The weights of one trainer after some steps of its own."""
    generator = torch.Generator().manual_seed(1000 + seed)
    state = {name: tensor.clone() for name, tensor in base.state.items()}
    for tensor in state.values():
        for _ in range(count):
            tensor *= 1 + 0.02 * torch.randn(tensor.shape, generator=generator)
    bits = to_bits(state)
    if "tied" in bits:
        bits["tied"] = bits["w"]
    return bits


def expected_mean(base: Bits, others: Sequence[Bits], ages: Sequence[int]) -> dict[str, U16]:
    """The mean of task vectors, weighed by (1 + age)^-1/2, in numpy; bf16 by rounding a double's 52 bits of
    mantissa to 7, ties to even."""

    def values(bits: U16) -> np.ndarray:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    weights = (1.0 + np.array(ages)) ** -0.5
    made = {}
    for name, start in base.items():
        moves = [values(other[name]) - values(start) for other in others]
        exact = values(start) + np.average(moves, axis=0, weights=weights)
        whole = exact.view(np.uint64)
        rest, last = whole & np.uint64((1 << 45) - 1), (whole >> np.uint64(45)) & np.uint64(1)
        up = (rest > 1 << 44) | ((rest == 1 << 44) & (last == 1))
        rounded = ((whole >> np.uint64(45)) + up) << np.uint64(45)
        made[name] = (rounded.view(np.float64).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return made


class Trainer(Member):
    """A node that merges its own lineage with others'. It is its own publisher, so that a test says what it
    contributes and when."""

    def __init__(self, swarm: Swarm, number: int, settings: MergeConfig, keep_bytes: int) -> None:
        super().__init__(swarm.network, number, swarm.folder, owner=number, keep_bytes=keep_bytes)
        self.sharing.settings = self.sharing.settings.model_copy(update={"fetch_timeout_s": 10.0})
        self.scratch = self.sharing.home.merge
        self.base = swarm.base.base
        self.base_digest = swarm.digest
        self.contributed: list[Bits] = []
        self.drift = lambda: drifted(swarm.base, number + 100 * len(self.contributed))
        self.own: Bits | None = self.drift()
        """What it contributes next; drifts on from round to round."""
        self.date_ms: int | None = None
        """When its contribution is said to be made; None for now."""
        self.late_s = 0.0
        """How long its contribution takes."""
        self.not_sharing = ""
        """Why its engine has failed for good."""
        self.ahead_windows = 0.0
        """How far its clock is ahead of the swarm's."""
        self.merges: list[Merge] = []
        self.at_s: list[float] = []
        self.merger = Merger(
            self.runtime,
            self.membership,
            Base(self.base, self.base_digest),
            cast("VersionPublisher", self),
            cast("EngineSync", self),
            self.sharing,
            settings,
        )
        self.gauge = self.merger.gauge

    def window(self) -> float:
        return super().window() + self.ahead_windows

    async def contribute(self) -> SignedLink | None:
        await asyncio.sleep(self.late_s)
        if self.own is None:
            return None
        own = self.own
        self.contributed.append(own)
        self.own = self.drift()
        return self.signed(encode(self.base, own, base_digest=self.base_digest), weights_digest(own))

    def signed(self, data: bytes, result: str, version: int = 3, **fields: object) -> SignedLink:
        """A link on a blob that this node has from now on."""
        lineage = Lineage(self.peer_id, BASE_MODEL, lineage_of(0).tokenizer)
        link = WeightsLink(
            lineage=lineage,
            policy_version=version,
            kind=LinkKind.ANCHOR,
            base_version=version,
            base=self.base_digest,
            result=result,
            blob=self.store.add(data).blob,
            created_at=self.clock.now_ms() if self.date_ms is None else self.date_ms,
        )
        return sign_link(self.identity, SWARM, msgspec.structs.replace(link, **fields))

    def begin(self) -> None:
        """Merge from now on; what is made is taken at once."""
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        running = asyncio.create_task(self.merger.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=0.25)
                merge = self.merger.take()
                if merge is not None:
                    self.merges.append(merge)
                    self.at_s.append(self.clock.monotonic_s())
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def close(self) -> None:
        await super().close()
        assert not self.scratch.exists()


class Swarm:
    """Trainers 0, 1, 2 ..., all partners of each other. Those in `idle` do not merge by themselves."""

    def __init__(
        self,
        folder: Path,
        count: int = 3,
        *,
        settings: Mapping[int, MergeConfig] | None = None,
        idle: Sequence[int] = (),
        shapes: Mapping[str, Sequence[int]] = SHAPES,
        change: Callable[[Weights], object] = lambda base: None,
        keep: Mapping[int, int] | None = None,
    ) -> None:
        """`change` the base weights; `keep`: bytes of the stores of some trainers."""
        self.folder = folder
        self.network = MemoryNetwork(seed=1, link=LINKS["home"], clock=VirtualClock())
        self.base = Weights(shapes)
        change(self.base)
        self.digest = weights_digest(self.base.base)
        self.idle = idle
        self.all = [
            Trainer(self, number, (settings or {}).get(number, SETTINGS), (keep or {}).get(number, 1 << 30))
            for number in range(count)
        ]
        for each in self.all:
            each.members = [other.peer_id for other in self.all if other is not each]

    async def __aenter__(self) -> Swarm:
        for each in self.all:
            await each.transport.start()
        for each in self.all:
            if each.number not in self.idle:
                each.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.all:
            await each.close()

    async def until_round(self, number: float) -> None:
        """Until so many rounds have begun; 1.5 is the middle of the first."""
        await asyncio.sleep(number * EVERY * WINDOW_MS / 1000 - asyncio.get_running_loop().time())
        for each in self.all:
            if each.task is not None and each.task.done():
                await each.task

    def date(self, window: int) -> int:
        """A date of the swarm's time."""
        return VirtualClock().now_ms() - round(asyncio.get_running_loop().time() * 1000) + window * WINDOW_MS
