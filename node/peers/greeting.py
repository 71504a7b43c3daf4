"""What two nodes say of themselves when they meet, and what each makes of it.

    Membership --hello / reply--> the other side          its Hello or HelloReply --refusal, meet--> this one

For: admission to a closed swarm by token, the comparison of environments, and whether the other side knows a
newer annex. A difference in an environment is told once, in a sentence with both pins, and blames nobody:
groups of it are refused by `verify` without cost to trust. Not for streams and rounds
(`node/peers/presence.py`).
"""

from __future__ import annotations

from node.membership import Membership
from protocol.messages import Hello, HelloReply, PeerId, PeerRecord

__all__ = ["differences", "hello", "knows_newer", "refusal", "welcome"]

MAX_TOLD = 3
"""Environments named in one sentence."""


def hello(membership: Membership, record: PeerRecord) -> Hello:
    """What this node says first."""
    return Hello(
        swarm_id=membership.swarm_id,
        peer=record,
        environments=membership.environments,
        token=membership.token,
        annex=_sequence(membership),
    )


def welcome(membership: Membership, record: PeerRecord, clock_at: int) -> HelloReply:
    """What this node answers a member of its swarm."""
    return HelloReply(
        peer=record,
        clock_at=clock_at,
        environments=membership.environments,
        token=membership.token,
        annex=_sequence(membership),
    )


def refusal(membership: Membership, peer_id: PeerId, said: Hello) -> str:
    """One sentence why this peer has no place here, "" for a member."""
    name = membership.charter.name
    if said.swarm_id != membership.swarm_id:
        return f"this node belongs to swarm {membership.swarm_id[:12]} ({name}), not {said.swarm_id[:12]}"
    if not membership.admit(peer_id, said.token):
        return f"swarm {name} is closed and {peer_id} shows no valid token; ask its founder for one"
    return ""


def differences(membership: Membership, peer_id: PeerId, said: Hello | HelloReply) -> str:
    """`environment_mismatch` in one sentence that names both sides, "" where all environments are alike."""
    found = membership.mismatches(said.environments)
    if not found:
        return ""
    told = ", ".join(f"{name} is {theirs} there and {own} here" for name, own, theirs in found[:MAX_TOLD])
    more = f" and {len(found) - MAX_TOLD} more" if len(found) > MAX_TOLD else ""
    return (
        f"environment_mismatch with {peer_id}: {told}{more}; groups of it are not exchanged until both have "
        "the same"
    )


def knows_newer(membership: Membership, said: Hello | HelloReply) -> bool:
    """Whether the other side has an annex that this node should ask for."""
    return said.annex > _sequence(membership)


def _sequence(membership: Membership) -> int:
    return membership.annex.sequence if membership.annex is not None else 0
