"""Which owner a follower generates for: the configured one, else by need, then trust.

Pure: what is known of the neighbours goes in, a lineage or None comes out. An owner is a neighbour whose own
record names a lineage that it owns itself, of the same base model and tokenizer as the follower's policy on
disk: an anchor starts from those weights. Need is few followers, as far as this node can see. Among equals
each follower has an order of its own, so that those that choose at the same moment, and do not see each other
yet, spread. An owner in quarantine is never followed, even when it is the configured one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from protocol.messages import Lineage, PeerId, PeerRecord

__all__ = ["choose_owner"]


def choose_owner(
    records: Mapping[PeerId, PeerRecord],
    *,
    me: PeerId,
    base_model: str,
    tokenizer: str,
    wanted: PeerId,
    trust: Callable[[PeerId], float],
    avoided: Collection[PeerId],
) -> Lineage | None:
    """The lineage to follow, of those in `records` (of connected peers). `wanted` is the configured owner, ""
    for any. An owner with no trust at all (in quarantine) is never taken; one that is `avoided` (it was given
    up lately) only if there is no other, or it is the configured one."""
    owned = {
        peer_id: record.lineage
        for peer_id, record in records.items()
        if peer_id != me and _is_owner(peer_id, record, base_model, tokenizer) and trust(peer_id) > 0
    }
    if wanted:
        return owned.get(wanted)
    followers = Counter(
        record.lineage.owner
        for peer_id, record in records.items()
        if record.lineage is not None and record.lineage.owner != peer_id and peer_id != me
    )
    chosen = min(
        owned,
        key=lambda peer_id: (peer_id in avoided, followers[peer_id], -trust(peer_id), _place(me, peer_id)),
        default=None,
    )
    return owned[chosen] if chosen is not None else None


def _place(me: PeerId, owner: PeerId) -> bytes:
    """Where `owner` stands in this node's own order."""
    return hashlib.sha256(f"{me}/{owner}".encode()).digest()


def _is_owner(peer_id: PeerId, record: PeerRecord, base_model: str, tokenizer: str) -> bool:
    lineage = record.lineage
    return (
        lineage is not None
        and lineage.owner == peer_id
        and (lineage.base_model, lineage.tokenizer) == (base_model, tokenizer)
    )
