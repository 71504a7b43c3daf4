"""One identity that runs twice: the same key on two machines, or in a copied home.

    envelopes signed by this node's own key --> TwinWatch --> a notice, once, and a count

Both answer the same slots, and peers rightly take two answers for cheating; the network's daemons know one
of the two only. The certain sign is an envelope of our own that came back from others with a number that this
process did not make and no earlier one can have made (`SequenceSource.made_elsewhere`): numbers follow the
clock, so each of the two sees it of the other. Not for the same home twice on one machine: the lock of the
home stops that (`node/state/lock.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.events import NoticeLevel

if TYPE_CHECKING:  # `swarm status` knows the reason by name, and loads nothing for it
    from node.membership import Membership
    from node.peers.book import PeerBook
    from node.runtime import Runtime
    from node.state.stores import ReplayGuard, SequenceSource
    from protocol.messages import PeerId

__all__ = ["TWIN_REASON", "TwinWatch"]

TWIN_REASON = "twin_key"
"""Under which messages of a twin are counted among the refusals."""


class TwinWatch:
    """A `ReplayGuard` that looks at this node's own envelopes before `replay` counts them."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        peers: PeerBook,
        sequence: SequenceSource,
        replay: ReplayGuard,
    ) -> None:
        self._runtime = runtime
        self._own = membership.peer_id
        self._peers = peers
        self._sequence = sequence
        self._replay = replay
        self._told = False

    def admit(self, sender: PeerId, sequence: int, created_at: int, expires_at: int, now_ms: int) -> None:
        """As `ReplayGuard.admit`. The envelope's signature was checked."""
        if sender == self._own and self._sequence.made_elsewhere(sequence):
            self._peers.refused(sender, TWIN_REASON)
            if not self._told:
                self._told = True
                self._runtime.notice(
                    NoticeLevel.ERROR,
                    f"another node runs with this node's key ({sender}): message {sequence} bears its "
                    "signature and was not made here. Peers take two answers for one slot as cheating: stop "
                    "one of the two, or give it a home and a key of its own (`swarm key new --home ...`)",
                )
        self._replay.admit(sender, sequence, created_at, expires_at, now_ms)
