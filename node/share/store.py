"""The announcements that a node stores until they expire: for its own slow reader and for neighbours.

Bounded in bytes and number, per author and in total. Above an author's bound that author's oldest go; above
the total, the oldest of whoever takes most. So a flood displaces itself. What was not read yet is a set of
digests into this store: a reader that stalls loses nothing that is still stored. No I/O and no clock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from node.share.heard import Heard
from protocol.messages import Digest, PeerId

__all__ = ["SHORT_DIGEST_BYTES", "AnnouncementStore", "StoredAnnouncement", "short_digest"]

SHORT_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredAnnouncement:
    """What was heard, with the bytes that prove it."""

    heard: Heard
    data: bytes
    expires_at: int


def short_digest(envelope: Digest) -> bytes:
    """The first 8 bytes of an envelope's digest, as `ReconcileRequest.held` carries them."""
    return bytes.fromhex(envelope[: 2 * SHORT_DIGEST_BYTES])


class _Author:
    __slots__ = ("bytes", "shorts")

    def __init__(self) -> None:
        self.shorts: dict[bytes, None] = {}
        self.bytes = 0


class AnnouncementStore:
    """Unexpired announcements by short digest, in order of arrival."""

    def __init__(self, *, max_count: int, max_bytes: int, author_count: int, author_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._author_count = author_count
        self._author_bytes = author_bytes
        self._stored: dict[bytes, StoredAnnouncement] = {}
        self._unread: dict[bytes, None] = {}
        self._authors: dict[PeerId, _Author] = {}
        self._bytes = 0
        self.dropped_unread = 0
        """Announcements that were displaced before they were read."""

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, short: bytes) -> bool:
        return short in self._stored

    def has_room(self, author: PeerId, size: int) -> bool:
        """Whether one more of `size` bytes by `author` would displace nothing."""
        if len(self._stored) >= self._max_count or self._bytes + size > self._max_bytes:
            return False
        known = self._authors.get(author)
        return known is None or (
            len(known.shorts) < self._author_count and known.bytes + size <= self._author_bytes
        )

    def add(self, stored: StoredAnnouncement, *, unread: bool) -> None:
        """Store one more, displacing what is above a bound."""
        short = short_digest(stored.heard.envelope)
        author = self._authors.setdefault(stored.heard.sender, _Author())
        self._stored[short] = stored
        author.shorts[short] = None
        author.bytes += len(stored.data)
        self._bytes += len(stored.data)
        if unread:
            self._unread[short] = None
        while len(author.shorts) > self._author_count or author.bytes > self._author_bytes:
            self._displace(next(iter(author.shorts)))
        if len(self._stored) > self._max_count or self._bytes > self._max_bytes:
            self._make_room()

    def next_unread(self, now_ms: int) -> Heard | None:
        """The oldest unexpired announcement not read so far; it counts as read."""
        while self._unread:
            short = next(iter(self._unread))
            del self._unread[short]
            stored = self._stored[short]
            if stored.expires_at > now_ms:
                return stored.heard
        return None

    def short_digests(self) -> list[bytes]:
        """Short digests of all that is stored, in order of arrival."""
        return list(self._stored)

    def missing(
        self, known_elsewhere: set[bytes], *, max_count: int, max_bytes: int, now_ms: int
    ) -> list[bytes]:
        """Envelopes that are not in `known_elsewhere`, oldest first, up to the bounds but at least one."""
        envelopes: list[bytes] = []
        total_bytes = 0
        for short, stored in self._stored.items():
            if short in known_elsewhere or stored.expires_at <= now_ms:
                continue
            total_bytes += len(stored.data)
            if envelopes and (len(envelopes) >= max_count or total_bytes > max_bytes):
                break
            envelopes.append(stored.data)
        return envelopes

    def expire(self, now_ms: int) -> None:
        """Let go of what is no longer fresh."""
        for short in [short for short, stored in self._stored.items() if stored.expires_at <= now_ms]:
            self._remove(short)

    def _make_room(self) -> None:
        """Cut to seven eighths, so that the search for the largest author is shared by many additions."""
        count_target, bytes_target = self._max_count * 7 // 8, self._max_bytes * 7 // 8
        largest = [(-author.bytes, peer_id) for peer_id, author in self._authors.items()]
        heapq.heapify(largest)
        while len(self._stored) > count_target or self._bytes > bytes_target:
            _, peer_id = largest[0]
            author = self._authors[peer_id]
            self._displace(next(iter(author.shorts)))
            if author.shorts:
                heapq.heapreplace(largest, (-author.bytes, peer_id))
            else:
                heapq.heappop(largest)

    def _displace(self, short: bytes) -> None:
        if short in self._unread:
            self.dropped_unread += 1
        self._remove(short)

    def _remove(self, short: bytes) -> None:
        stored = self._stored.pop(short)
        self._unread.pop(short, None)
        self._bytes -= len(stored.data)
        author = self._authors[stored.heard.sender]
        del author.shorts[short]
        author.bytes -= len(stored.data)
        if not author.shorts:
            del self._authors[stored.heard.sender]
