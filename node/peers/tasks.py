"""Tasks in files between members: who joins asks a member for what the charter pins, and checks the hash.

    joiner                         member
      TaskRequest(digest) --------->   only blobs of its own charter
      <--------- TaskReply(size), frames of PIECE_BYTES

Before the node is open there is one peer, the one whose charter was agreed on, so this is a plain download
and no exchange of chunks; a blob has 32 MiB at most, and a member gives it to one peer a few times only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from cachetools import FIFOCache

from node.transport.base import Stream, Transport
from protocol.codec import decode, digest, encode
from protocol.constants import MAX_TASK_BYTES
from protocol.errors import DeadlineError, LimitError, RemoteProtocolError, TransportError
from protocol.messages import Digest, PeerId
from protocol.tasks import PIECE_BYTES, TaskReply, TaskRequest
from protocol.topics import TASK_PROTOCOL

__all__ = ["fetch_task", "serve_tasks"]

MAX_MESSAGE_BYTES = 256
FETCH_TIMEOUT_S = 600.0
COPIES = 8
"""Times one peer is given tasks."""
AT_ONCE = 2
"""Peers that are given one at a time; others are told that there is none, and ask again or elsewhere."""
_REMEMBERED = 4096


async def fetch_task(
    transport: Transport, peer_id: PeerId, name: Digest, tell: Callable[[int, int], None]
) -> bytes:
    """The blob `name` from `peer_id`, its hash checked; `tell` hears of bytes that came, and of all. Raises
    TransportError, also for a peer that has not got it."""
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            return await _fetch(transport, peer_id, name, tell)
    except TimeoutError:
        raise DeadlineError(f"fetching the task {name[:12]} from {peer_id}", FETCH_TIMEOUT_S) from None
    except RemoteProtocolError as error:
        raise TransportError(f"{peer_id} does not give the task {name[:12]}: {error}") from error


async def _fetch(
    transport: Transport, peer_id: PeerId, name: Digest, tell: Callable[[int, int], None]
) -> bytes:
    stream = await transport.open_stream(peer_id, TASK_PROTOCOL)
    try:
        await stream.send(encode(TaskRequest(name)))
        data = await stream.receive(max_bytes=MAX_MESSAGE_BYTES)
        size = decode(data, TaskReply, max_bytes=MAX_MESSAGE_BYTES).size
        if not 0 < size <= MAX_TASK_BYTES:
            raise LimitError(f"it has {size} bytes; 0 is none, {MAX_TASK_BYTES} the cap", reason="size")
        blob = bytearray()
        while len(blob) < size:
            blob += await stream.receive(max_bytes=min(PIECE_BYTES, size - len(blob)))
            tell(len(blob), size)
    finally:
        await stream.close()
    if digest(bytes(blob)) != name:
        raise LimitError("its bytes have another hash than the charter pins", reason="hash")
    return bytes(blob)


def serve_tasks(
    transport: Transport, wanted: Mapping[str, Digest], blob_of: Callable[[Digest], Awaitable[bytes | None]]
) -> None:
    """Give the blobs of `wanted` to whoever asks. `blob_of` reads one, None where it is gone."""
    names = frozenset(wanted.values())
    given: FIFOCache[PeerId, int] = FIFOCache(_REMEMBERED)
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(stream: Stream) -> None:
        data = await stream.receive(max_bytes=MAX_MESSAGE_BYTES)
        name = decode(data, TaskRequest, max_bytes=MAX_MESSAGE_BYTES).digest
        if given.get(stream.peer_id, 0) >= COPIES:
            raise LimitError(f"{COPIES} tasks were given already", reason="task_copies")
        blob = None
        if name in names and not room.locked():
            async with room:
                blob = await blob_of(name)
                if blob is not None:
                    given[stream.peer_id] = given.get(stream.peer_id, 0) + 1
                    await stream.send(encode(TaskReply(len(blob))))
                    for start in range(0, len(blob), PIECE_BYTES):
                        await stream.send(blob[start : start + PIECE_BYTES])
        if blob is None:
            await stream.send(encode(TaskReply(0)))

    transport.serve(TASK_PROTOCOL, answer, deadline_s=FETCH_TIMEOUT_S)
