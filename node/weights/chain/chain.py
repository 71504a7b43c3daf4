"""One lineage's chain of weight versions, as far as this node knows it: which links fit together, and how to
get from one version to the newest.

A version is reached by a delta from the version before it, by an anchor from weights that everybody of the
lineage has, or by either. The owner signs one line of versions: each delta spans from its base version to its
own, and no two spans overlap. What breaks that line is told apart:

    chain_gap       a delta whose base version is not here: links are missing
    chain_base      a delta whose base hash is not the result before it; an anchor on unknown weights
    chain_fork      two links of the owner that cannot both be in one line; both are kept as evidence
    chain_rollback  the owner offers a head that is older than what it signed before
    chain_owner     a link of another lineage
    chain_length    no anchor for MAX_CHAIN_LINKS links

What came before the last anchor but one is forgotten, so that a chain holds at most MAX_CHAIN_LINKS links,
whatever its owner signs. Pure: no files, no network, no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from protocol.constants import MAX_CHAIN_LINKS
from protocol.errors import RemoteProtocolError
from protocol.links import decode_link, open_link
from protocol.messages import Digest, Lineage, LinkKind, SignedLink, WeightsLink

__all__ = ["Chain", "ChainError"]


class ChainError(RemoteProtocolError):
    """A link that does not fit its chain. `evidence`: what the owner signed against itself, for a fork or a
    rollback."""

    def __init__(self, message: str, *, reason: str, evidence: tuple[SignedLink, ...] = ()) -> None:
        super().__init__(message, reason=reason)
        self.evidence = evidence


@dataclass(frozen=True, slots=True)
class _Entry:
    signed: SignedLink
    link: WeightsLink


@dataclass(slots=True)
class _Version:
    result: Digest
    delta: _Entry | None = None
    anchor: _Entry | None = None

    def entries(self) -> Iterator[_Entry]:
        if self.delta is not None:
            yield self.delta
        if self.anchor is not None:
            yield self.anchor

    @property
    def first(self) -> _Entry:
        return next(self.entries())


class Chain:
    """The versions of `lineage` in one swarm. `bases`: hashes of weights that an anchor may start from."""

    def __init__(self, swarm_id: Digest, lineage: Lineage, bases: Collection[Digest]) -> None:
        self.swarm_id = swarm_id
        self.lineage = lineage
        self.bases = frozenset(bases)
        self.evidence: tuple[SignedLink, ...] = ()
        """Two links of the owner that contradict each other, once it has forked; nothing is added then."""
        self._versions: dict[int, _Version] = {}
        """Oldest first."""
        self._anchors: list[int] = []
        """Versions with an anchor, oldest first."""

    # --- what is here -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Links in all."""
        return sum(1 for _ in self._entries())

    @property
    def head(self) -> WeightsLink | None:
        """A link of the newest version."""
        entry = self._head()
        return entry.link if entry is not None else None

    @property
    def anchor(self) -> WeightsLink | None:
        """The newest anchor."""
        entry = self._newest_anchor()
        return entry.link if entry is not None else None

    def links(self) -> list[SignedLink]:
        """All links, oldest first."""
        return [entry.signed for entry in self._entries()]

    def after(self, version: int | None) -> list[SignedLink]:
        """What a peer at `version` (None: at none) is answered; see ChainReply."""
        head, anchor = self._head(), self._newest_anchor()
        if head is None:
            return []
        if version is not None and version > head.link.policy_version:
            return [head.signed]
        anchored = -1 if anchor is None else anchor.link.policy_version
        if version is not None and self._leads_on(version):
            first = [anchor.signed] if anchor is not None and anchored < version else []
            return first + [entry.signed for entry in self._entries() if entry.link.policy_version >= version]
        after = [entry.signed for entry in self._entries() if entry.link.policy_version > anchored]
        return [anchor.signed, *after] if anchor is not None else []

    def path(
        self,
        version: int | None,
        *,
        cost: Callable[[WeightsLink], float],
        avoid: Collection[Digest] = (),
    ) -> list[WeightsLink]:
        """The links that lead from `version` (None: from none) to the newest version that can be reached,
        those of the least `cost` in all, the fewest where several cost that; empty when that is `version`
        itself or older. Blobs with a root in `avoid` are not used."""
        versions = list(self._versions.items())
        best: list[WeightsLink] = []
        best_key = (-1 if version is None else version, 0.0, 0)
        for index, (number, each) in enumerate(versions):
            if number == version:
                links = []
            elif each.anchor is not None and each.anchor.link.blob.root not in avoid:
                links = [each.anchor.link]
            else:
                continue
            for _, following in versions[index + 1 :]:
                if following.delta is None or following.delta.link.blob.root in avoid:
                    break
                links.append(following.delta.link)
            if links:
                reached = links[-1].policy_version
                key = (reached, -sum(map(cost, links)), -len(links))
                if reached > best_key[0] or (best and key > best_key):
                    best, best_key = links, key
        return best

    def worth_keeping(self, max_bytes: int, *, strictly: bool) -> list[Digest]:
        """Roots of the blobs that others may need, newest first, within `max_bytes`: of the newest anchor and
        the deltas after it, and of the older deltas, by which those go on who lag behind. Unless `strictly`,
        what newcomers need is all there, even where it is more."""
        anchor = self.anchor
        newest = -1 if anchor is None else anchor.policy_version
        roots: list[Digest] = []
        left = max_bytes
        for number, version in reversed(self._versions.items()):
            for entry in reversed(list(version.entries())):
                link = entry.link
                needed = number > newest or link is anchor
                if not needed and link.kind is LinkKind.ANCHOR:
                    continue
                left -= link.blob.size
                if left < 0 and (strictly or not needed):
                    return roots
                roots.append(link.blob.root)
        return roots

    @property
    def bytes_after_anchor(self) -> int:
        """Sizes of the deltas after the newest anchor."""
        newest = self._anchors[-1] if self._anchors else -1
        return sum(entry.link.blob.size for entry in self._entries() if entry.link.policy_version > newest)

    # --- adding -------------------------------------------------------------------------------------------

    def add(self, signed: SignedLink) -> WeightsLink | None:
        """Take a link in; None when it is known, or too old to matter. Raises ChainError, SignatureError or
        DecodeError (`open_link`), and then nothing but `evidence` has changed."""
        try:
            entry = self._checked(signed)
        except ChainError as error:
            if error.reason == "chain_fork":
                self.evidence = error.evidence
            raise
        if entry is None:
            return None
        link = entry.link
        version = self._versions.setdefault(link.policy_version, _Version(link.result))
        if link.kind is LinkKind.ANCHOR:
            version.anchor = entry
            self._anchors = sorted([*self._anchors, link.policy_version])
        else:
            version.delta = entry
        self._forget_old()
        return link

    def check(self, signed: SignedLink) -> None:
        """Raise what `add` would raise."""
        self._checked(signed)

    def check_head(self, offered: SignedLink, known: int | None) -> None:
        """`offered` is the last link of the owner's own answer to a request after version `known`. Raises
        ChainError (chain_rollback) when it is older: the owner signed `known` before."""
        if known is None or decode_link(offered).policy_version >= known:
            return
        link = open_link(offered, self.swarm_id)
        head = self._head()
        if head is not None and link.lineage == self.lineage:
            raise ChainError(
                f"{self.lineage.owner} offers version {link.policy_version} as its newest, after it signed "
                f"{known}",
                reason="chain_rollback",
                evidence=(head.signed, offered),
            )

    def _checked(self, signed: SignedLink) -> _Entry | None:
        if any(entry.signed == signed for entry in self._entries()):
            return None  # before its signature is looked at: a repetition costs nothing
        link = open_link(signed, self.swarm_id)
        if link.lineage != self.lineage:
            raise ChainError(
                f"a link of {link.lineage.owner} on {link.lineage.base_model[:12]} in the chain of "
                f"{self.lineage.owner} on {self.lineage.base_model[:12]}",
                reason="chain_owner",
            )
        if self.evidence:
            raise ChainError(f"{self.lineage.owner} has forked", reason="chain_fork", evidence=self.evidence)
        entry = _Entry(signed, link)
        if link.kind is LinkKind.ANCHOR and link.base not in self.bases:
            raise ChainError(
                f"anchor of version {link.policy_version} on weights {link.base[:12]}, which nobody has",
                reason="chain_base",
            )
        known = self._versions.get(link.policy_version)
        fits = self._fits_known(entry, known) if known is not None else self._fits_new(entry)
        if fits and link.kind is LinkKind.DELTA and self._since_anchor() >= MAX_CHAIN_LINKS:
            raise ChainError(
                f"{MAX_CHAIN_LINKS} links of {self.lineage.owner} without an anchor", reason="chain_length"
            )
        return entry if fits else None

    def _fits_known(self, entry: _Entry, known: _Version) -> bool:
        """Whether a link of a version that is here adds to it."""
        link = entry.link
        if link.result != known.result:
            raise self._fork(entry, known.first)
        same = known.anchor if link.kind is LinkKind.ANCHOR else known.delta
        if same is not None:
            if (same.link.base, same.link.base_version) != (link.base, link.base_version):
                raise self._fork(entry, same)
            return False
        if link.kind is LinkKind.ANCHOR:
            return True
        # A delta that came later than its version's anchor spans from the version before, if that is here.
        before = [number for number in self._versions if number < link.policy_version]
        if not before or link.base_version < before[0]:
            return False
        if link.base_version != before[-1]:
            raise self._fork(entry, self._versions[before[-1]].first)
        self._require_base(link)
        return True

    def _fits_new(self, entry: _Entry) -> bool:
        """Whether a link of a version that is not here adds to the chain."""
        link, head = entry.link, self._head()
        if head is None or link.policy_version > head.link.policy_version:
            return self._fits_ahead(entry, head)
        # An older version: forgotten, unless the owner has signed a delta that spans over it.
        for version in self._versions.values():
            if version.delta is None:
                continue
            span = version.delta.link
            if span.base_version < link.policy_version < span.policy_version:
                raise self._fork(entry, version.delta)
        return False

    def _fits_ahead(self, entry: _Entry, head: _Entry | None) -> bool:
        link = entry.link
        if link.kind is LinkKind.ANCHOR:
            return True
        if head is None or link.base_version > head.link.policy_version:
            at = "no version" if head is None else f"version {head.link.policy_version}"
            raise ChainError(
                f"delta from version {link.base_version} to {link.policy_version}; {at} is the newest here",
                reason="chain_gap",
            )
        if link.base_version < head.link.policy_version:
            raise self._fork(entry, head)
        self._require_base(link)
        return True

    def _require_base(self, link: WeightsLink) -> None:
        result = self._versions[link.base_version].result
        if link.base != result:
            raise ChainError(
                f"delta from weights {link.base[:12]} as version {link.base_version}, which is {result[:12]}",
                reason="chain_base",
            )

    def _fork(self, entry: _Entry, other: _Entry) -> ChainError:
        return ChainError(
            f"{self.lineage.owner} signed versions {other.link.policy_version} and "
            f"{entry.link.policy_version} that cannot follow each other",
            reason="chain_fork",
            evidence=(other.signed, entry.signed),
        )

    # --- internals ----------------------------------------------------------------------------------------

    def _entries(self) -> Iterator[_Entry]:
        for version in self._versions.values():
            yield from version.entries()

    def _head(self) -> _Entry | None:
        return next(reversed(self._versions.values())).first if self._versions else None

    def _newest_anchor(self) -> _Entry | None:
        return self._versions[self._anchors[-1]].anchor if self._anchors else None

    def _leads_on(self, version: int) -> bool:
        """Whether deltas lead from this version to the newest."""
        if version not in self._versions:
            return False
        return all(each.delta is not None for number, each in self._versions.items() if number > version)

    def _since_anchor(self) -> int:
        newest = self._anchors[-1] if self._anchors else -1
        return sum(1 for number in self._versions if number >= newest)

    def _forget_old(self) -> None:
        """Keep what came since the last anchor but one, as far as the number of links allows."""
        if len(self._anchors) >= 2:
            while next(iter(self._versions)) < self._anchors[-2]:
                self._forget_oldest()
        while len(self) > MAX_CHAIN_LINKS and next(iter(self._versions)) < self._anchors[-1]:
            self._forget_oldest()
        oldest = next(iter(self._versions.values()))
        if oldest.anchor is not None:
            oldest.delta = None  # its base is forgotten

    def _forget_oldest(self) -> None:
        number = next(iter(self._versions))
        del self._versions[number]
        if number in self._anchors:
            self._anchors.remove(number)
