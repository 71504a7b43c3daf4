"""Content-addressed chunks: how a blob is cut, and the hashes by which each chunk is checked on arrival.

All chunks have `chunk_bytes`, a power of two, but the last. `root` binds size, chunk size and the hash of
every chunk, so one signed root makes each chunk verifiable by itself, from whomever it comes. A plain list of
hashes: half a mebibyte for the largest blob, fetched once; a tree would save that and cost a path for every
chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from protocol.constants import DOMAIN, MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_WEIGHTS_BYTES, MIN_CHUNK_BYTES
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import ChunkedBlob, Digest

__all__ = [
    "HASH_BYTES",
    "check_hashes",
    "chunk_bytes_for",
    "chunk_count",
    "chunk_hash",
    "chunk_size",
    "describe",
]

HASH_BYTES = 32
WANTED_CHUNKS = 256
"""A blob is cut into about so many chunks: enough to pipeline over a few hops."""


def chunk_bytes_for(size: int) -> int:
    """The chunk size of a blob of `size` bytes. Raises LocalProtocolError above MAX_WEIGHTS_BYTES."""
    if not 0 < size <= MAX_WEIGHTS_BYTES:
        raise LocalProtocolError(f"a blob of {size} bytes cannot travel; at most {MAX_WEIGHTS_BYTES} can")
    wanted = 1 << max(0, -(-size // WANTED_CHUNKS) - 1).bit_length()
    return min(max(wanted, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def chunk_count(blob: ChunkedBlob) -> int:
    """Chunks of a blob. Raises DecodeError when its chunk size is no power of two, or makes too many."""
    if blob.chunk_bytes & (blob.chunk_bytes - 1):
        raise DecodeError(
            f"chunks of {blob.chunk_bytes} bytes; a power of two is needed", reason="chunk_size"
        )
    count = -(-blob.size // blob.chunk_bytes)
    if count > MAX_CHUNKS:
        raise DecodeError(f"{count} chunks; at most {MAX_CHUNKS} are allowed", reason="chunk_count")
    return count


def chunk_size(blob: ChunkedBlob, index: int) -> int:
    """Bytes of chunk `index`."""
    return min(blob.chunk_bytes, blob.size - index * blob.chunk_bytes)


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """SHA-256 of one chunk."""
    return hashlib.sha256(chunk).digest()


def describe(size: int, chunks: Iterable[bytes | memoryview]) -> tuple[ChunkedBlob, bytes]:
    """A blob's description and the hashes of its chunks, which are cut by `chunk_bytes_for(size)`."""
    hashes = b"".join(map(chunk_hash, chunks))
    chunk_bytes = chunk_bytes_for(size)
    return ChunkedBlob(root=_root(size, chunk_bytes, hashes), size=size, chunk_bytes=chunk_bytes), hashes


def check_hashes(blob: ChunkedBlob, hashes: bytes) -> None:
    """Raise DecodeError unless these are the hashes of this blob's chunks."""
    if len(hashes) != HASH_BYTES * chunk_count(blob):
        raise DecodeError(
            f"{len(hashes)} bytes of hashes for {chunk_count(blob)} chunks", reason="chunk_hashes"
        )
    if _root(blob.size, blob.chunk_bytes, hashes) != blob.root:
        raise DecodeError(f"hashes that are not those of blob {blob.root[:12]}", reason="chunk_hashes")


def _root(size: int, chunk_bytes: int, hashes: bytes) -> Digest:
    sha = hashlib.sha256(DOMAIN + b" chunks 1")
    sha.update(size.to_bytes(8, "little") + chunk_bytes.to_bytes(8, "little"))
    sha.update(hashes)
    return sha.hexdigest()
