"""One reader's view of a gossip topic: what passes from any network to its queue.

Checked in order of cost and before any decoding: not our own, token bucket of the sender, size. What fails
is dropped and counted against the sender. Not for signatures and replays: `node/share/gossip.py` opens the
envelopes.
"""

from __future__ import annotations

import asyncio
from collections import deque

from node.transport.base import Gossiped, TransportLimits
from node.transport.limits import KeyedTokenBuckets, Refusals
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.messages import PeerId

__all__ = ["DropOldestQueue", "Subscription"]


class Subscription:
    """A bounded queue of a topic's messages behind size cap and token buckets."""

    def __init__(self, topic: str, own_peer_id: PeerId, limits: TransportLimits, refusals: Refusals) -> None:
        self.topic = topic
        self.queue = DropOldestQueue(limits.queue_messages, limits.queue_bytes, refusals)
        self._own_peer_id = own_peer_id
        self._refusals = refusals
        self._buckets = KeyedTokenBuckets(
            limits.messages_per_s,
            limits.message_burst,
            newcomers_per_s=limits.newcomers_per_s,
            newcomer_burst=limits.newcomer_burst,
        )

    def offer(self, sender: PeerId, data: bytes, now_s: float) -> None:
        """Queue a message, or drop and count it."""
        if sender == self._own_peer_id:
            return
        if not self._buckets.take(sender, now_s):
            self._refusals.add(sender, "rate")
        elif len(data) > MAX_ENVELOPE_BYTES:
            self._refusals.add(sender, "oversize")
        else:
            self.queue.put(Gossiped(sender, data))


class DropOldestQueue:
    """Gossip messages for one reader, bounded in number and bytes; when full the oldest is dropped.

    The reader is an async iterator. Putting never waits: a slow reader slows nobody but itself.
    """

    def __init__(self, max_messages: int, max_bytes: int, refusals: Refusals) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._refusals = refusals
        self._messages: deque[Gossiped] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, message: Gossiped) -> None:
        """Add a message, dropping the oldest ones (counted as `queue`) to make room."""
        self._messages.append(message)
        self._bytes += len(message.data)
        while len(self._messages) > self._max_messages or self._bytes > self._max_bytes:
            dropped = self._messages.popleft()
            self._bytes -= len(dropped.data)
            self._refusals.add(dropped.sender, "queue")
        self._arrived.set()

    def close(self) -> None:
        """End the iteration once the queue is empty."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> DropOldestQueue:
        return self

    async def __anext__(self) -> Gossiped:
        while not self._messages:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        self._bytes -= len(message.data)
        return message
