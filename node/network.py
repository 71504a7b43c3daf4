"""A node's place in the swarm: gossip, the groups it serves, and who is there, wired to one transport.

For: what a trainer and a follower have in common towards peers. Data in: own groups to publish; data out:
announcements of others (`gossip.heard()`), neighbours and their records (`presence`). Not for: what is done
with peers' groups (`node/share/collect.py`, `node/verify`), nor for weights (`node/weights`).
"""

from __future__ import annotations

import functools

from node.compute import Lane
from node.config import NodeConfig
from node.events import NoticeLevel
from node.membership import Membership
from node.peers.book import PeerBook
from node.peers.presence import Presence
from node.peers.tasks import serve_tasks
from node.peers.twin import TwinWatch
from node.runtime import Runtime
from node.share.gossip import Gossip, GossipLimits
from node.share.publish import GroupPublisher
from node.state.paths import Home
from node.state.stores import ReplayGuard, SequenceSource
from node.state.tasks import kept_blob
from node.supervise import run_endless
from node.transport.base import Transport
from protocol.messages import Digest, Lineage, PeerId
from protocol.tasks import wanted

__all__ = ["Network"]


class Network:
    """Wires at once; `run` makes it live. The node that made it closes the transport."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        peers: PeerBook,
        transport: Transport,
        config: NodeConfig,
        *,
        sequence: SequenceSource,
        replay: ReplayGuard,
    ) -> None:
        self._runtime = runtime
        self.transport = transport
        self.gossip = Gossip(
            runtime,
            membership,
            peers,
            transport,
            sequence,
            replay=TwinWatch(runtime, membership, peers, sequence, replay),
            limits=GossipLimits(reconcile_interval_s=config.network.reconcile_s),
        )
        self.publisher = GroupPublisher(membership, transport, self.gossip)
        blob_of = functools.partial(runtime.run, Lane.DISK, kept_blob, Home(config.home))
        serve_tasks(transport, wanted(membership.charter.environments), blob_of)
        self.presence = Presence(
            runtime,
            membership,
            peers,
            transport,
            sequence,
            name=config.name,
            bootstraps=config.network.bootstraps,
        )

    async def run(self) -> None:
        """Gossip and keep up with neighbours until cancelled."""
        if why := self.transport.dials_unguarded:
            text = f"the network daemon may dial what strangers announce ({why}); a firewall can stop it"
            self._runtime.notice(NoticeLevel.WARNING, text)
        await run_endless(gossip=self.gossip.run(), presence=self.presence.run())

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
