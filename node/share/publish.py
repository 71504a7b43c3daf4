"""Own groups go out: a signed announcement for every slot, the body served over streams.

Every answered slot is announced, and its receipt can be answered: with the body, or with any one rollout and
its proof, for as long as the charter says (D4). Groups whose rewards are all alike teach nothing and are
fetched by nobody who only learns; that they can be asked for keeps their receipts from proving nothing.
`publish` consumes scored groups from the rollout stage; `serve_blob` and `serve_rollout` answer others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from node.membership import Membership
from node.share.accepted import Accepted
from node.share.gossip import Gossip
from node.transport.base import Stream, Transport
from protocol.codec import decode, encode
from protocol.constants import MAX_BLOB_BYTES, MAX_FRAME_BYTES, MAX_RECEIPT_BYTES
from protocol.errors import LocalProtocolError
from protocol.messages import (
    Announcement,
    BlobRef,
    BlobReply,
    BlobRequest,
    Digest,
    MemberToken,
    RolloutGroup,
    RolloutReply,
    RolloutRequest,
)
from protocol.receipts import prove, slot_digest
from protocol.topics import BLOB_PROTOCOL, ROLLOUT_PROTOCOL

__all__ = ["GroupPublisher", "announce"]


def announce(
    group: RolloutGroup, body: BlobRef, *, pin: str = "", token: MemberToken | None = None
) -> Announcement:
    """The announcement of a scored group whose encoded bytes are `body`. `pin` is the code that it was scored
    with, `token` the author's in a closed swarm.

    Raises LocalProtocolError when the body is above MAX_BLOB_BYTES.
    """
    if body.size > MAX_BLOB_BYTES:
        raise LocalProtocolError(f"group body of {body.size} bytes is above the cap of {MAX_BLOB_BYTES}")
    return Announcement(
        lineage=group.lineage,
        policy_version=group.policy_version,
        mean_version=group.mean_version,
        oldest_version=group.oldest_version,
        prompt=group.prompt,
        completions=slot_digest(group.author, group.lineage, group.prompt, group.rollouts),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        body=body,
        pin=pin,
        commitment=group.commitment,
        token=token,
    )


@dataclass(frozen=True, slots=True)
class _Offer:
    window: int
    completions: Digest
    body: bytes


class GroupPublisher:
    """Announces own groups and serves their bodies until `receipt_windows` after their own, and never more
    than `max_bytes` of them: then the oldest go first."""

    def __init__(
        self,
        membership: Membership,
        transport: Transport,
        gossip: Gossip,
        *,
        max_bytes: int = MAX_RECEIPT_BYTES,
    ) -> None:
        charter = membership.charter
        self._membership = membership
        self._gossip = gossip
        self._ttl_ms = (charter.rules.max_age_windows + 1) * charter.window_ms
        self._receipt_windows = charter.receipt_windows
        self._max_bytes = max_bytes
        self._offers: OrderedDict[Digest, _Offer] = OrderedDict()
        self._bodies: dict[Digest, Digest] = {}
        """Digest of the body behind each receipt."""
        self._bytes = 0
        self.announced = 0
        self.bodies_served = 0
        transport.serve(BLOB_PROTOCOL, self.serve_blob)
        transport.serve(ROLLOUT_PROTOCOL, self.serve_rollout)

    async def publish(self, own: Accepted, body: bytes) -> Announcement:
        """Announce a scored group of this node; `body` is the group encoded."""
        announcement = announce(
            own.group,
            BlobRef(digest=own.digest, size=len(body)),
            pin=self._membership.pin(own.group.prompt),
            token=self._membership.token,
        )
        await self.offer(announcement, body)
        return announcement

    async def offer(self, announcement: Announcement, body: bytes) -> None:
        """Announce as given and serve `body` under the announced digest."""
        self._keep(announcement, body)
        await self._gossip.announce(announcement, self._ttl_ms)
        self.announced += 1

    async def serve_blob(self, stream: Stream) -> None:
        """One request, one blob: its size, then the bytes in frames."""
        request = decode(await stream.receive(max_bytes=1024), BlobRequest, max_bytes=1024)
        offer = self._offers.get(request.digest)
        body = offer.body if offer is not None else b""
        await stream.send(encode(BlobReply(size=len(body))))
        for start in range(0, len(body), MAX_FRAME_BYTES):
            await stream.send(body[start : start + MAX_FRAME_BYTES])
        self.bodies_served += bool(body)

    async def serve_rollout(self, stream: Stream) -> None:
        """One request, one rollout of a receipt with its proof."""
        request = decode(await stream.receive(max_bytes=1024), RolloutRequest, max_bytes=1024)
        await stream.send(encode(self._one_rollout(request)))

    def _one_rollout(self, request: RolloutRequest) -> RolloutReply:
        offer = self._offers.get(self._bodies.get(request.completions, ""))
        if offer is None:
            return RolloutReply(rollout=None, path=b"")
        rollouts = decode(offer.body, RolloutGroup, max_bytes=MAX_BLOB_BYTES).rollouts
        if request.index >= len(rollouts):
            return RolloutReply(rollout=None, path=b"")
        return RolloutReply(rollout=rollouts[request.index], path=prove(rollouts, request.index))

    def _keep(self, announcement: Announcement, body: bytes) -> None:
        window, digest_ = announcement.prompt.window, announcement.body.digest
        if digest_ not in self._offers:
            self._offers[digest_] = _Offer(window, announcement.completions, body)
            self._bodies[announcement.completions] = digest_
            self._bytes += len(body)
        while self._offers:
            oldest, offer = next(iter(self._offers.items()))
            if offer.window + self._receipt_windows >= window and self._bytes <= self._max_bytes:
                return
            del self._offers[oldest]
            self._bodies.pop(offer.completions, None)
            self._bytes -= len(offer.body)
