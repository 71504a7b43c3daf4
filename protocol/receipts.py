"""What the receipt of a slot commits to: a Merkle root over its rollouts, bound to who answered what.

    rollouts --leaves, nodes--> root --author, lineage, prompt, count--> slot digest
    one rollout + path --proves--> it is the one that the receipt stands for

The slot digest is `Announcement.completions`.

Leaves, nodes and the slot are hashed under purposes of their own, so none passes for another. A list is cut
at the largest power of two below its length, as certificate logs do (RFC 6962), so one list has one tree. The
author stands in the slot's digest: whoever repeats it in an announcement of its own cannot answer for it. Not
for finding copied completions (`node/verify/copies.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from protocol.codec import digest, encode, framed
from protocol.messages import Announcement, Digest, Lineage, PeerId, PromptRef, Rollout

__all__ = ["prove", "proves", "slot_digest"]

HASH_BYTES = 32


def slot_digest(author: PeerId, lineage: Lineage, prompt: PromptRef, rollouts: Sequence[Rollout]) -> Digest:
    """What `Announcement.completions` holds. Raises LocalProtocolError for a rollout that cannot be sent."""
    root = _root([_leaf(rollout) for rollout in rollouts])
    return _slot(author, lineage, prompt, len(rollouts), root)


def prove(rollouts: Sequence[Rollout], index: int) -> bytes:
    """The path of the rollout at `index`: the hashes beside its way to the root, lowest first, 32 bytes
    each."""
    leaves = [_leaf(rollout) for rollout in rollouts]
    path: list[bytes] = []
    while len(leaves) > 1:
        cut = _cut(len(leaves))
        path.append(_root(leaves[cut:] if index < cut else leaves[:cut]))
        leaves, index = (leaves[:cut], index) if index < cut else (leaves[cut:], index - cut)
    return b"".join(reversed(path))


def proves(author: PeerId, receipt: Announcement, index: int, rollout: Rollout, path: bytes) -> bool:
    """Whether `author` committed in `receipt` to `rollout` at `index`."""
    count = len(receipt.rewards)
    if not 0 <= index < count:
        return False
    root = _climb(_leaf(rollout), index, count, path)
    return root is not None and receipt.completions == _slot(
        author, receipt.lineage, receipt.prompt, count, root
    )


def _slot(author: PeerId, lineage: Lineage, prompt: PromptRef, count: int, root: bytes) -> Digest:
    """`author` and the canonical bytes of lineage and prompt, the number of rollouts in 8 bytes, the root."""
    return digest(
        framed(
            "slot", author.encode("utf-8"), encode(lineage), encode(prompt), count.to_bytes(8, "big"), root
        )
    )


def _leaf(rollout: Rollout) -> bytes:
    return hashlib.sha256(framed("rollout", encode(rollout))).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(framed("node", left, right)).digest()


def _cut(count: int) -> int:
    """The largest power of two below `count`, which is at least 2."""
    return 1 << (count - 1).bit_length() - 1


def _root(leaves: Sequence[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    cut = _cut(len(leaves))
    return _node(_root(leaves[:cut]), _root(leaves[cut:]))


def _climb(leaf: bytes, index: int, count: int, path: bytes) -> bytes | None:
    """The root above `leaf` along `path`; None for a path of another length."""
    turns: list[bool] = []  # from the root down: whether the leaf lies on the left
    while count > 1:
        cut = _cut(count)
        turns.append(index < cut)
        count, index = (cut, index) if index < cut else (count - cut, index - cut)
    if len(path) != HASH_BYTES * len(turns):
        return None
    for start, left in zip(range(0, len(path), HASH_BYTES), reversed(turns), strict=True):
        beside = path[start : start + HASH_BYTES]
        leaf = _node(leaf, beside) if left else _node(beside, leaf)
    return leaf
