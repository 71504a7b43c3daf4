"""What this node has seen of each peer: the numbers behind the peers table and the demo's `by_peer`.

Counts only; what they mean for trust is `node/peers/trust.py`. Bounded: the `max_peers` peers seen last.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from node.events import PeerStatus, inert
from protocol.messages import Announcement, Lineage, PeerId, PeerRecord

__all__ = ["PeerBook"]


@dataclass(slots=True)
class _Seen:
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lag_sum: int = 0
    age_sum: float = 0.0
    lineage: Lineage | None = None
    policy_version: int = -1
    last_seen_at: int = 0


class PeerBook:
    """Counters by peer."""

    def __init__(self, tokenizer: str, max_peers: int = 1024) -> None:
        self._tokenizer = tokenizer
        self._max_peers = max_peers
        self._peers: OrderedDict[PeerId, _Seen] = OrderedDict()

    def announced(self, peer_id: PeerId, announcement: Announcement, at: int) -> None:
        """A valid announcement arrived."""
        seen = self._of(peer_id)
        if seen.lineage != announcement.lineage:  # a follower has another owner: other versions
            seen.lineage, seen.policy_version = announcement.lineage, -1
        seen.policy_version = max(seen.policy_version, announcement.policy_version)
        seen.last_seen_at = at

    def accepted(self, peer_id: PeerId, policy_version: int, age_windows: float) -> None:
        """A group of this version was accepted at this age."""
        seen = self._of(peer_id)
        seen.accepted += 1
        seen.lag_sum += max(0, seen.policy_version - policy_version)
        seen.age_sum += age_windows

    def rejected(self, peer_id: PeerId, reason: str) -> None:
        """A group or an announcement was refused."""
        self._of(peer_id).rejected[reason] += 1

    def newest_version(self, peer_id: PeerId, lineage: Lineage) -> int:
        """Newest version of `lineage` that this peer announced, -1 before the first and once it announces for
        another one."""
        seen = self._peers.get(peer_id)
        return seen.policy_version if seen and seen.lineage == lineage else -1

    def active_since(self, at: int, ignored: Callable[[PeerId], bool]) -> bool:
        """Whether a peer that is not `ignored` announced something valid at or after `at`."""
        return any(seen.last_seen_at >= at and not ignored(peer_id) for peer_id, seen in self._peers.items())

    def table(
        self,
        connected: frozenset[PeerId],
        known: dict[PeerId, PeerRecord],
        trust: Callable[[PeerId], float],
    ) -> tuple[PeerStatus, ...]:
        """Rows of the peers table, in a stable order."""
        rows = []
        for peer_id in sorted({*self._peers, *connected}):
            seen = self._peers.get(peer_id) or _Seen()
            record = known.get(peer_id)
            rows.append(
                PeerStatus(
                    peer_id=peer_id,
                    name=inert(record.name, 64) if record else "",
                    connected=peer_id in connected,
                    accepted=seen.accepted,
                    rejected=dict(sorted(seen.rejected.items())),
                    trust=trust(peer_id),
                    policy_version=seen.policy_version,
                    lag=seen.lag_sum / max(seen.accepted, 1),
                    age_windows=seen.age_sum / max(seen.accepted, 1),
                    last_seen_at=seen.last_seen_at,
                    same_tokenizer=seen.lineage is not None and seen.lineage.tokenizer == self._tokenizer,
                    follows=_followed(peer_id, seen, record),
                )
            )
        return tuple(rows)

    def _of(self, peer_id: PeerId) -> _Seen:
        seen = self._peers.get(peer_id)
        if seen is None:
            seen = self._peers[peer_id] = _Seen()
            while len(self._peers) > self._max_peers:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(peer_id)
        return seen


def _followed(peer_id: PeerId, seen: _Seen, record: PeerRecord | None) -> str:
    """Owner of the policy that a peer generates with, "" where that is its own or unknown."""
    lineage = seen.lineage or (record.lineage if record else None)
    return lineage.owner if lineage is not None and lineage.owner != peer_id else ""
