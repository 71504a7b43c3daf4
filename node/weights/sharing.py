"""What weights travel by on one node: its store of blobs, the exchange of their chunks, the chains it knows,
and the neighbours that may have them.

For: wiring these to one transport, once, for whoever publishes (`publish.py`), follows (`follow/`) or merges
(`merge/`); saying who is asked for a blob; and telling how they do (`seen`). What is published or followed is
not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.config import BroadcastConfig
from node.events import BlobStatus, WeightsSeen
from node.membership import Membership
from node.network import Network
from node.peers.book import PeerBook
from node.runtime import Runtime
from node.state.paths import Home
from node.supervise import StageGauge
from node.weights.chain.chains import Chains
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.store import WeightsStore
from protocol.messages import Digest, Lineage, PeerId

__all__ = ["WeightsSharing"]

GIB = 2**30


class WeightsSharing:
    """Serves blobs and chains from the start, over the transport of `network`. `peers` counts what peers do
    wrong."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        network: Network,
        peers: PeerBook,
        settings: BroadcastConfig,
        home: Home,
    ) -> None:
        self.network = network
        self.peers = peers
        self.settings = settings
        self.home = home
        self.gauge = StageGauge("broadcast", runtime.clock, "a new version")
        """Shows what the stage that moves weights does, whoever does it."""
        self.store = WeightsStore(home.weights, int(settings.keep_gib * GIB))
        self.exchange = Exchange(
            runtime,
            network.transport,
            self.store,
            providers=self.providers,
            failed=peers.refused,
            upload_mbit=settings.upload_mbit,
            download_mbit=settings.download_mbit,
        )
        self.chains = Chains(network.transport, membership.swarm_id, home.chain)
        self._runtime = runtime
        self._more_providers: list[Callable[[Digest], Sequence[PeerId]]] = []

    @property
    def lineage(self) -> Lineage | None:
        """Whose weights this node has, as its record says: its own, or those of the owner that it follows;
        None while there is none."""
        return self.network.presence.lineage

    def members(self) -> list[PeerId]:
        """Connected peers that have the weights of `lineage`: its owner and who follows it."""
        return self.network.members_of(self.lineage)

    def providers(self, root: Digest) -> list[PeerId]:
        """Connected peers that may have a blob."""
        more = (peer_id for providers in self._more_providers for peer_id in providers(root))
        return list(dict.fromkeys((*self.members(), *more)))

    def ask_also(self, providers: Callable[[Digest], Sequence[PeerId]]) -> None:
        """From now on those that `providers(root)` names may have a blob, too."""
        self._more_providers.append(providers)

    def seen(self, owner: PeerId, policy_version: int, head: int, followers: int) -> WeightsSeen:
        """The snapshot for the screen."""
        return WeightsSeen(
            at=self._runtime.now_ms(),
            owner=owner,
            policy_version=policy_version,
            head=head,
            followers=followers,
            sent_bytes=sum(self.exchange.uploaded.values()),
            received_bytes=sum(self.exchange.downloaded.values()),
            blobs=tuple(
                BlobStatus(
                    chunks=blob.chunks, have=blob.have, peers=blob.peers, bytes_per_s=blob.down_bytes_per_s
                )
                for blob in self.exchange.progress()
            ),
        )
