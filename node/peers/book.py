"""The one book about peers: what each announced, what was accepted and refused of it, and its standing.

    gossip, streams, fetches  --refused-----+
    announcements             --announced---+--> PeerBook --> trust, quarantine, newest version, who is active
    verification              --rejected, --+                 peers table, refusals by reason
                                accepted, judged

Whoever asks about a peer asks here. Bounded: the `MAX_PEERS` peers that verification knows and that were
heard last, the standings of `TrustSettings.max_peers`, and as many refusals as `Refusals` counts; identities
are free, so refusals below verification make no entry. Not for what is a failure (`node/verify`), nor for
who answers (`node/peers/links.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cachetools import FIFOCache

from node.compute import Lane
from node.durable import LeftOut
from node.events import PeerStatus, inert
from node.membership import Membership
from node.peers.links import Links
from node.peers.trust import (
    Hardness,
    Standing,
    TrustSettings,
    after_judgement,
    is_quarantined,
    save_standings,
    trust_in,
)
from node.runtime import Runtime
from node.transport.limits import Refusals
from protocol.messages import Announcement, Digest, Lineage, PeerId, PeerRecord

__all__ = ["PeerBook"]

MAX_PEERS = 1024
MAX_LINEAGES = 4
"""Lineages of one peer whose newest version is remembered: a follower changes its owner now and then."""
ACTIVE_WINDOWS = 3
"""Peers silent for longer are not waited for."""
SAVE_S = 2.0
"""From a finding to the disk, at most."""
CLAIM_TRUST = 0.9
"""What it takes to be believed about another's policy: of a newcomer, eight accepted groups and no fault."""
FORGOTTEN_HARD = 0.05
"""Hard failures that have decayed below this protect a standing from being forgotten no more."""


@dataclass(slots=True)
class _Seen:
    """What one peer announced, and what became of its groups."""

    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lag_sum: int = 0
    age_sum: float = 0.0
    versions: FIFOCache[Lineage, int] = field(default_factory=lambda: FIFOCache(MAX_LINEAGES))
    lineage: Lineage | None = None
    """The one announced last."""
    announced_at: int = 0
    """Swarm time of the last valid announcement, ms; 0 before the first."""


class PeerBook:
    """Everything that one node knows about its peers' conduct.

    `refusals` is shared with whoever counts below: give the transport's, so that there is one count."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        settings: TrustSettings,
        standings: Sequence[Standing] = (),
        *,
        refusals: Refusals | None = None,
    ) -> None:
        self._runtime = runtime
        self._membership = membership
        self.settings = settings
        self._seen: FIFOCache[PeerId, _Seen] = FIFOCache(MAX_PEERS)
        self._standings = {standing.peer: standing for standing in standings}
        self._refusals = refusals if refusals is not None else Refusals()
        self._unsaved = False
        self._saving = LeftOut(runtime, "trust")

    # --- what happened ------------------------------------------------------------------------------------

    def announced(self, peer_id: PeerId, announcement: Announcement) -> None:
        """A valid announcement of this peer arrived."""
        seen = self._touch(peer_id)
        lineage = seen.lineage = announcement.lineage
        seen.versions[lineage] = max(seen.versions.get(lineage, 0), announcement.policy_version)
        seen.announced_at = self._runtime.now_ms()

    def accepted(self, peer_id: PeerId, policy_version: int, lineage: Lineage, window: int) -> None:
        """A group of this version, for a prompt of `window`, passed verification."""
        seen = self._touch(peer_id)
        seen.accepted += 1
        seen.lag_sum += max(0, seen.versions.get(lineage, policy_version) - policy_version)
        seen.age_sum += max(0.0, self._membership.window() - window - 1)

    def rejected(self, peer_id: PeerId, reason: str, found: Hardness | None = None) -> None:
        """Verification rejected a group or an announcement of this peer; `found` counts against its trust,
        None where it is no fault of the peer's."""
        self._touch(peer_id).rejected[reason] += 1
        if found is not None:
            self.judged(peer_id, found)

    def refused(self, peer_id: PeerId, reason: str) -> None:
        """Something of this peer was refused before verification: a message, a stream, a blob, a handshake.
        `reason` is one of our own short words, never a peer's bytes."""
        self._refusals.add(peer_id, reason)

    def judged(self, peer_id: PeerId, found: Hardness) -> None:
        """Let one finding count for or against the trust in this peer."""
        self._unsaved = True
        before = self._standings.pop(peer_id, None) or Standing(peer_id, at_window=self._membership.window())
        self._standings[peer_id] = after_judgement(before, found, self._membership.window(), self.settings)
        if len(self._standings) > self.settings.max_peers:
            forgotten = next(
                (peer for peer, each in self._standings.items() if each.hard < FORGOTTEN_HARD),
                next(iter(self._standings)),
            )
            del self._standings[forgotten]

    # --- what to think of a peer --------------------------------------------------------------------------

    def trust(self, peer_id: PeerId) -> float:
        """Trust in [0, 1]; 0 during a quarantine."""
        standing = self._standings.get(peer_id) or Standing(peer_id)
        return trust_in(standing, self._membership.window(), self.settings)

    def quarantined(self, peer_id: PeerId) -> bool:
        """Whether nothing of this peer is to be fetched or used now."""
        standing = self._standings.get(peer_id)
        return standing is not None and is_quarantined(standing, self._membership.window())

    def has_earned_trust(self, peer_id: PeerId) -> bool:
        """Whether this peer is a member of a closed swarm or above a newcomer's trust, since keys of an open
        swarm cost nothing; nobody in quarantine."""
        trust = self.trust(peer_id)
        return trust > 0 and (self._membership.charter.closed or trust > self.settings.newcomer)

    def may_claim(self, peer_id: PeerId, lineage: Lineage) -> bool:
        """Whether this peer is believed when it says that it generates with `lineage`: with its own, or with
        another's as a follower, of which nobody keeps a list. Whoever is not is held to be a policy of its
        own. In a closed swarm an issuer has signed for it; in an open one it has to have earned that."""
        if lineage.owner == peer_id:
            return True
        trust = self.trust(peer_id)
        return trust >= CLAIM_TRUST or (self._membership.charter.closed and trust > 0)

    def newest_version(self, peer_id: PeerId, lineage: Lineage) -> int | None:
        """Newest version of `lineage` that this peer announced, None before the first."""
        try:  # not `in` and then `[]`: verification asks from its own thread
            return self._seen[peer_id].versions[lineage]
        except KeyError:
            return None

    def active(self) -> tuple[PeerId, ...]:
        """Peers that announced something valid in the last windows and are not in quarantine."""
        since_ms = self._runtime.now_ms() - ACTIVE_WINDOWS * self._membership.charter.window_ms
        return tuple(
            peer_id
            for peer_id, seen in self._seen.items()
            if seen.announced_at and seen.announced_at >= since_ms and not self.quarantined(peer_id)
        )

    # --- what is shown and kept ---------------------------------------------------------------------------

    def standings(self) -> tuple[Standing, ...]:
        """All of them, to be stored and given to `PeerBook` again."""
        return tuple(self._standings.values())

    async def keep(self, path: Path) -> None:
        """Save the standings soon after they change, until cancelled: a kill must not make strangers of
        peers, nor peers of strangers in quarantine."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save(path)

    async def save(self, path: Path) -> None:
        """Write the standings to `path` if they changed since. A disk that does not take it is told once, and
        tried again the next time."""
        if not self._unsaved:
            return
        self._unsaved = False
        try:
            await self._runtime.run(
                Lane.DISK, save_standings, path, self._membership.swarm_id, self.standings()
            )
        except OSError as error:
            self._unsaved = True
            self._saving.failed(f"trust cannot be saved: {error}")
        else:
            self._saving.worked()

    def refusals(self) -> dict[str, int]:
        """What was refused below verification so far, by reason."""
        totals: Counter[str] = Counter()
        for (_, reason), count in self._refusals.counters().items():
            totals[reason] += count
        return dict(sorted(totals.items()))

    def table(
        self, links: Links, known: Mapping[PeerId, PeerRecord], tokenizer: Digest
    ) -> tuple[PeerStatus, ...]:
        """Rows of the peers table, in a stable order. `known` are the records of neighbours, `tokenizer` is
        this node's own."""
        connected, frozen = links.connected, links.frozen
        refused: dict[PeerId, Counter[str]] = {}
        for (peer_id, reason), count in self._refusals.counters().items():
            refused.setdefault(peer_id, Counter())[reason] += count
        rows = []
        for peer_id in sorted({*self._seen, *links.peers}):
            seen, record = self._seen.get(peer_id) or _Seen(), known.get(peer_id)
            lineage = seen.lineage or (record.lineage if record is not None else None)
            rows.append(
                PeerStatus(
                    peer_id=peer_id,
                    name=inert(record.name, 64) if record is not None else "",
                    connected=peer_id in connected,
                    accepted=seen.accepted,
                    rejected=dict(sorted((seen.rejected + refused.get(peer_id, Counter())).items())),
                    trust=self.trust(peer_id),
                    policy_version=seen.versions[seen.lineage] if seen.lineage is not None else -1,
                    lag=seen.lag_sum / max(seen.accepted, 1),
                    age_windows=seen.age_sum / max(seen.accepted, 1),
                    last_seen_at=seen.announced_at,
                    same_tokenizer=seen.lineage is not None and seen.lineage.tokenizer == tokenizer,
                    follows=lineage.owner if lineage is not None and lineage.owner != peer_id else "",
                    frozen=peer_id in frozen,
                    answered_at=links.answered_at(peer_id),
                )
            )
        return tuple(rows)

    def _touch(self, peer_id: PeerId) -> _Seen:
        """The entry of this peer, a new one if need be; whoever was touched longest ago is forgotten."""
        seen = self._seen[peer_id] = self._seen.get(peer_id) or _Seen()
        return seen
