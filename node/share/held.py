"""The announcements a node holds until they expire: for its own slow reader and for neighbours.

Bounded in bytes and number, per author and in total. Above an author's bound that author's oldest go; above
the total, the oldest of whoever takes most. So a flood displaces itself. What was not read yet is a set of
digests into this store: a reader that stalls loses nothing that is still held. No I/O and no clock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from protocol.messages import Announcement, Digest, PeerId

__all__ = ["SHORT_DIGEST_BYTES", "AnnouncementStore", "Heard", "HeldAnnouncement", "short_digest"]

SHORT_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Heard:
    """An announcement that passed signature, freshness, replay, membership and schema."""

    sender: PeerId
    announcement: Announcement
    arrived_at: int
    """Our clock, ms: which of two equal contributions came first is never decided by a claimed time."""
    envelope: Digest
    """SHA-256 of the envelope that carried it."""


@dataclass(frozen=True, slots=True)
class HeldAnnouncement:
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
        self._held: dict[bytes, HeldAnnouncement] = {}
        self._unread: dict[bytes, None] = {}
        self._authors: dict[PeerId, _Author] = {}
        self._bytes = 0
        self.dropped_unread = 0
        """Announcements that were displaced before they were read."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, short: bytes) -> bool:
        return short in self._held

    def has_room(self, author: PeerId, size: int) -> bool:
        """Whether one more of `size` bytes by `author` would displace nothing."""
        if len(self._held) >= self._max_count or self._bytes + size > self._max_bytes:
            return False
        held = self._authors.get(author)
        return held is None or (
            len(held.shorts) < self._author_count and held.bytes + size <= self._author_bytes
        )

    def add(self, held: HeldAnnouncement, *, unread: bool) -> None:
        """Hold one more, displacing what is above a bound."""
        short = short_digest(held.heard.envelope)
        author = self._authors.setdefault(held.heard.sender, _Author())
        self._held[short] = held
        author.shorts[short] = None
        author.bytes += len(held.data)
        self._bytes += len(held.data)
        if unread:
            self._unread[short] = None
        while len(author.shorts) > self._author_count or author.bytes > self._author_bytes:
            self._displace(next(iter(author.shorts)))
        if len(self._held) > self._max_count or self._bytes > self._max_bytes:
            self._make_room()

    def next_unread(self, now_ms: int) -> Heard | None:
        """The oldest unexpired announcement not read so far; it counts as read."""
        while self._unread:
            short = next(iter(self._unread))
            del self._unread[short]
            held = self._held[short]
            if held.expires_at > now_ms:
                return held.heard
        return None

    def short_digests(self) -> list[bytes]:
        """Of everything held, in order of arrival."""
        return list(self._held)

    def missing(
        self, held_elsewhere: set[bytes], *, max_count: int, max_bytes: int, now_ms: int
    ) -> list[bytes]:
        """Envelopes that are not in `held_elsewhere`, oldest first, up to the bounds but at least one."""
        envelopes: list[bytes] = []
        total_bytes = 0
        for short, held in self._held.items():
            if short in held_elsewhere or held.expires_at <= now_ms:
                continue
            total_bytes += len(held.data)
            if envelopes and (len(envelopes) >= max_count or total_bytes > max_bytes):
                break
            envelopes.append(held.data)
        return envelopes

    def expire(self, now_ms: int) -> None:
        """Let go of what is no longer fresh."""
        for short in [short for short, held in self._held.items() if held.expires_at <= now_ms]:
            self._remove(short)

    def _make_room(self) -> None:
        """Cut to seven eighths, so that the search for the largest author is shared by many additions."""
        count_target, bytes_target = self._max_count * 7 // 8, self._max_bytes * 7 // 8
        largest = [(-author.bytes, peer_id) for peer_id, author in self._authors.items()]
        heapq.heapify(largest)
        while len(self._held) > count_target or self._bytes > bytes_target:
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
        held = self._held.pop(short)
        self._unread.pop(short, None)
        self._bytes -= len(held.data)
        author = self._authors[held.heard.sender]
        del author.shorts[short]
        author.bytes -= len(held.data)
        if not author.shorts:
            del self._authors[held.heard.sender]
