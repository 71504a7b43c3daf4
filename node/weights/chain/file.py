"""A chain on disk: signed links, one behind the other, in a file that is only appended to and now and then
rewritten.

Each record is a length, a checksum and a canonical SignedLink. An append that a kill cut short leaves a
record that cannot be read at the end of the file; it is cut off, and nobody has heard of its link, because
links are announced once they are on the disk. Anything else that cannot be read is damage. Not for which
links fit together (`chain.py`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from node.state.stores import sync, write_atomically
from protocol.codec import decode, encode
from protocol.errors import DecodeError, OurFault, RemoteProtocolError
from protocol.links import MAX_SIGNED_LINK_BYTES
from protocol.messages import SignedLink

__all__ = ["ChainFile"]

_HEAD = struct.Struct("<II")
_MAX_RECORD_BYTES = _HEAD.size + MAX_SIGNED_LINK_BYTES
_SLACK = 64
"""Records beyond twice the needed ones, before the file is rewritten."""


class ChainFile:
    """Links in `path`. One process owns it; one thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = 0
        self._size = 0
        """Bytes of whole records."""

    def read(self) -> list[SignedLink]:
        """All links, oldest first; none without a file. Raises OurFault when the file is damaged, or cannot
        be read."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise OurFault(f"{self.path} cannot be read: {error.strerror}") from None
        links = []
        at = 0
        while at < len(data):
            try:
                signed, length = _read(data[at : at + _MAX_RECORD_BYTES])
            except RemoteProtocolError:
                if not _cut_short(data[at:]):
                    raise OurFault(
                        f"{self.path} is damaged at byte {at} of {len(data)}, with signed links behind it; "
                        f"restore it, or remove it and publish under another identity"
                    ) from None
                break
            links.append(signed)
            at += length
        self._records, self._size = len(links), at
        return links

    def append(self, signed: SignedLink, *, durable: bool) -> None:
        """Write one link behind the others; on the disk on return where `durable`. Raises OSError, and then
        the file is as it was."""
        data = _record(signed)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self._size)  # what a kill or a full disk left
            try:
                written = os.pwrite(descriptor, data, self._size)
                if written != len(data):
                    raise OSError(f"{self.path} took {written} of {len(data)} bytes; free some disk")
                if durable:
                    os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._size)
                raise
        finally:
            os.close(descriptor)
        if durable and not self._size:
            sync(self.path.parent)
        self._records += 1
        self._size += len(data)

    def tidy(self, links: Sequence[SignedLink]) -> None:
        """Rewrite the file with only these links, when most of its records are not among them. Raises
        OSError, and then the file is as it was."""
        if self._records > 2 * len(links) + _SLACK:
            data = b"".join(map(_record, links))
            write_atomically(self.path, data)
            self._records, self._size = len(links), len(data)


def _record(signed: SignedLink) -> bytes:
    data = encode(signed)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _cut_short(rest: bytes) -> bool:
    """Whether the end of a file may be what a kill left of one append: nothing stands behind its record."""
    if len(rest) > _MAX_RECORD_BYTES:
        return False
    if len(rest) < _HEAD.size or not any(rest):
        return True
    length, _ = _HEAD.unpack_from(rest)
    return _HEAD.size + int(length) >= len(rest)


def _read(data: bytes) -> tuple[SignedLink, int]:
    """The record that `data` begins with, and its length. Raises RemoteProtocolError when it is not whole."""
    if len(data) < _HEAD.size:
        raise DecodeError(f"a record of {len(data)} bytes")
    length, checksum = _HEAD.unpack_from(data)
    record = data[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(record) != checksum:
        raise DecodeError("a record that does not have its checksum")
    return decode(record, SignedLink, max_bytes=MAX_SIGNED_LINK_BYTES), _HEAD.size + length
