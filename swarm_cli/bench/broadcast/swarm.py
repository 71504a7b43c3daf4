"""Ways of broadcasting over the network of a real node (`p2pd`): our exchange of chunks, and plain unicast.

Exchange: `node/weights/exchange/exchange.py` as in a node, every node a provider to every other. Unicast: the
source sends the whole blob to each receiver at once, over one stream each of the same network; what a trainer
would do that has no exchange. Both know the blob's description before the start, as from a signed link, and
hash what they get before they count as done.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from abc import abstractmethod
from pathlib import Path
from typing import Any

from node.clock import SystemClock
from node.compute import ThreadCompute
from node.events import EventBus
from node.runtime import Runtime
from node.state.keys import load_or_create_key
from node.transport import open_transport, peer_id_of
from node.transport.base import Stream, Transport, TransportLimits
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.rate import RateLimit
from node.weights.exchange.store import WeightsStore
from protocol.errors import DeadlineError, TransportError
from protocol.messages import ChunkedBlob, PeerId
from swarm_cli.bench.broadcast.member import Member, Place

__all__ = ["ExchangeMember", "UnicastMember"]

_STORE_BYTES = 4 << 30
_POLL_S = 0.1
_DIAL_AGAIN_S = (0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0)
"""Pauses between tries to connect, with a random part each, so that two nodes do not meet again: libp2p dials
an address not at all within 5 s after it failed."""
_UNICAST = "/murmuration/bench/unicast"
_FRAME_BYTES = 128 * 1024


class _SwarmMember(Member):
    """A node of a swarm, connected to all others."""

    limits = TransportLimits()

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ids: list[PeerId] = []
        self._rng = random.Random(place.number)
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the node is not open")
        return self._transport

    def use(self, transport: Transport) -> None:
        """Reach the others by this."""
        self._transport = transport

    async def open(self) -> dict[str, Any]:
        key = self.place.folder / "key"
        load_or_create_key(key)
        listen = f"/ip4/{self.place.site.address}/tcp/0"
        self.use(await open_transport(key, listen=listen, limits=self.limits, rng=self._rng))
        address = next(each for each in self.transport.addresses() if self.place.site.address in each)
        return {"address": address, **self.offer()}

    async def join(self, others: list[dict[str, Any]], timeout_s: float) -> None:
        self.ids = [peer_id_of(each["address"]) for each in others]
        self.know(others[0])
        try:
            async with asyncio.timeout(timeout_s):
                for other in others[: self.place.number]:
                    await self._dial(other["address"])
                while len(await self.transport.peers()) < len(others) - 1:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineError(f"connecting to {len(others) - 1} other nodes", timeout_s) from None

    async def _dial(self, address: str) -> None:
        """Connect, with a few tries. Lookups in the DHT dial too: where two nodes dial each other at the same
        moment from the ports that they listen at, TCP makes one connection of it, whose ends both believe
        that they began it and fail to agree on keys. Raises AddressError after the last try."""
        for delay_s in _DIAL_AGAIN_S:
            try:
                await self.transport.connect(address)
                return
            except TransportError:
                await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))
        await self.transport.connect(address)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    @abstractmethod
    def offer(self) -> dict[str, Any]:
        """What the others must know besides the address; prepares the source."""

    @abstractmethod
    def know(self, source: dict[str, Any]) -> None:
        """The source's offer."""


class ExchangeMember(_SwarmMember):
    """Ours."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._store = WeightsStore(place.folder / "blobs", _STORE_BYTES)
        self._exchange: Exchange | None = None
        self._blob: ChunkedBlob | None = None

    def offer(self) -> dict[str, Any]:
        self._exchange = Exchange(
            Runtime(SystemClock(), ThreadCompute(), EventBus(), random.Random(self.place.number)),
            self.transport,
            self._store,
            providers=lambda root: self.ids,
            failed=lambda peer_id, reason: None,
            upload_mbit=self.place.cap_mbit,
            download_mbit=self.place.cap_mbit,
        )
        if not self.place.is_source:
            return {}
        blob = self._store.add(self.place.blob.read_bytes()).blob
        self._exchange.seed(blob.root)
        return {"root": blob.root, "size": blob.size, "chunk_bytes": blob.chunk_bytes}

    def know(self, source: dict[str, Any]) -> None:
        self._blob = ChunkedBlob(root=source["root"], size=source["size"], chunk_bytes=source["chunk_bytes"])

    async def start(self, timeout_s: float) -> Path | None:
        if self.place.is_source:
            return None
        blob, exchange = self._known()
        await exchange.fetch(blob, timeout_s)
        return self.place.folder / "blobs" / f"{blob.root}.blob"

    async def report(self) -> dict[str, Any]:
        _, exchange = self._known()
        return {"sent_bytes": exchange.uploaded.total()}

    def _known(self) -> tuple[ChunkedBlob, Exchange]:
        if self._blob is None or self._exchange is None:
            raise RuntimeError("the node has not joined")
        return self._blob, self._exchange


class UnicastMember(_SwarmMember):
    """The source sends everything to everybody. The network of a node gives up a stream which gets too little
    for 20 s, as one of many on a full link may; here it is let live."""

    limits = TransportLimits(stream_timeout_s=300.0)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._limit = RateLimit(place.cap_mbit)
        self._go = asyncio.Event()
        self._size = 0
        self._sent = 0

    def offer(self) -> dict[str, Any]:
        if not self.place.is_source:
            return {}
        self.transport.serve(_UNICAST, self._serve, deadline_s=3600.0)
        return {"size": self.place.blob.stat().st_size}

    def know(self, source: dict[str, Any]) -> None:
        self._size = source["size"]

    async def start(self, timeout_s: float) -> Path | None:
        if self.place.is_source:
            return None
        path = self.place.folder / "blob"
        async with asyncio.timeout(timeout_s):
            stream = await self.transport.open_stream(self.ids[0], _UNICAST)
            await stream.send(b"all")
            await self._receive(stream, path)
        return path

    async def _receive(self, stream: Stream, path: Path) -> None:
        sha, missing = hashlib.sha256(), self._size
        with path.open("wb") as file:
            while missing > 0:
                data = await stream.receive()
                sha.update(data)
                file.write(data)
                missing -= len(data)
        await stream.close()

    async def _serve(self, stream: Stream) -> None:
        await stream.receive()
        with self.place.blob.open("rb") as file:
            while data := file.read(_FRAME_BYTES):
                now_s = asyncio.get_running_loop().time()
                self._limit.take(len(data), now_s)
                await asyncio.sleep(self._limit.delay_s(now_s))
                await stream.send(data)
                self._sent += len(data)
        # Closed by the receiver once it has all: what still lies in queues must not be cut off.
        await stream.receive()

    async def report(self) -> dict[str, Any]:
        return {"sent_bytes": self._sent}
