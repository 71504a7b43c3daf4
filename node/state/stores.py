"""Small durable state that must outlive `kill -9`: sequence numbers, and which envelopes were counted.

- `write_atomically`: temporary file, fsync, rename, fsync of the folder.
- `SequenceStore`: numbers are reserved on disk by the block before the first of them is used, so a node that
is killed jumps over the rest of its block and never repeats a number. They follow the clock and bear the
process's mark, so that a number of another process with the same key is known as such.
- `ReplayStore`: every admission is appended to a journal before it counts; now and then the journal is folded
into a snapshot. State that is damaged is not trusted: the node then refuses all that was created before it
noticed, rather than count something twice.

One process owns a store at a time (the node holds the lock of its home). Not for bulk data such as
checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import DecodeError, FreshnessError, ReplayError
from protocol.identity import PEER_ID_CHARS
from protocol.messages import PeerId
from protocol.replay import ReplayCache

__all__ = [
    "MemorySequence",
    "ReplayGuard",
    "ReplayStore",
    "SequenceSource",
    "SequenceStore",
    "complete_file",
    "read_file",
    "remove_leftovers",
    "sync",
    "write_atomically",
]


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data` at once and durably. Raises OSError, and then `path` is as it was."""
    with complete_file(path, data, mode) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def complete_file(path: Path, data: bytes, mode: int = 0o600) -> Iterator[Path]:
    """A file beside `path` with all of `data` on the disk, for the block to move to `path`; then the folder
    is synced too. Raises OSError, and when anything fails the file is deleted."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)  # whatever the umask was
            os.fsync(descriptor)
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, max_bytes: int = -1) -> bytes:
    """What is in `path`, empty where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


def remove_leftovers(folder: Path) -> int:
    """Delete temporary files that a kill left in `folder`, and say how many. For its owning process only."""
    leftovers = list(folder.glob(".*.tmp"))
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)


# --- sequence numbers ---------------------------------------------------------------------------------------


class SequenceSource(Protocol):
    """Gives the sequence number of each envelope of this node."""

    def next(self) -> int:
        """A number above every earlier one."""
        ...

    def made_elsewhere(self, number: int) -> bool:
        """Whether this number of this node's key was certainly made by another process that runs beside this
        one: not here, and not before."""
        ...


class MemorySequence:
    """Counts from `start`: for simulations, where nothing outlives the process."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def next(self) -> int:
        number = self._next
        self._next += 1
        return number

    def made_elsewhere(self, number: int) -> bool:
        """See `SequenceSource`."""
        return number >= self._next


class SequenceStore:
    """Strictly increasing numbers across restarts, kills and a lost file.

    A number is a tick, at least the clock's milliseconds, and below it a mark that each process draws. The
    file holds the first number that is *not* reserved; without it numbers rise as long as the clock does.
    """

    MARKS = 1024
    BLOCK_TICKS = 60_000
    """One write a minute."""

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._path = path
        self._now_ms = now_ms
        self._mark = secrets.randbelow(self.MARKS)
        self._tick = max(-(-self._reserved() // self.MARKS), now_ms())
        """The first that is free."""
        self._reserved_until = self._tick
        self._first = self._tick * self.MARKS

    def next(self) -> int:
        """A number above every earlier one. Once per block it waits for the disk; raises OSError when that
        fails, and then no number was used."""
        tick = max(self._tick, self._now_ms())
        if tick >= self._reserved_until:
            until = tick + self.BLOCK_TICKS
            write_atomically(self._path, f"{until * self.MARKS}\n".encode("ascii"))
            self._reserved_until = until
        self._tick = tick + 1
        return tick * self.MARKS + self._mark

    def made_elsewhere(self, number: int) -> bool:
        """See `SequenceSource`. One pair of processes in 1,024 draws the same mark and does not notice."""
        return number >= self._first and number % self.MARKS != self._mark

    def _reserved(self) -> int:
        """The stored number; 0 when there is none or it is damaged, the clock then decides."""
        text = read_file(self._path, 32)
        return int(text) if text.endswith(b"\n") and text[:-1].isdigit() and len(text) < 20 else 0


# --- replays ------------------------------------------------------------------------------------------------


class ReplayGuard(Protocol):
    """What counts an envelope once: `ReplayCache` in memory, `ReplayStore` over restarts."""

    def admit(self, sender: PeerId, sequence: int, created_at: int, expires_at: int, now_ms: int) -> None:
        """Count, or raise `ReplayError` or `FreshnessError`."""
        ...


_JOURNAL_RECORD = struct.Struct(f">{PEER_ID_CHARS}sQQQQI")
_CHECKED_BYTES = _JOURNAL_RECORD.size - 4


class ReplayStore:
    """A `ReplayCache` that survives restarts: `<folder>/replay.snapshot` and `<folder>/replay.journal`.

    The journal is written, not fsynced, per envelope: written bytes outlive the process. After a power cut
    the last seconds of it may be missing, which the snapshot's checksum and the records' cannot tell; what
    was counted in those seconds could count again until it expires.
    """

    def __init__(self, folder: Path, cache: ReplayCache, now_ms: int, journal_records: int = 16_384) -> None:
        self._snapshot_path = folder / "replay.snapshot"
        self._journal_path = folder / "replay.journal"
        self._cache = cache
        self._journal_records = journal_records
        self._written = 0
        self._fold_at = journal_records
        """Records in the journal at which it is folded next."""
        self.damaged = False
        """Whether old state had to be distrusted at the start."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._restore(now_ms)
        self._journal = self._fold()

    def admit(self, sender: PeerId, sequence: int, created_at: int, expires_at: int, now_ms: int) -> None:
        """As `ReplayCache.admit`, and what is admitted stays so after a restart. Raises OSError when the disk
        refuses: the envelope then must not be used, and will be taken for a replay."""
        self._cache.admit(sender, sequence, created_at, expires_at, now_ms)
        record = _JOURNAL_RECORD.pack(sender.encode("ascii"), sequence, created_at, expires_at, now_ms, 0)
        checked = record[:_CHECKED_BYTES]
        written = self._journal.write(checked + zlib.crc32(checked).to_bytes(4, "big"))
        if written != _JOURNAL_RECORD.size:
            self._journal.truncate(self._written * _JOURNAL_RECORD.size)
            raise OSError(
                errno.ENOSPC, f"{self._journal_path} took {written} of {_JOURNAL_RECORD.size} bytes"
            )
        self._written += 1
        if self._written >= self._fold_at:
            full = self._journal
            try:
                self._journal = self._fold()
            except OSError:  # this one is admitted, and the old journal goes on
                self._fold_at = self._written + self._journal_records // 16 + 1
            else:
                full.close()

    def close(self) -> None:
        """Fold the journal and release it. Idempotent. Where the disk refuses, the journal stays for the next
        start."""
        if not self._journal.closed:
            self._journal.close()
            with contextlib.suppress(OSError):
                self._fold().close()

    def _fold(self) -> IO[bytes]:
        """Write the snapshot, then begin an empty journal. A kill in between only replays records that the
        snapshot already holds."""
        write_atomically(self._snapshot_path, self._cache.snapshot())
        descriptor = os.open(
            self._journal_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._written = 0
        self._fold_at = self._journal_records
        return open(descriptor, "ab", buffering=0)

    def _restore(self, now_ms: int) -> None:
        if snapshot := read_file(self._snapshot_path):
            try:
                self._cache.restore(snapshot)
            except DecodeError:
                self._distrust(now_ms)
        journal = read_file(self._journal_path)
        whole = len(journal) - len(journal) % _JOURNAL_RECORD.size
        for at in range(0, whole, _JOURNAL_RECORD.size):
            record = journal[at : at + _JOURNAL_RECORD.size]
            name, sequence, created_at, expires_at, admitted_at, crc = _JOURNAL_RECORD.unpack(record)
            if crc != zlib.crc32(record[:_CHECKED_BYTES]):
                self._distrust(now_ms)
                return
            with contextlib.suppress(ReplayError, FreshnessError):  # already in the snapshot
                self._cache.admit(name.decode("ascii"), sequence, created_at, expires_at, admitted_at)

    def _distrust(self, now_ms: int) -> None:
        """What was counted is unknown: refuse everything that can have been created before now."""
        self.damaged = True
        self._cache.refuse_up_to(now_ms + MAX_CLOCK_SKEW_MS)
