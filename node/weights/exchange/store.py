"""Blobs on disk, in verified chunks: what this node made, has fetched, or is fetching.

    add (made here) ----------> <root>.blob + <root>.hashes
    open + write (fetched) ---> <root>.part, renamed to <root>.blob by `seal` once every chunk is there

A chunk is written only after its hash matched, so that whatever is marked as here may be served. Which
chunks a `.part` holds is not written down: they are hashed again when it is opened after a restart, and so a
crash at any point costs time only. The oldest blobs leave when `max_bytes` is reached, pinned ones and those
in use never. Calls block for the time of the disk; `add`, `seal` and `open` of a large leftover belong on a
thread. Not for what a blob means, nor for who asks for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from node.state.stores import sync
from protocol.chunks import (
    HASH_BYTES,
    check_hashes,
    chunk_bytes_for,
    chunk_count,
    chunk_hash,
    chunk_size,
    describe,
)
from protocol.codec import decode, encode
from protocol.constants import MAX_CHAIN_LINKS
from protocol.errors import DecodeError, LimitError, LocalProtocolError, OurFault, RemoteProtocolError
from protocol.messages import ChunkedBlob, Digest

__all__ = ["StoredBlob", "WeightsStore"]

_MAX_DESCRIPTION_BYTES = 1024
_MAX_BLOBS = 4 * MAX_CHAIN_LINKS
"""Blobs in one folder: a byte limit alone lets versions of a tiny policy become a million files."""


class StoredBlob:
    """One blob, whole or in part. Made by `WeightsStore`."""

    def __init__(self, blob: ChunkedBlob, hashes: bytes, path: Path, *, complete: bool) -> None:
        self.blob = blob
        self.hashes = hashes
        self.count = chunk_count(blob)
        self.users = 0
        """Fetches and uploads that need it now; the store keeps it as long."""
        self._path = path
        self._missing = set() if complete else set(range(self.count))
        self._sealed = complete

    @property
    def missing(self) -> int:
        """How many chunks are not here."""
        return len(self._missing)

    @property
    def complete(self) -> bool:
        return not self._missing

    def has(self, index: int) -> bool:
        return 0 <= index < self.count and index not in self._missing

    def here(self) -> list[int]:
        """The chunks that are here, in order."""
        return [index for index in range(self.count) if index not in self._missing]

    def missing_indices(self) -> list[int]:
        """The chunks that are not here, in order."""
        return sorted(self._missing)

    def read(self, index: int) -> bytes:
        """The bytes of a chunk that is here. Raises OurFault when it is not, or the disk fails."""
        if not self.has(index):
            raise OurFault(f"chunk {index} of blob {self.blob.root[:12]} is not here")
        size = chunk_size(self.blob, index)
        try:
            with self._opened() as file:
                data = os.pread(file, size, index * self.blob.chunk_bytes)
        except OSError as error:
            raise OurFault(f"{self._path} cannot be read: {error.strerror}") from None
        if len(data) != size:
            raise OurFault(f"{self._path} is shorter than the {self.blob.size} bytes that it should have")
        return data

    def write(self, index: int, data: bytes | memoryview) -> bool:
        """Check and keep one chunk; False when it was here already. Raises DecodeError (chunk_index,
        chunk_size, chunk_digest), or OurFault when the disk is full."""
        if not 0 <= index < self.count:
            raise DecodeError(f"chunk {index} of {self.count}", reason="chunk_index")
        if len(data) != chunk_size(self.blob, index):
            raise DecodeError(
                f"chunk {index} with {len(data)} bytes instead of {chunk_size(self.blob, index)}",
                reason="chunk_size",
            )
        if chunk_hash(data) != self._hash(index):
            raise DecodeError(
                f"chunk {index} of blob {self.blob.root[:12]} does not have its hash", reason="chunk_digest"
            )
        if index not in self._missing:
            return False
        try:
            with self._opened() as file:
                written = os.pwrite(file, data, index * self.blob.chunk_bytes)
        except OSError as error:
            raise OurFault(f"{self._path} cannot be written: {error.strerror}; free some disk") from None
        if written != len(data):
            raise OurFault(f"{self._path} took {written} of {len(data)} bytes; free some disk")
        self._missing.discard(index)
        return True

    def seal(self) -> None:
        """Make a complete blob durable, under its final name. Does nothing the second time. Raises OurFault
        when the disk does not take it."""
        if self._sealed:
            return
        if self._missing:
            raise LocalProtocolError(f"blob {self.blob.root[:12]} lacks {self.missing} chunks")
        final = self._path.with_suffix(".blob")
        try:
            sync(self._path)
            sync(self._path.with_suffix(".hashes"))
            self._path.rename(final)
            self._path = final
            sync(final.parent)
        except OSError as error:
            raise OurFault(f"{final} cannot be kept: {error.strerror}") from None
        self._sealed = True

    def data(self) -> memoryview:
        """All bytes of a complete blob, mapped from disk rather than read. Raises OurFault when the disk
        fails."""
        if self._missing:
            raise LocalProtocolError(f"blob {self.blob.root[:12]} lacks {self.missing} chunks")
        try:
            with self._opened() as file:
                return memoryview(mmap.mmap(file, self.blob.size, access=mmap.ACCESS_READ))
        except OSError as error:
            raise OurFault(f"{self._path} cannot be read: {error.strerror}") from None

    @contextmanager
    def used(self) -> Iterator[StoredBlob]:
        """Keeps the blob in the store meanwhile."""
        self.users += 1
        try:
            yield self
        finally:
            self.users -= 1

    def rescan(self) -> None:
        """Find out by hashing which chunks the file holds."""
        with self._opened() as file:
            for index in range(self.count):
                size = chunk_size(self.blob, index)
                data = os.pread(file, size, index * self.blob.chunk_bytes)
                if len(data) == size and chunk_hash(data) == self._hash(index):
                    self._missing.discard(index)

    def remove(self) -> None:
        """Delete it from the disk."""
        self._missing = set(range(self.count))
        for suffix in (".blob", ".part", ".hashes"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)

    def _hash(self, index: int) -> bytes:
        return self.hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file, open for one access: a node keeps thousands of blobs, and has few descriptors."""
        file = os.open(self._path, os.O_RDWR)
        try:
            yield file
        finally:
            os.close(file)


class WeightsStore:
    """The blobs in one folder, at most `max_bytes` of them. One process owns the folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        """What all blobs together may take."""
        self._pinned: frozenset[Digest] = frozenset()
        self._blobs: dict[Digest, StoredBlob] = {}
        """Whole ones and those opened since the start, oldest first."""
        self._leftovers: dict[Digest, StoredBlob] = {}
        """Parts of an earlier run, which nobody has asked for yet."""
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    def add(self, data: bytes | memoryview) -> StoredBlob:
        """Keep a whole blob made here; durable on return. Raises LocalProtocolError when it is empty or too
        large to travel, OurFault when it does not fit into the store."""
        if len(data) > self.max_bytes:
            raise OurFault(
                f"{len(data)} bytes of weights; broadcast.keep_gib allows {self.max_bytes}; raise it"
            )
        chunk_bytes = chunk_bytes_for(len(data))
        view = memoryview(data)
        blob, hashes = describe(
            len(data), (view[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))
        )
        known = self._blobs.get(blob.root)
        if known is not None and known.complete:
            known.seal()
            return known
        stored = known or self._leftovers.pop(blob.root, None) or self._create(blob, hashes)
        self._blobs[blob.root] = stored
        for index in stored.missing_indices():
            stored.write(index, view[index * chunk_bytes : (index + 1) * chunk_bytes])
        stored.seal()
        return stored

    def open(self, blob: ChunkedBlob, hashes: bytes) -> StoredBlob:
        """A blob to be filled, with what an earlier attempt left. Raises DecodeError for hashes of another
        blob, LimitError (blob_size) above `max_bytes`, OurFault when pinned blobs leave no room, or the disk
        does not take it."""
        check_hashes(blob, hashes)
        stored = self._blobs.get(blob.root) or self._leftovers.get(blob.root)
        try:
            if stored is None:
                stored = self._create(blob, hashes)
            elif blob.root in self._leftovers:
                stored.rescan()
                del self._leftovers[blob.root]
        except OSError as error:  # never the fault of the peer that it comes from
            raise OurFault(f"{error}; make room in {self._folder}, or let this user write there") from None
        self._blobs[blob.root] = stored
        return stored

    def require_small(self, blob: ChunkedBlob) -> None:
        """Raise LimitError (blob_size) for a blob that is larger than the whole store."""
        if blob.size > self.max_bytes:
            raise LimitError(
                f"a blob of {blob.size} bytes, while broadcast.keep_gib allows {self.max_bytes} in all",
                reason="blob_size",
            )

    def get(self, root: Digest) -> StoredBlob | None:
        """A blob that is here or being fetched."""
        return self._blobs.get(root)

    def leftover(self, root: Digest) -> StoredBlob | None:
        """What an earlier run left of a blob that nobody opened yet; its `hashes` are checked, its chunks
        are not."""
        return self._leftovers.get(root)

    def pin(self, roots: Collection[Digest]) -> None:
        """From now on these are kept, and only these."""
        self._pinned = frozenset(roots)

    @property
    def held_bytes(self) -> int:
        """Sizes of all blobs, incomplete ones counted as a whole."""
        return sum(stored.blob.size for blobs in (self._blobs, self._leftovers) for stored in blobs.values())

    def _create(self, blob: ChunkedBlob, hashes: bytes) -> StoredBlob:
        self._make_room(blob)
        path = self._folder / f"{blob.root}.part"
        try:
            head = encode(blob)
            path.with_suffix(".hashes").write_bytes(len(head).to_bytes(2, "little") + head + hashes)
            with path.open("wb") as file:
                file.truncate(blob.size)
        except OSError as error:
            raise OurFault(f"{path} cannot be created: {error.strerror}") from None
        return StoredBlob(blob, hashes, path, complete=False)

    def _make_room(self, blob: ChunkedBlob) -> None:
        self.require_small(blob)
        needed = self.held_bytes + blob.size - self.max_bytes
        too_many = len(self._leftovers) + len(self._blobs) + 1 - _MAX_BLOBS
        leaving = []
        for blobs in (self._leftovers, self._blobs):
            for root, stored in blobs.items():
                if needed <= 0 and too_many <= 0:
                    break
                if root not in self._pinned and not stored.users:
                    leaving.append((blobs, root))
                    needed -= stored.blob.size
                    too_many -= 1
        if needed > 0:
            raise OurFault(
                f"no room for a blob of {blob.size} bytes: those in use take {self.held_bytes} of the "
                f"{self.max_bytes} that broadcast.keep_gib allows; raise it"
            )
        for blobs, root in leaving:
            blobs.pop(root).remove()

    def _load(self) -> None:
        """Read the folder; what does not fit together is deleted."""
        for path in sorted(self._folder.glob("*.hashes"), key=lambda path: (path.stat().st_mtime_ns, path)):
            stored = _read_description(path)
            if stored is not None:
                (self._blobs if stored.complete else self._leftovers)[stored.blob.root] = stored
        known = self._blobs.keys() | self._leftovers.keys()
        for path in self._folder.iterdir():
            if path.stem not in known and path.suffix in (".blob", ".part", ".hashes"):
                path.unlink()


def _read_description(path: Path) -> StoredBlob | None:
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:2], "little")
        blob = decode(data[2 : 2 + length], ChunkedBlob, max_bytes=_MAX_DESCRIPTION_BYTES)
        hashes = data[2 + length :]
        check_hashes(blob, hashes)
        if blob.root != path.stem:
            return None
        for suffix in (".blob", ".part"):
            body = path.with_suffix(suffix)
            if body.exists() and body.stat().st_size == blob.size:
                return StoredBlob(blob, hashes, body, complete=suffix == ".blob")
    except (OSError, RemoteProtocolError):
        return None
    return None
