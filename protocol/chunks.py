"""Content-addressed chunks: how a blob is cut, the hashes by which each chunk is checked on arrival, and the
frames in which chunks are asked for and sent.

All chunks have `chunk_bytes`, a power of two, but the last. `root` binds size, chunk size and the hash of
every chunk, so one signed root makes each chunk verifiable by itself, from whomever it comes. A plain list of
hashes: half a mebibyte for the largest blob, fetched once; a tree would save that and cost a path for every
chunk.

    downloader                                uploader
        ChunksRequest ------------------------>
        <------------------------ ChunksReply (hashes, which chunks are here)
        Pull (got so far, want these), Cancel, Got -->
        <------------------------ Have, Piece, Tell

A frame is a kind byte and little-endian u32s; only a Piece carries more. Not for who asks whom for which
chunk, nor for telling whether a frame fits the state of an exchange: `node/weights/`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.constants import DOMAIN, MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_WEIGHTS_BYTES, MIN_CHUNK_BYTES
from protocol.errors import DecodeError, LocalProtocolError
from protocol.messages import ChunkedBlob, Digest

__all__ = [
    "HASH_BYTES",
    "MAX_ASKED",
    "PIECE_PREFIX_BYTES",
    "Cancel",
    "Frame",
    "Got",
    "Have",
    "Piece",
    "Pull",
    "Tell",
    "bitmap_of",
    "check_hashes",
    "chunk_bytes_for",
    "chunk_count",
    "chunk_hash",
    "chunk_size",
    "decode_from_downloader",
    "decode_from_uploader",
    "describe",
    "encode_frame",
    "indices_of",
    "max_frame_bytes",
]

HASH_BYTES = 32
MAX_ASKED = 256
"""Chunks that one downloader may have asked for and not received on one stream. Changing breaks: a peer that
asks for more is refused."""
PIECE_PREFIX_BYTES = 5
WANTED_CHUNKS = 512
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


# --- frames of an exchange ---


@dataclass(frozen=True, slots=True)
class Have:
    """uploader -> downloader: these chunks can be asked for as well now. None: a sign of life."""

    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """uploader -> downloader: one chunk, not yet checked against its hash."""

    index: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Tell:
    """uploader -> downloader: tell me with Got which chunks you have, now and later."""


@dataclass(frozen=True, slots=True)
class Pull:
    """downloader -> uploader: `received` pieces came so far on this stream; send these chunks too. Without
    chunks it acknowledges and is a sign of life."""

    received: int
    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cancel:
    """downloader -> uploader: these chunks are not needed any more, if they were not sent yet."""

    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Got:
    """downloader -> uploader that asked with Tell: these chunks are here now, whoever sent them."""

    indices: Sequence[int]


Frame = Have | Piece | Tell | Pull | Cancel | Got
_HAVE, _PIECE, _TELL, _PULL, _CANCEL, _GOT = range(1, 7)
_U32_BYTES = 4


def max_frame_bytes(blob: ChunkedBlob) -> int:
    """The longest frame of this blob's exchange: a whole chunk, or a Have or Got of all chunks."""
    return PIECE_PREFIX_BYTES + max(blob.chunk_bytes, _U32_BYTES * max(MAX_ASKED, chunk_count(blob)))


def encode_frame(frame: Frame) -> bytes:
    """The bytes of one frame. What a receiver would refuse is not checked: the caller knows its blob."""
    match frame:
        case Have(indices):
            return _numbers(_HAVE, indices)
        case Piece(index, data):
            return b"".join((bytes((_PIECE,)), index.to_bytes(_U32_BYTES, "little"), data))
        case Tell():
            return bytes((_TELL,))
        case Pull(received, indices):
            return _numbers(_PULL, (received & 0xFFFFFFFF, *indices))
        case Cancel(indices):
            return _numbers(_CANCEL, indices)
        case Got(indices):
            return _numbers(_GOT, indices)


def decode_from_uploader(data: bytes, blob: ChunkedBlob) -> Have | Piece | Tell:
    """A frame that an uploader may send. Raises DecodeError (frame_kind, frame_size, chunk_index,
    chunk_size)."""
    kind = data[0] if data else 0
    if kind == _PIECE:
        if len(data) < PIECE_PREFIX_BYTES:
            raise DecodeError(f"a piece of {len(data)} bytes", reason="frame_size")
        index = int.from_bytes(data[1:PIECE_PREFIX_BYTES], "little")
        if index >= chunk_count(blob):
            raise DecodeError(f"chunk {index} of {chunk_count(blob)}", reason="chunk_index")
        piece = memoryview(data)[PIECE_PREFIX_BYTES:]
        if len(piece) != chunk_size(blob, index):
            raise DecodeError(
                f"chunk {index} with {len(piece)} bytes instead of {chunk_size(blob, index)}",
                reason="chunk_size",
            )
        return Piece(index, piece)
    if kind == _HAVE:
        return Have(_indices(data[1:], blob, chunk_count(blob)))
    if kind == _TELL and len(data) == 1:
        return Tell()
    raise DecodeError(f"frame of kind {kind} from an uploader", reason="frame_kind")


def decode_from_downloader(data: bytes, blob: ChunkedBlob) -> Pull | Cancel | Got:
    """A frame that a downloader may send. Raises DecodeError (frame_kind, frame_size, chunk_index)."""
    kind = data[0] if data else 0
    if kind == _PULL:
        if len(data) < 1 + _U32_BYTES:
            raise DecodeError(f"a pull of {len(data)} bytes", reason="frame_size")
        received = int.from_bytes(data[1 : 1 + _U32_BYTES], "little")
        return Pull(received, _indices(data[1 + _U32_BYTES :], blob, MAX_ASKED))
    if kind == _CANCEL:
        return Cancel(_indices(data[1:], blob, MAX_ASKED))
    if kind == _GOT:
        return Got(_indices(data[1:], blob, chunk_count(blob)))
    raise DecodeError(f"frame of kind {kind} from a downloader", reason="frame_kind")


def bitmap_of(indices: Iterable[int], count: int) -> bytes:
    """A bit for each of `count` chunks, the first in the lowest bit of the first byte."""
    bitmap = bytearray(-(-count // 8))
    for index in indices:
        bitmap[index >> 3] |= 1 << (index & 7)
    return bytes(bitmap)


def indices_of(bitmap: bytes, count: int) -> list[int]:
    """The chunks whose bits are set. Raises DecodeError for another length or a bit beyond the last chunk."""
    if len(bitmap) != -(-count // 8):
        raise DecodeError(f"a bitmap of {len(bitmap)} bytes for {count} chunks", reason="have_size")
    if count % 8 and bitmap[-1] >> (count % 8):
        raise DecodeError(f"a bitmap with chunks beyond the {count} that exist", reason="chunk_index")
    return [index for index in range(count) if bitmap[index >> 3] >> (index & 7) & 1]


def _numbers(kind: int, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<B{len(numbers)}I", kind, *numbers)


def _indices(data: bytes, blob: ChunkedBlob, most: int) -> tuple[int, ...]:
    count, odd = divmod(len(data), _U32_BYTES)
    if odd or count > most:
        raise DecodeError(
            f"{len(data)} bytes of chunk numbers; at most {most} are allowed", reason="frame_size"
        )
    indices = struct.unpack(f"<{count}I", data)
    if indices and max(indices) >= chunk_count(blob):
        raise DecodeError(f"chunk {max(indices)} of {chunk_count(blob)}", reason="chunk_index")
    return indices
