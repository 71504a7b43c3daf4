"""A swarm that exchanges one blob in virtual time, over links with a bandwidth and a delay.

`simulate` gives the times at which each receiver was done and what everybody sent. First come first served at
each link, no packet loss: what it leaves out is TCP.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.clock import VirtualClock, run_virtual
from node.transport.links import LinkConditions
from node.transport.memory import MemoryNetwork, MemoryTransport
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.store import WeightsStore
from protocol.errors import SwarmError
from protocol.identity import Identity
from protocol.messages import ChunkedBlob, Digest, PeerId
from tests.node.runtimes import make_runtime

HOME = LinkConditions(5.0, 15.0)


async def inline(function: Callable, *args: object) -> object:
    """Instead of a thread, which has no part in virtual time."""
    return function(*args)


class Node:
    """One node of a simulated swarm."""

    def __init__(self, network: MemoryNetwork, seed: int, folder: Path, peers: Sequence[PeerId], **options):
        identity = Identity.from_seed(seed.to_bytes(32, "little"))
        self.peers = list(peers)
        self.failures: Counter[tuple[PeerId, str]] = Counter()
        self.transport: MemoryTransport = network.transport(identity.peer_id)
        self.store = WeightsStore(folder / str(seed), 1 << 40)
        self.exchange = Exchange(
            make_runtime(seed=seed),
            self.transport,
            self.store,
            providers=self._providers,
            failed=self._failed,
            **options,
        )

    @property
    def peer_id(self) -> PeerId:
        return self.transport.peer_id

    def _providers(self, root: Digest) -> Sequence[PeerId]:
        return self.peers

    def _failed(self, peer_id: PeerId, reason: str) -> None:
        self.failures[peer_id, reason] += 1


def peer_id_of(seed: int) -> PeerId:
    return Identity.from_seed(seed.to_bytes(32, "little")).peer_id


@dataclass
class Outcome:
    """Seconds are virtual."""

    bound_s: float
    done_s: dict[int, float] = field(default_factory=dict)
    uploaded: dict[int, int] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    size: int = 0

    @property
    def ratio(self) -> float:
        """Time of the last receiver, against one copy over one link."""
        return max(self.done_s.values()) / self.bound_s

    @property
    def source_copies(self) -> float:
        return self.uploaded[0] / self.size


def simulate(
    folder: Path,
    receivers: int,
    size: int,
    *,
    mbit: float = 20.0,
    link: LinkConditions = HOME,
    mbits: Mapping[int, tuple[float, float]] | None = None,
    killed: Mapping[int, float] | None = None,
    silenced: Mapping[int, float] | None = None,
    joins: Mapping[int, float] | None = None,
    holders: Sequence[int] = (0,),
    seed: int = 1,
    options: Mapping[str, float] | None = None,
    deadline_s: float = 3600.0,
) -> Outcome:
    """Node 0 seeds, nodes 1.. receive. `mbits`: other (up, down) links by node. Seconds by node: `killed`, it
    vanishes and its streams break; `silenced`, they stay open without a word; `joins`, it begins. `holders`:
    nodes that have the whole blob (node 0 seeds if alone)."""
    data = random.Random(seed).randbytes(size)

    async def main() -> Outcome:
        network = MemoryNetwork(seed=seed, link=link, clock=VirtualClock())
        everybody = [peer_id_of(number) for number in range(receivers + 1)]
        nodes = [
            Node(network, number, folder, everybody, **(options or {})) for number in range(receivers + 1)
        ]
        for number, node in enumerate(nodes):
            network.limit(node.peer_id, *(mbits or {}).get(number, (mbit, mbit)))
            await node.transport.start()
        for number in holders:
            blob = nodes[number].store.add(data).blob
        if tuple(holders) == (0,):
            nodes[0].exchange.seed(blob.root)
        outcome = Outcome(bound_s=size * 8 / (mbit * 1e6), size=size)
        loop = asyncio.get_running_loop()

        async def receive(number: int, blob: ChunkedBlob) -> None:
            node = nodes[number]
            begun_s = (joins or {}).get(number, 0.0)
            await asyncio.sleep(begun_s)
            try:
                stored = await node.exchange.fetch(blob, deadline_s)
            except SwarmError:
                return
            outcome.done_s[number] = loop.time() - begun_s
            assert bytes(stored.data()) == data

        tasks = {
            number: asyncio.create_task(receive(number, blob))
            for number in range(receivers + 1)
            if number not in holders
        }

        async def lose(number: int, at_s: float, how: Callable[[PeerId], None]) -> None:
            await asyncio.sleep(at_s)
            how(nodes[number].peer_id)
            if number in tasks:
                tasks[number].cancel()

        losses = [(killed or {}, network.kill), (silenced or {}, network.silence)]
        deaths = [
            asyncio.create_task(lose(*death, how)) for deadly, how in losses for death in deadly.items()
        ]
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.gather(*deaths)
        for number, node in enumerate(nodes):
            outcome.uploaded[number] = sum(node.exchange.uploaded.values())
            outcome.failures.update({reason: count for (_, reason), count in node.failures.items()})
            await node.transport.close()
        return outcome

    return run_virtual(main())
