"""What each author announced: its slots per window, bounded whatever peers do.

For: equivocation (one group per author, window and slot), duplicates and the skip share. Filled by
`Verifier.observe` from every announcement whose slot is genuine, bodies or not. Per author at most
`slots_per_window` entries of the few windows that are still fresh. Peers that have earned trust and strangers
have a shelf each, on which the author whose last receipt is oldest leaves first: identities are free, so a
flood of them displaces strangers only. Not for versions: those are in the book about peers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import FIFOCache

from protocol.codec import encode
from protocol.messages import Announcement, PeerId

__all__ = ["Ledger"]

MAX_AUTHORS = 512
"""On each shelf."""


@dataclass(slots=True)
class _Slot:
    receipt: bytes
    judged: bool = False


_Windows = dict[int, dict[int, _Slot]]
"""Slots by window and number."""


class Ledger:
    """Receipts by author, window and slot. `max_windows` bounds how many windows of an author are kept,
    `has_standing` says who is no stranger."""

    def __init__(
        self,
        max_windows: int,
        has_standing: Callable[[PeerId], bool],
        max_authors: int = MAX_AUTHORS,
    ) -> None:
        self._max_windows = max_windows
        self._has_standing = has_standing
        self._known: FIFOCache[PeerId, _Windows] = FIFOCache(max_authors)
        self._strangers: FIFOCache[PeerId, _Windows] = FIFOCache(max_authors)

    def __len__(self) -> int:
        shelves = (*self._known.values(), *self._strangers.values())
        return sum(len(slots) for windows in shelves for slots in windows.values())

    def claim(self, sender: PeerId, announcement: Announcement) -> bool:
        """Enter the slot's first receipt. False when the slot already has a different one. Repeating is
        harmless."""
        windows = self._of(sender)
        self._known.pop(sender, None)
        self._strangers.pop(sender, None)
        (self._known if self._has_standing(sender) else self._strangers)[sender] = windows
        prompt = announcement.prompt
        slots = windows.setdefault(prompt.window, {})
        while len(windows) > self._max_windows:
            del windows[min(windows)]
        receipt = hashlib.sha256(encode(announcement)).digest()
        first = slots.setdefault(prompt.slot, _Slot(receipt))
        return first.receipt == receipt

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

    def slots_seen(self, sender: PeerId, window: int) -> tuple[int, ...]:
        """The slots of a window for which this author gave a receipt, ascending."""
        return tuple(sorted(self._of(sender).get(window, ())))

    def _of(self, sender: PeerId) -> _Windows:
        return self._known.get(sender) or self._strangers.get(sender) or {}

    def _slot(self, sender: PeerId, announcement: Announcement) -> _Slot | None:
        prompt = announcement.prompt
        return self._of(sender).get(prompt.window, {}).get(prompt.slot)
