"""Whom chunks may be asked of, over all blobs: who has one, who is at a cap, who failed and who lied.

    willing(root) --> peers to open a stream to now --> opened, closed --> failed | succeeded

A peer that sent what it must not is not used for that blob again; one that is gone, late or hit a bug of ours
is tried again with growing waits. Not for choosing chunks: `schedule.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from cachetools import FIFOCache

from node.peers.backoff import Backoff
from node.runtime import Runtime
from node.transport.limits import FirstTimes
from protocol.errors import DeadlineError, RemoteProtocolError, TransportError
from protocol.messages import Digest, PeerId

__all__ = ["Suppliers"]

logger = logging.getLogger(__name__)

_STREAMS_PER_PEER = 4
"""Blobs that one peer is asked for at a time: half of the streams that it allows us."""
_REMEMBERED = 4096
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0


class Suppliers:
    """`providers(root)` lists peers that may have a blob; `failed(peer, reason)` hears what peers do wrong.
    `own_id` is never asked."""

    def __init__(
        self,
        runtime: Runtime,
        own_id: PeerId,
        providers: Callable[[Digest], Sequence[PeerId]],
        failed: Callable[[PeerId, str], None],
    ) -> None:
        self._runtime = runtime
        self._own_id = own_id
        self._providers = providers
        self._failed = failed
        self._streams: Counter[PeerId] = Counter()
        self._bans: FIFOCache[tuple[Digest, PeerId], bool] = FIFOCache(_REMEMBERED)
        self._retries: Backoff[tuple[Digest, PeerId]] = Backoff(
            _RETRY_S, _MAX_RETRY_S, max_keys=_REMEMBERED, jitter_rng=runtime.rng
        )
        self._bugs = FirstTimes()

    def willing(self, root: Digest) -> list[PeerId]:
        """Peers that may be asked for this blob now, in random order."""
        now_s = self._runtime.monotonic_s()
        peers = [
            peer_id
            for peer_id in self._providers(root)
            if peer_id != self._own_id
            and (root, peer_id) not in self._bans
            and self._streams[peer_id] < _STREAMS_PER_PEER
            and not self._retries.ready_in_s((root, peer_id), now_s)
        ]
        self._runtime.rng.shuffle(peers)
        return peers

    def opened(self, peer_id: PeerId) -> None:
        """A stream to this peer is being opened."""
        self._streams[peer_id] += 1

    def closed(self, peer_id: PeerId) -> None:
        """A stream to this peer is gone."""
        self._streams[peer_id] -= 1
        if not self._streams[peer_id]:
            del self._streams[peer_id]

    def succeeded(self, root: Digest, peer_id: PeerId) -> None:
        """The peer delivered, or has nothing of this blob yet: it is worth asking again soon."""
        self._retries.succeeded((root, peer_id))

    def failed(self, root: Digest, peer_id: PeerId, error: Exception, lived_s: float) -> None:
        """A session ended by this error after so many seconds."""
        match error:
            case RemoteProtocolError():
                self._bans[root, peer_id] = True
                self._failed(peer_id, error.reason)
                return
            case DeadlineError():
                self._failed(peer_id, "deadline")
            case TransportError():
                pass
            case _:
                # What nobody foresaw is a bug of ours: counted each time, told the first time.
                self._failed(peer_id, "handler")
                kind = type(error).__name__
                if self._bugs.is_new(kind):
                    message = "an exchange of chunks failed; that stream is closed: %s"
                    logger.warning(message, kind, exc_info=error)
        if lived_s > _MAX_RETRY_S:
            self._retries.succeeded((root, peer_id))
        self._retries.failed((root, peer_id), self._runtime.monotonic_s())
