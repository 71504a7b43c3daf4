"""A node's place in the swarm: gossip, the groups it serves, and who is there, wired to one transport.

For: what a trainer and a follower have in common towards peers. Data in: own groups to publish; data out:
announcements of others (`gossip.heard()`), neighbours and their records (`presence`). Not for: what is done
with peers' groups (`node/share/collect.py`, `node/verify`), nor for weights (`node/broadcast`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from node.clock import Clock
from node.config import NodeConfig
from node.events import NoticeLevel
from node.peers.presence import Presence
from node.share.gossip import Gossip, GossipLimits
from node.share.publish import Publisher
from node.state.stores import ReplayGuard, SequenceSource
from node.transport.base import Transport
from protocol.identity import Identity
from protocol.messages import Charter, Digest, Lineage, PeerId, PeerRecord

__all__ = ["Network"]


class Network:
    """Wires at once; `stages` are the loops that make it live. The node that made it closes the transport."""

    def __init__(
        self,
        config: NodeConfig,
        transport: Transport,
        identity: Identity,
        charter: Charter,
        clock: Clock,
        *,
        sequence: SequenceSource,
        replay: ReplayGuard,
        rng: random.Random,
        record: Callable[[], PeerRecord],
        refused: Callable[[PeerId, str], None],
        notice: Callable[[NoticeLevel, str], None],
    ) -> None:
        """`record` is this node's own; `refused(peer, reason)` counts; `notice(level, text)` tells."""
        self.transport = transport
        self._peer_id = identity.peer_id
        self.gossip = Gossip(
            transport,
            identity,
            charter,
            clock,
            sequence.next,
            replay=replay,
            limits=GossipLimits(reconcile_interval_s=config.network.reconcile_s),
            rng=rng,
        )
        self.publisher = Publisher(transport, self.gossip, charter)
        self.presence = Presence(
            transport,
            identity,
            charter,
            clock,
            record=record,
            next_sequence=sequence.next,
            bootstraps=config.network.bootstraps,
            refused=refused,
            notice=notice,
        )

    def stages(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Loops that run for as long as the node does."""
        return {"gossip": self.gossip.run(), "presence": self.presence.run()}

    def refusals(self) -> Counter[tuple[PeerId, str]]:
        """What was refused below verification, by peer and reason."""
        found = Counter(self.transport.counters())
        found.update(self.gossip.counters())
        return found

    def members_of(self, lineage: Lineage | None) -> list[PeerId]:
        """Connected peers that said to have this lineage's weights: its owner and who follows it. Sorted, so
        that simulations repeat."""
        if lineage is None:
            return []
        known = self.presence.known
        return sorted(
            peer_id
            for peer_id in self.presence.connected
            if peer_id in known and known[peer_id].lineage == lineage
        )

    def trainers_of(self, base_model: Digest) -> list[PeerId]:
        """Connected peers that said to train a policy which began with this base model. Sorted."""
        known = self.presence.known
        return sorted(
            peer_id
            for peer_id in self.presence.connected
            if peer_id in known
            and (lineage := known[peer_id].lineage) is not None
            and (lineage.owner, lineage.base_model) == (peer_id, base_model)
        )
