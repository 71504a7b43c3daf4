"""What each author announced: its slots per window, bounded whatever peers do.

For: equivocation (one group per author, window and slot), duplicates and the skip share. Filled by
`Verifier.observe` from every announcement whose slot is genuine, bodies or not. Per author at most
`slots_per_window` entries of the few windows that are still fresh; the author whose last receipt is oldest
leaves first. Not for versions: those are in the book about peers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cachetools import FIFOCache

from protocol.codec import encode
from protocol.messages import Announcement, PeerId

__all__ = ["Ledger"]

MAX_AUTHORS = 512


@dataclass(slots=True)
class _Slot:
    receipt: bytes
    judged: bool = False


class Ledger:
    """Receipts by author, window and slot. `max_windows` bounds how many windows of an author are kept."""

    def __init__(self, max_windows: int, max_authors: int = MAX_AUTHORS) -> None:
        self._max_windows = max_windows
        self._windows: FIFOCache[PeerId, dict[int, dict[int, _Slot]]] = FIFOCache(max_authors)
        """By author: slots by window and number."""

    def __len__(self) -> int:
        return sum(len(slots) for windows in self._windows.values() for slots in windows.values())

    def claim(self, sender: PeerId, announcement: Announcement) -> bool:
        """Enter the slot's first receipt. False when the slot already has a different one. Repeating is
        harmless."""
        windows = self._windows[sender] = self._windows.get(sender, {})
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
        return tuple(sorted(self._windows.get(sender, {}).get(window, ())))

    def _slot(self, sender: PeerId, announcement: Announcement) -> _Slot | None:
        prompt = announcement.prompt
        return self._windows.get(sender, {}).get(prompt.window, {}).get(prompt.slot)
