"""What is fresh, and the memory that counts each envelope once: in bounded space, whoever floods it.

Fresh, with `now` from the reader's clock: `created_at <= now + MAX_CLOCK_SKEW_MS`, `expires_at > now`, and `0
< expires_at - created_at <= MAX_TTL_MS`. A (sender, sequence) is remembered until `expires_at + horizon_ms`,
so that a clock set back by up to three skews still finds it. Where space runs out, a bound takes the entries'
place:

- one sender above `per_sender`: its lowest sequences go, and it is refused up to the highest of them, its
  `watermark`, from then on; nobody else is touched;
- all above `capacity`: the senders with most entries are cut the same way. Only when each is down to one
entry are whole senders forgotten, those silent for longest, and `floor` is raised to the newest `created_at`
forgotten: a sender that is not known must have created after it.

So a flood costs the flooder, and a flood of identities can make this node refuse more but never count twice.
Not for files: `snapshot` and `restore` are bytes, `node/state/stores.py` keeps them.
"""

from __future__ import annotations

import hashlib
import heapq
import struct

from protocol.constants import MAX_CLOCK_SKEW_MS, MAX_TTL_MS
from protocol.errors import DecodeError, FreshnessError, ReplayError
from protocol.identity import PEER_ID_CHARS
from protocol.messages import PeerId

__all__ = ["REPLAY_HORIZON_MS", "ReplayCache", "check_freshness"]

REPLAY_HORIZON_MS = 3 * MAX_CLOCK_SKEW_MS
_SWEEP_EVERY_MS = MAX_CLOCK_SKEW_MS
_MAGIC = b"murmuration replay 1\n"
_HEAD = struct.Struct(">qI")
_SENDER = struct.Struct(f">{PEER_ID_CHARS}sqqqqI")
_ENTRY = struct.Struct(">QQQ")
_DIGEST_BYTES = 32


def check_freshness(created_at: int, expires_at: int, now_ms: int) -> None:
    """Raise `FreshnessError` unless the three rules at the top of this module hold. All in milliseconds."""
    if created_at - now_ms > MAX_CLOCK_SKEW_MS:
        raise FreshnessError(
            f"created_at {created_at} is {created_at - now_ms} ms in the future, the limit is "
            f"{MAX_CLOCK_SKEW_MS}: the sender's clock or ours is wrong"
        )
    if expires_at <= now_ms:
        raise FreshnessError(f"expires_at {expires_at} was {now_ms - expires_at} ms ago")
    if not 0 < expires_at - created_at <= MAX_TTL_MS:
        raise FreshnessError(f"a life of {expires_at - created_at} ms is outside 1 to {MAX_TTL_MS}")


class _Sender:
    """What is remembered of one sender: `entries` maps sequence to (created_at, expires_at)."""

    __slots__ = ("entries", "floor", "newest", "watermark", "watermark_until")

    def __init__(self, floor: int) -> None:
        self.entries: dict[int, tuple[int, int]] = {}
        self.floor = floor
        self.newest = floor
        """Latest `created_at` ever admitted from it."""
        self.watermark = -1
        self.watermark_until = -1
        """When the last of the dropped entries expires."""

    def drop_lowest(self, count: int) -> int:
        """Let the watermark take the place of the `count` lowest sequences; returns `count`."""
        for sequence in sorted(self.entries)[:count]:
            _, expires_at = self.entries.pop(sequence)
            self.watermark = sequence
            self.watermark_until = max(self.watermark_until, expires_at)
        return count


class ReplayCache:
    """Which envelopes were counted. One admission costs microseconds, a sweep of 65,536 entries some 10
    ms."""

    def __init__(
        self, capacity: int = 65_536, horizon_ms: int = REPLAY_HORIZON_MS, per_sender: int | None = None
    ) -> None:
        if capacity < 1 or horizon_ms < 0:
            raise ValueError(f"capacity {capacity} must be at least 1 and horizon_ms {horizon_ms} at least 0")
        self.capacity = capacity
        self.horizon_ms = horizon_ms
        self.per_sender = max(1, capacity // 16) if per_sender is None else per_sender
        self._senders: dict[PeerId, _Sender] = {}
        self._count = 0
        self._floor = -1
        self._next_sweep_at = 0

    def __len__(self) -> int:
        """Entries held; never above `capacity`."""
        return self._count

    def admit(self, sender: PeerId, sequence: int, created_at: int, expires_at: int, now_ms: int) -> None:
        """Count this envelope, or raise: `FreshnessError` when it is not fresh at `now_ms` (what is expired
        may be forgotten, so only the fresh is judged), `ReplayError` when it was or may have been counted
        before."""
        check_freshness(created_at, expires_at, now_ms)
        if not 0 <= self._next_sweep_at - now_ms <= _SWEEP_EVERY_MS:
            self._sweep(now_ms)
        self._refuse_replay(sender, sequence, created_at)
        if self._count >= self.capacity or len(self._senders) >= self.capacity:
            self._make_room(now_ms)
            self._refuse_replay(sender, sequence, created_at)
        known = self._senders.get(sender)
        if known is None:
            known = self._senders[sender] = _Sender(self._floor)
        known.entries[sequence] = (created_at, expires_at)
        known.newest = max(known.newest, created_at)
        self._count += 1
        if len(known.entries) > self.per_sender:
            self._count -= known.drop_lowest(max(1, self.per_sender // 8))

    def _refuse_replay(self, sender: PeerId, sequence: int, created_at: int) -> None:
        known = self._senders.get(sender)
        floor = self._floor if known is None else known.floor
        if created_at <= floor:
            raise ReplayError(
                f"created_at {created_at} of sequence {sequence} is not after {floor}: up to there this node "
                "cannot tell what it has counted of this sender",
                reason="replay_floor",
            )
        if known is None:
            return
        if sequence in known.entries:
            raise ReplayError(f"sequence {sequence} of {sender} was counted before")
        if sequence <= known.watermark:
            raise ReplayError(
                f"sequence {sequence} of {sender} is not above {known.watermark}: up to there its entries "
                "were dropped for space",
                reason="replay_watermark",
            )

    def refuse_up_to(self, created_at: int) -> None:
        """From now on refuse whatever was created up to this time (ms): for a node whose memory is lost."""
        self._floor = max(self._floor, created_at)
        for known in self._senders.values():
            known.floor = max(known.floor, created_at)

    def _sweep(self, now_ms: int) -> None:
        """Forget what is expired by more than the horizon."""
        keep_after = now_ms - self.horizon_ms
        for sender, known in list(self._senders.items()):
            old = [
                sequence for sequence, (_, expires_at) in known.entries.items() if expires_at <= keep_after
            ]
            for sequence in old:
                del known.entries[sequence]
            self._count -= len(old)
            if not known.entries and known.watermark_until <= keep_after:
                del self._senders[sender]
        self._next_sweep_at = now_ms + _SWEEP_EVERY_MS

    def _make_room(self, now_ms: int) -> None:
        """Sweep, then cut to seven eighths of the capacity, so that the work is shared by many admissions."""
        self._sweep(now_ms)
        target = self.capacity - max(1, self.capacity // 8)
        largest = [(-len(known.entries), sender) for sender, known in self._senders.items()]
        heapq.heapify(largest)
        for _ in range(self._count - target):
            size, sender = largest[0]
            if size >= -1:
                break
            heapq.heapreplace(largest, (size + 1, sender))
        for size, sender in largest:
            known = self._senders[sender]
            self._count -= known.drop_lowest(len(known.entries) + size)
        oldest_last = sorted(self._senders, key=lambda sender: self._senders[sender].newest, reverse=True)
        while self._count > target or len(self._senders) > target:
            forgotten = self._senders.pop(oldest_last.pop())
            self._count -= len(forgotten.entries)
            self._floor = max(self._floor, forgotten.newest)

    def snapshot(self) -> bytes:
        """Everything remembered, for `restore`."""
        parts = [_MAGIC, _HEAD.pack(self._floor, len(self._senders))]
        for sender, known in self._senders.items():
            parts.append(
                _SENDER.pack(
                    sender.encode("ascii"),
                    known.floor,
                    known.newest,
                    known.watermark,
                    known.watermark_until,
                    len(known.entries),
                )
            )
            parts += [_ENTRY.pack(sequence, *times) for sequence, times in known.entries.items()]
        data = b"".join(parts)
        return data + hashlib.sha256(data).digest()

    def restore(self, data: bytes) -> None:
        """Take over what `snapshot` gave, in place of what is held. Raises `DecodeError` when the bytes are
        damaged; what is held then stays."""
        body = data[:-_DIGEST_BYTES]
        if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
            raise DecodeError(f"the replay snapshot of {len(data)} bytes is damaged or of another version")
        floor, sender_count = _HEAD.unpack_from(body, len(_MAGIC))
        at = len(_MAGIC) + _HEAD.size
        senders: dict[PeerId, _Sender] = {}
        for _ in range(sender_count):
            name, floor_of, newest, watermark, watermark_until, entry_count = _SENDER.unpack_from(body, at)
            at += _SENDER.size
            known = senders[name.decode("ascii")] = _Sender(floor_of)
            known.newest, known.watermark, known.watermark_until = newest, watermark, watermark_until
            for sequence, created_at, expires_at in _ENTRY.iter_unpack(
                body[at : at + entry_count * _ENTRY.size]
            ):
                known.entries[sequence] = (created_at, expires_at)
            at += entry_count * _ENTRY.size
        self._senders = senders
        self._floor = floor
        self._count = sum(len(known.entries) for known in senders.values())
        self._next_sweep_at = 0
