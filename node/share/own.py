"""Own groups go to peers for as long as this node may share.

    rollout stage --publish(group, body)--> may we? --> evidence of the own verifier --> `share/publish.py`

Not for how a group is announced and served (`publish.py`), nor for why a node shares nothing any more
(`node/weights/engine_sync.py`, `node/weights/follow/probe.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from node.share.accepted import Accepted
from node.share.publish import GroupPublisher

__all__ = ["OwnSharing", "Publish", "Sharing", "keep_to_oneself"]

Publish = Callable[[Accepted, bytes], Awaitable[None]]
"""Gets an own group and its encoded bytes."""


class Sharing(Protocol):
    """Why this node shares nothing more, "" while it does."""

    @property
    def not_sharing(self) -> str: ...


async def keep_to_oneself(own: Accepted, body: bytes) -> None:
    """What a node without a network does with its groups."""


@dataclass(frozen=True)
class OwnSharing:
    """Publishes own groups by `publisher`; `observe` is told of each first, so that copies of it are seen."""

    publisher: GroupPublisher
    sharing: Sharing
    observe: Callable[[Accepted], None] = lambda own: None

    async def publish(self, own: Accepted, body: bytes) -> None:
        """Announce this group and serve its body, unless this node must not share."""
        if not self.sharing.not_sharing:
            self.observe(own)
            await self.publisher.publish(own, body)
