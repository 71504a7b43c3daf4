"""Exchange of blobs in chunks between peers: every node takes what it wants and gives what it has (D8).

Participants: the node that made a blob, nodes that want it, and strangers. Goals: the time to reach n nodes
is near size / bandwidth, and the source sends little more than one copy; any node may vanish or join at any
time; no byte is kept or passed on before its hash matched; every wait ends; a blob is never in memory as a
whole. Non-goals: what blobs mean, which of them to fetch, and who is believed to have them.

    fetch --> Download (one per blob) --streams--> other nodes' Uploads
    others' streams --> Uploads --> StoredBlob
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.compute import Lane
from node.runtime import Runtime
from node.transport.base import Transport
from node.weights.exchange.download import Download
from node.weights.exchange.rate import RateLimit, tally
from node.weights.exchange.store import StoredBlob, WeightsStore
from node.weights.exchange.suppliers import Suppliers
from node.weights.exchange.upload import SESSION_S, Uploads
from protocol.errors import DeadlineError, LocalProtocolError
from protocol.messages import ChunkedBlob, Digest, PeerId
from protocol.topics import CHUNKS_PROTOCOL

__all__ = ["BlobProgress", "Exchange"]


@dataclass(frozen=True, slots=True)
class BlobProgress:
    """How far one fetch is: chunks in all and here, peers connected for it, and its rate."""

    root: Digest
    chunks: int
    have: int
    peers: int
    down_bytes_per_s: float


@dataclass(slots=True)
class _Running:
    download: Download
    task: asyncio.Task[StoredBlob]
    waiting: int = 0


class Exchange:
    """A node's exchange of blobs. `providers(root)` lists peers that may have a blob, and is asked every
    second; `failed(peer, reason)` hears what peers do wrong. Caps in Mbit/s (0: none) hold over all blobs."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        store: WeightsStore,
        *,
        providers: Callable[[Digest], Sequence[PeerId]],
        failed: Callable[[PeerId, str], None],
        upload_mbit: float = 0.0,
        download_mbit: float = 0.0,
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._store = store
        self._suppliers = Suppliers(runtime, transport.peer_id, providers, failed)
        self._download_limit = RateLimit(download_mbit)
        self._uploads = Uploads(runtime, store, RateLimit(upload_mbit), failed)
        self.uploaded = self._uploads.uploaded
        """Bytes of chunks sent, by the peer that took them."""
        self._downloaded: Counter[PeerId] = Counter()
        self._running: dict[Digest, _Running] = {}
        transport.serve(CHUNKS_PROTOCOL, self._uploads.serve, deadline_s=SESSION_S + 60)

    @property
    def downloaded(self) -> Counter[PeerId]:
        """Bytes of verified chunks, by the peer that sent them."""
        total = self._downloaded.copy()
        for running in self._running.values():
            total.update(running.download.downloaded)
        return total

    async def fetch(self, blob: ChunkedBlob, timeout_s: float) -> StoredBlob:
        """The blob, complete and durable, from whoever has it; begins with what the store has. Raises
        DeadlineError after `timeout_s`, DecodeError or LimitError (blob_size) for a description that nobody
        should have signed, OurFault when the disk does not take it. What arrived stays for the next
        attempt."""
        self._store.require_small(blob)
        stored = self._store.get(blob.root)
        if stored is not None and stored.complete and blob.root not in self._running:
            await self._runtime.run(Lane.DISK, stored.seal)
            return stored
        running = self._running.get(blob.root)
        if running is None:
            running = self._running[blob.root] = self._start(blob)
        running.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(running.task)
        except TimeoutError:
            download = running.download
            raise DeadlineError(
                f"fetching blob {blob.root[:12]} ({download.have} of {download.count} chunks, "
                f"{len(download.sessions)} peers)",
                timeout_s,
            ) from None
        finally:
            running.waiting -= 1
            if not running.waiting:
                if self._running.get(blob.root) is running:
                    del self._running[blob.root]
                running.task.cancel()
                await asyncio.gather(running.task, return_exceptions=True)
                for peer_id, count in running.download.downloaded.items():
                    tally(self._downloaded, peer_id, count)

    def seed(self, root: Digest) -> None:
        """A blob made here is about to be asked for by many: give each chunk to one of them first. Raises
        LocalProtocolError when it is not here as a whole."""
        stored = self._store.get(root)
        if stored is None or not stored.complete:
            raise LocalProtocolError(f"blob {root[:12]} cannot be seeded: it is not here as a whole")
        self._uploads.seed(stored)

    def progress(self) -> tuple[BlobProgress, ...]:
        """Every fetch that runs now."""
        now_s = self._runtime.monotonic_s()
        return tuple(
            BlobProgress(
                root=root,
                chunks=running.download.count,
                have=running.download.have,
                peers=len(running.download.sessions),
                down_bytes_per_s=running.download.flow.bytes_per_s(now_s),
            )
            for root, running in self._running.items()
        )

    def _start(self, blob: ChunkedBlob) -> _Running:
        download = Download(
            self._runtime,
            blob,
            self._transport,
            self._store,
            self._suppliers,
            self._download_limit,
            self._uploads.arrived_here,
        )
        return _Running(download, asyncio.create_task(download.run()))
