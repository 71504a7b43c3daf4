"""One reader's view of a gossip topic: what passes from any network to its queue.

Checked in order of cost and before any decoding: not our own, token bucket of the sender, size. What fails
is dropped and counted against the sender. Not for signatures and replays: `node/share/gossip.py` opens the
envelopes.
"""

from __future__ import annotations

from node.transport.base import Gossiped, TransportLimits
from node.transport.limits import DropOldestQueue, KeyedTokenBuckets, Refusals
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.messages import PeerId

__all__ = ["Subscription"]


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
