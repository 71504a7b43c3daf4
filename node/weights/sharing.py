"""How weights travel on one node: its store of blobs, the exchange of their chunks, and the chains it knows.

For: wiring these to one transport, once, for whichever role; and telling how they do (`seen`). What is
published or followed with them is `owner.py`'s and `node/follower.py`'s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from node.clock import Clock
from node.compute import Compute, Lane
from node.config import BroadcastConfig
from node.events import BlobStatus, WeightsSeen
from node.state.paths import Home
from node.transport.base import Transport
from node.weights.chain.chains import Chains
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.store import WeightsStore
from protocol.messages import Digest, PeerId

__all__ = ["WeightsSharing"]

GIB = 2**30


class WeightsSharing:
    """`providers(root)` are connected peers that may have a blob; `refused(peer, reason)` counts what peers
    do wrong."""

    def __init__(
        self,
        config: BroadcastConfig,
        home: Home,
        transport: Transport,
        swarm_id: Digest,
        *,
        providers: Callable[[Digest], Sequence[PeerId]],
        refused: Callable[[PeerId, str], None],
        clock: Clock,
        compute: Compute,
        rng: random.Random,
    ) -> None:
        self._clock = clock
        self.store = WeightsStore(home.weights, int(config.keep_gib * GIB))
        self.exchange = Exchange(
            transport,
            self.store,
            providers=providers,
            failed=refused,
            clock=clock,
            rng=rng,
            upload_mbit=config.upload_mbit,
            download_mbit=config.download_mbit,
            run_blocking=lambda function, *args: compute.run(Lane.DISK, function, *args),
        )
        self.chains = Chains(transport, swarm_id, home.chain)

    def close(self) -> None:
        """Let the files go."""
        self.store.close()

    def seen(self, owner: PeerId, policy_version: int, head: int, followers: int) -> WeightsSeen:
        """The snapshot for the screen."""
        return WeightsSeen(
            at=self._clock.now_ms(),
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
