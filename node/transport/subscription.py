"""One reader's view of a gossip topic: what passes from any network to its queue.

Checked in order of cost and before any decoding: not our own, token bucket of the sender, size. What fails
is dropped and counted against the sender. Not for signatures and replays: `node/share/gossip.py` opens the
envelopes.
"""

from __future__ import annotations

import asyncio
from collections import deque

from node.transport.base import Gossiped, TransportLimits
from node.transport.limits import Refusals
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.messages import PeerId

__all__ = ["Subscription"]


class Subscription:
    """A topic's messages for one reader, an async iterator, behind size cap and token buckets.

    The queue is bounded in number and bytes; when full the oldest is dropped. Offering never waits: a slow
    reader slows nobody but itself.
    """

    def __init__(self, topic: str, own_peer_id: PeerId, limits: TransportLimits, refusals: Refusals) -> None:
        self.topic = topic
        self._own_peer_id = own_peer_id
        self._limits = limits
        self._refusals = refusals
        self._buckets = limits.buckets(limits.messages_per_s, limits.message_burst)
        self._messages: deque[Gossiped] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closed = False

    def offer(self, sender: PeerId, data: bytes, now_s: float) -> None:
        """Queue a message, or drop and count it. The oldest ones make room, counted as `queue`."""
        if sender == self._own_peer_id:
            return
        if not self._buckets.take(sender, now_s):
            self._refusals.add(sender, "rate")
            return
        if len(data) > MAX_ENVELOPE_BYTES:
            self._refusals.add(sender, "oversize")
            return
        self._messages.append(Gossiped(sender, data))
        self._bytes += len(data)
        while len(self._messages) > self._limits.queue_messages or self._bytes > self._limits.queue_bytes:
            self._refusals.add(self._take().sender, "queue")
        self._arrived.set()

    def close(self) -> None:
        """End the iteration once the queue is empty."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Gossiped:
        while not self._messages:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._take()

    def _take(self) -> Gossiped:
        message = self._messages.popleft()
        self._bytes -= len(message.data)
        return message
