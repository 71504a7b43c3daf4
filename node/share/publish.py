"""Own groups go out: a signed announcement for every slot, the body served over streams.

Every answered slot is announced (D4). Groups with mixed rewards carry a body; groups whose rewards are all
alike teach nothing and travel as a receipt only, so leaving them out is not mistaken for picking the lucky
ones. `publish` consumes scored groups from the rollout worker; `serve_blob` answers collectors.
"""

from __future__ import annotations

from collections import OrderedDict

from node.share.gossip import Gossip
from node.transport.base import Stream, Transport
from protocol.codec import completions_digest, decode, digest, encode
from protocol.constants import MAX_BLOB_BYTES, MAX_FRAME_BYTES
from protocol.errors import LocalProtocolError
from protocol.messages import Announcement, BlobRef, BlobReply, BlobRequest, Digest, RolloutGroup
from protocol.topics import BLOB_PROTOCOL

__all__ = ["Publisher", "announce"]


def announce(group: RolloutGroup) -> tuple[Announcement, bytes | None]:
    """The announcement of a scored group, and its body when the rewards differ.

    Raises LocalProtocolError when the body is above MAX_BLOB_BYTES.
    """
    rewards = tuple(rollout.reward for rollout in group.rollouts)
    body = encode(group) if len(set(rewards)) > 1 else None
    if body is not None and len(body) > MAX_BLOB_BYTES:
        raise LocalProtocolError(f"group body of {len(body)} bytes is above the cap of {MAX_BLOB_BYTES}")
    announcement = Announcement(
        lineage=group.lineage,
        policy_version=group.policy_version,
        prompt=group.prompt,
        completions=completions_digest(group.rollouts),
        rewards=rewards,
        body=BlobRef(digest=digest(body), size=len(body)) if body is not None else None,
    )
    return announcement, body


class Publisher:
    """Announces own groups and serves their bodies; keeps the newest `keep_bodies` of them."""

    def __init__(self, transport: Transport, gossip: Gossip, *, keep_bodies: int, ttl_ms: int) -> None:
        self._gossip = gossip
        self._ttl_ms = ttl_ms
        self._keep_bodies = keep_bodies
        self._bodies: OrderedDict[Digest, bytes] = OrderedDict()
        self.announced = 0
        self.bodies_served = 0
        transport.serve(BLOB_PROTOCOL, self.serve_blob)

    async def publish(self, group: RolloutGroup) -> Announcement:
        """Announce a scored group."""
        announcement, body = announce(group)
        await self.offer(announcement, body)
        return announcement

    async def offer(self, announcement: Announcement, body: bytes | None) -> None:
        """Announce as given and serve `body` under the announced digest."""
        if announcement.body is not None and body is not None:
            self._bodies[announcement.body.digest] = body
            while len(self._bodies) > self._keep_bodies:
                self._bodies.popitem(last=False)
        await self._gossip.announce(announcement, self._ttl_ms)
        self.announced += 1

    async def serve_blob(self, stream: Stream) -> None:
        """One request, one blob: its size, then the bytes in frames."""
        request = decode(await stream.receive(max_bytes=1024), BlobRequest, max_bytes=1024)
        body = self._bodies.get(request.digest, b"")
        await stream.send(encode(BlobReply(size=len(body))))
        for start in range(0, len(body), MAX_FRAME_BYTES):
            await stream.send(body[start : start + MAX_FRAME_BYTES])
        self.bodies_served += bool(body)
