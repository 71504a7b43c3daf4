"""What each author announced: its slots per window and its newest version, bounded whatever peers do.

For: equivocation (one group per author, window and slot), duplicates, the skip share, and the newest version
of a lineage. Filled by `Verifier.observe` from every announcement whose slot is genuine, bodies or not. Per
author at most `slots_per_window` entries of the few windows that are still fresh; authors leave in order of
last use.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from protocol.codec import encode
from protocol.messages import Announcement, Lineage, PeerId

__all__ = ["Ledger"]

MAX_AUTHORS = 512
MAX_LINEAGES_PER_AUTHOR = 4


@dataclass(slots=True)
class _Slot:
    receipt: bytes
    judged: bool = False


@dataclass(slots=True)
class _Author:
    windows: dict[int, dict[int, _Slot]] = field(default_factory=dict)
    versions: OrderedDict[Lineage, int] = field(default_factory=OrderedDict)


class Ledger:
    """Receipts by author, window and slot. `max_windows` bounds how many windows of an author are kept."""

    def __init__(self, max_windows: int, max_authors: int = MAX_AUTHORS) -> None:
        self._max_windows = max_windows
        self._max_authors = max_authors
        self._authors: OrderedDict[PeerId, _Author] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(slots) for author in self._authors.values() for slots in author.windows.values())

    def claim(self, sender: PeerId, announcement: Announcement) -> bool:
        """Enter the slot's first receipt. False when the slot already has a different one. Repeating is
        harmless."""
        author = self._author(sender)
        prompt = announcement.prompt
        slots = author.windows.setdefault(prompt.window, {})
        while len(author.windows) > self._max_windows:
            del author.windows[min(author.windows)]
        receipt = hashlib.sha256(encode(announcement)).digest()
        first = slots.setdefault(prompt.slot, _Slot(receipt))
        if first.receipt != receipt:
            return False
        versions = author.versions
        versions[announcement.lineage] = max(
            versions.get(announcement.lineage, 0), announcement.policy_version
        )
        versions.move_to_end(announcement.lineage)
        while len(versions) > MAX_LINEAGES_PER_AUTHOR:
            versions.popitem(last=False)
        return True

    def start_judging(self, sender: PeerId, announcement: Announcement) -> bool:
        """Mark a claimed slot as judged or being judged. False when it already was."""
        slot = self._slot(sender, announcement)
        if slot is None:
            return True
        before, slot.judged = slot.judged, True
        return not before

    def forget_judging(self, sender: PeerId, announcement: Announcement) -> None:
        """The judging came to nothing for a reason of our own; the group may be judged again."""
        slot = self._slot(sender, announcement)
        if slot is not None:
            slot.judged = False

    def newest_version(self, sender: PeerId, lineage: Lineage) -> int:
        """Newest version the sender announced for this lineage, 0 before the first."""
        author = self._authors.get(sender)
        return author.versions.get(lineage, 0) if author is not None else 0

    def slots_seen(self, sender: PeerId, window: int) -> tuple[int, ...]:
        """The slots of a window for which this author gave a receipt, ascending."""
        author = self._authors.get(sender)
        return tuple(sorted(author.windows.get(window, ()))) if author is not None else ()

    def _author(self, sender: PeerId) -> _Author:
        author = self._authors.setdefault(sender, _Author())
        self._authors.move_to_end(sender)
        while len(self._authors) > self._max_authors:
            self._authors.popitem(last=False)
        return author

    def _slot(self, sender: PeerId, announcement: Announcement) -> _Slot | None:
        author = self._authors.get(sender)
        if author is None:
            return None
        return author.windows.get(announcement.prompt.window, {}).get(announcement.prompt.slot)
