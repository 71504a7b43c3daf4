"""Who has contributed to the next merge: an observed-remove set of signed contributions, the same on every
node that has heard the same, in whatever order.

    SignedLink (anchor on the common base) --add--> MergeSet --visible--> merge.resolve
    SignedRemoval (tags that its author observed) --remove--> MergeSet

A contribution is an anchor of its author's chain: the lossless delta from weights that all have (the common
base) to the author's version. Its tag is the SHA-256 of the signed link's content, unique because a link says
when it was made. A removal names tags and is signed by the author of what it removes, so it takes away what
was observed and no later addition: add wins. Of each author the newest addition stands, removed or not, and
the newest removal; both are maxima, so neither order nor repetition matters, and an author takes constant
room. A generic set after Shapiro et al., "A comprehensive study of convergent and commutative
replicated data types" (2011).
Pure. Whose contributions are let in is decided before `add`: `max_authors` bounds room, not influence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.codec import decode, digest, encode, framed
from protocol.constants import MAX_CONTRIBUTIONS, MAX_REMOVED_TAGS
from protocol.errors import LocalProtocolError, RemoteProtocolError, SignatureError
from protocol.identity import Identity, verify
from protocol.links import open_link
from protocol.merge_messages import MergeRemoval, SignedRemoval
from protocol.messages import Digest, LinkKind, PeerId, SignedLink, WeightsLink

__all__ = [
    "MAX_SIGNED_REMOVAL_BYTES",
    "Contribution",
    "MergeError",
    "MergeSet",
    "decode_removal",
    "open_removal",
    "set_digest",
    "sign_removal",
]

MAX_REMOVAL_BYTES = 4096
MAX_SIGNED_REMOVAL_BYTES = MAX_REMOVAL_BYTES + 128
"""A SignedRemoval on a stream."""


class MergeError(RemoteProtocolError):
    """A contribution or removal that does not belong into this set."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One addition, its signature checked."""

    tag: Digest
    signed: SignedLink
    link: WeightsLink

    @property
    def author(self) -> PeerId:
        return self.link.lineage.owner

    @property
    def _age(self) -> tuple[int, int, Digest, bytes]:
        """Newest last, the same order everywhere: an author who signs two links of one version, or one link
        twice, gets one of them taken, and everybody takes that one."""
        return self.link.policy_version, self.link.created_at, self.tag, self.signed.signature


@dataclass(frozen=True, slots=True)
class _Removed:
    signed: SignedRemoval
    removal: MergeRemoval

    @property
    def _age(self) -> tuple[int, bytes, bytes]:
        return self.removal.created_at, self.signed.removal, self.signed.signature


class MergeSet:
    """Contributions on one common base in one swarm."""

    def __init__(
        self, swarm_id: Digest, base_model: Digest, base: Digest, *, max_authors: int = MAX_CONTRIBUTIONS
    ) -> None:
        """`base`: `weights_digest` of the weights that all start from, the base model's: everybody has them,
        also who missed a merge, refused one or joined later."""
        self._swarm_id = swarm_id
        self.base_model = base_model
        self.base = base
        self._max_authors = max_authors
        self._added: dict[PeerId, Contribution] = {}
        self._removed: dict[PeerId, _Removed] = {}

    # --- what is in it ------------------------------------------------------------------------------------

    def visible(self) -> tuple[Contribution, ...]:
        """What is added and not removed, in canonical order: by tag."""
        live = (each for each in self._added.values() if not self._is_removed(each))
        return tuple(sorted(live, key=lambda each: each.tag))

    def whole_digest(self) -> Digest:
        """Names all that is in the set, removed or not, as it is sent to others."""
        added = [part for each in self.links() for part in (each.link, each.signature)]
        gone = [part for each in self.removals() for part in (each.removal, each.signature)]
        fields = (bytes.fromhex(self.base), len(added).to_bytes(4, "big"), *added, *gone)
        return digest(framed("merge-held", *fields))

    def links(self) -> list[SignedLink]:
        """All additions, for other nodes; removed ones too, since they keep older ones away."""
        return [self._added[author].signed for author in sorted(self._added)]

    def removals(self) -> list[SignedRemoval]:
        """All removals, for other nodes."""
        return [self._removed[author].signed for author in sorted(self._removed)]

    # --- how it grows -------------------------------------------------------------------------------------

    def add(self, signed: SignedLink) -> bool:
        """Take a contribution in; whether anything changed. Raises MergeError for one on another base or of
        another kind, SignatureError or DecodeError as `open_link` does."""
        if any(each.signed == signed for each in self._added.values()):
            return False
        link = open_link(signed, self._swarm_id)
        author = link.lineage.owner
        if link.kind is not LinkKind.ANCHOR:
            raise MergeError(f"{author} contributes a {link.kind.value}, not an anchor", reason="merge_kind")
        if (link.lineage.base_model, link.base) != (self.base_model, self.base):
            raise MergeError(
                f"{author} contributes on {link.base[:12]} of model {link.lineage.base_model[:12]}, not on "
                f"{self.base[:12]} of {self.base_model[:12]}",
                reason="merge_base",
            )
        return self._take_added(Contribution(_tag(signed), signed, link))

    def remove(self, signed: SignedRemoval) -> bool:
        """Take a removal in; whether anything changed. Raises MergeError for one on another base,
        SignatureError or DecodeError as `open_removal` does."""
        if any(each.signed == signed for each in self._removed.values()):
            return False
        removal = open_removal(signed, self._swarm_id)
        if removal.base != self.base:
            raise MergeError(
                f"{removal.author} removes from {removal.base[:12]}, not from {self.base[:12]}",
                reason="merge_base",
            )
        return self._take_removed(_Removed(signed, removal))

    def removal(self, identity: Identity, created_at: int) -> SignedRemoval | None:
        """What takes this node's own contributions away, those that an earlier removal named among them. None
        when nothing of it is here. Dated after its last removal, whatever the clock says."""
        own = self._added.get(identity.peer_id)
        if own is None or self._is_removed(own):
            return None
        before = self._removed.get(identity.peer_id)
        if before is not None:
            created_at = max(created_at, before.removal.created_at + 1)
        tags = [own.tag, *(before.removal.tags if before is not None else ())][:MAX_REMOVED_TAGS]
        removal = MergeRemoval(
            author=identity.peer_id, base=self.base, tags=tuple(tags), created_at=created_at
        )
        return sign_removal(identity, self._swarm_id, removal)

    # --- internals ----------------------------------------------------------------------------------------

    def _take_added(self, new: Contribution) -> bool:
        known = self._added.get(new.author)
        if known is not None and known._age >= new._age:
            return False
        self._added[new.author] = new
        return self._bounded(new.author)

    def _take_removed(self, new: _Removed) -> bool:
        author = new.removal.author
        known = self._removed.get(author)
        if known is not None and known._age >= new._age:
            return False
        self._removed[author] = new
        return self._bounded(author)

    def _bounded(self, changed: PeerId) -> bool:
        """Keep those of too many authors whose hash with the base is least: a choice that does not depend on
        the order of arrival, and falls on others with every base. Whether `changed` is among them."""
        authors = self._added.keys() | self._removed.keys()
        if len(authors) > self._max_authors:
            last = max(authors, key=lambda author: hashlib.sha256(f"{self.base} {author}".encode()).digest())
            self._added.pop(last, None)
            self._removed.pop(last, None)
            return last != changed
        return True

    def _is_removed(self, added: Contribution) -> bool:
        removed = self._removed.get(added.author)
        return removed is not None and added.tag in removed.removal.tags


def set_digest(base: Digest, contributions: Iterable[Contribution]) -> Digest:
    """Names these contributions on `base`, whatever their order: who merges the same ones gets the same
    weights."""
    tags = sorted(bytes.fromhex(each.tag) for each in contributions)
    return digest(framed("merge-set", bytes.fromhex(base), *tags))


def sign_removal(identity: Identity, swarm_id: Digest, removal: MergeRemoval) -> SignedRemoval:
    """Raises LocalProtocolError for a removal of another author, or one that breaks its own bounds."""
    if removal.author != identity.peer_id:
        raise LocalProtocolError(f"{identity.peer_id} cannot remove what {removal.author} contributed")
    payload = encode(removal)
    return SignedRemoval(removal=payload, signature=identity.sign(_signed(swarm_id, payload)))


def decode_removal(signed: SignedRemoval) -> MergeRemoval:
    """The removal inside, whoever signed it. Raises DecodeError."""
    return decode(signed.removal, MergeRemoval, max_bytes=MAX_REMOVAL_BYTES)


def open_removal(signed: SignedRemoval, swarm_id: Digest) -> MergeRemoval:
    """The removal inside. Raises DecodeError for what is none, SignatureError when its author did not sign it
    for this swarm."""
    removal = decode_removal(signed)
    if not verify(removal.author, _signed(swarm_id, signed.removal), signed.signature):
        raise SignatureError(f"{removal.author} did not sign this removal", reason="merge_signature")
    return removal


def _signed(swarm_id: Digest, payload: bytes) -> bytes:
    return framed("merge-removal", bytes.fromhex(swarm_id), payload)


def _tag(signed: SignedLink) -> Digest:
    """Without the signature: its author could make several for one link."""
    return digest(signed.link)
