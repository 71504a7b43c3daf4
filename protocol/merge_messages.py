"""Records of a merge, in the order of its flow: trainer <-> trainer of the same base model.

Like those of `messages.py`, whose types they use; a file of their own for its length.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.constants import MAX_CONTRIBUTIONS, MAX_REMOVED_TAGS
from protocol.messages import Digest, Millis, PeerId, Record

__all__ = ["MergeRemoval", "MergeReply", "MergeRequest", "SignedRemoval"]


class MergeRemoval(Record, frozen=True):
    """author -> everybody: these contributions of mine count no more. Names all that its author has added on
    this base, so that no older one comes back where the newest has not arrived."""

    author: PeerId
    base: Digest
    tags: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_REMOVED_TAGS)]
    created_at: Millis


class SignedRemoval(Record, frozen=True):
    """A removal as its author signed it. `removal` holds a canonical MergeRemoval."""

    removal: Annotated[bytes, Meta(max_length=4096)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class MergeRequest(Record, frozen=True):
    """trainer -> trainer of the same base model: all that you hold, unless your set is `held`, the asker's
    own, or `taken`, the one that the asker took from here last; its own is another one where it does not
    admit every author."""

    base_model: Digest
    base: Digest
    """Hash of the weights that all contributions start from."""
    rule: Digest
    held: Digest
    taken: Digest


class MergeReply(Record, frozen=True):
    """The answer: how many SignedLinks and, after them, SignedRemovals follow, one a frame. None where `base`
    or `rule` differ from those of the request."""

    base: Digest
    rule: Digest
    held: Digest
    """Names the answering set: all that it holds."""
    links: Annotated[int, Meta(ge=0, le=MAX_CONTRIBUTIONS)]
    removals: Annotated[int, Meta(ge=0, le=MAX_CONTRIBUTIONS)]
