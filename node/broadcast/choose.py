"""Which owner a follower generates for: the configured one, else by need, then trust.

Pure: what is known of the neighbours goes in, a lineage or None comes out. An owner is a neighbour whose own
record names a lineage that it owns itself, of the same base model and tokenizer as the follower's policy on
disk: an anchor starts from those weights. Need is few followers, as far as this node can see. Two followers
that choose at the same moment may choose the same owner; nothing is lost but balance.
"""

from __future__ import annotations

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
    for any. An owner that is `avoided` (it was given up lately) is taken only if there is no other; one with
    no trust at all, in quarantine, never."""
    owned = {
        peer_id: record.lineage
        for peer_id, record in records.items()
        if peer_id != me and _is_owner(peer_id, record, base_model, tokenizer)
    }
    if wanted:
        return owned.get(wanted)
    followers = Counter(
        record.lineage.owner
        for peer_id, record in records.items()
        if record.lineage is not None and record.lineage.owner != peer_id and peer_id != me
    )
    ordered = sorted(
        (peer_id in avoided, followers[peer_id], -trust(peer_id), peer_id)
        for peer_id in owned
        if trust(peer_id) > 0
    )
    return owned[ordered[0][-1]] if ordered else None


def _is_owner(peer_id: PeerId, record: PeerRecord, base_model: str, tokenizer: str) -> bool:
    lineage = record.lineage
    return (
        lineage is not None
        and lineage.owner == peer_id
        and (lineage.base_model, lineage.tokenizer) == (base_model, tokenizer)
    )
