"""hivemind's DHT behind our rules: what its nodes store, answer and believe.

A value travels as `key length, key, value`, because hivemind sends only the SHA-1 of a key and a storing node
could not check that a record belongs under it. `RecordGate` refuses everything else on storing and reading
nodes; `guard` puts rate limits and shape checks before hivemind parses a peer's request, and bounds what it
keeps: its own storage is unbounded, forgets a newer record when an older one is stored again, and lets an
empty dictionary with a far expiry hide any value.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgpack
from google.protobuf.message import DecodeError as ProtobufDecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

from node.transport.base import RecordValidator, TransportLimits
from node.transport.limits import OTHER_PEERS, Refusals
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.errors import DecodeError, LimitError, RemoteProtocolError
from protocol.messages import PeerId

__all__ = ["DhtGuard", "open_dht", "unwrap", "wrap"]

_MAX_KEY_BYTES = 256
_MAX_VALUE_BYTES = 2 + _MAX_KEY_BYTES + MAX_DHT_RECORD_BYTES
_MAX_REQUEST_BYTES = 1024 * 1024
_MAX_REQUEST_KEYS = 256
_MAX_NEAREST = 64
_NODE_ID_BYTES = DHTID.HASH_NBYTES
_REGULAR = b"\xc0"
"""hivemind's tag of a value without sub-keys: msgpack nil."""
_CACHE_RECORDS = 256
_RPC_TIMEOUT_S = 3.0

_REQUESTS = {
    "DHTProtocol.rpc_ping": dht_pb2.PingRequest,
    "DHTProtocol.rpc_store": dht_pb2.StoreRequest,
    "DHTProtocol.rpc_find": dht_pb2.FindRequest,
}
_asking_peer: contextvars.ContextVar[PeerId] = contextvars.ContextVar("asking_peer", default=OTHER_PEERS)

UnaryHandler = Callable[[bytes, PeerID], Awaitable[bytes]]


def wrap(key: str, value: bytes) -> bytes:
    """What is stored for `value` under `key`."""
    name = key.encode()
    return len(name).to_bytes(2, "big") + name + value


def unwrap(stored: bytes) -> tuple[str, bytes]:
    """Key and value in what was stored. Raises `DecodeError` or `LimitError`."""
    end = 2 + int.from_bytes(stored[:2], "big")
    if len(stored) > _MAX_VALUE_BYTES or end > 2 + _MAX_KEY_BYTES:
        raise LimitError(f"a DHT record of {len(stored)} bytes is above its cap", reason="oversize")
    if end > len(stored):
        raise DecodeError("a DHT record is cut short")
    try:
        return stored[2:end].decode(), stored[end:]
    except UnicodeDecodeError:
        raise DecodeError("the key of a DHT record is not text") from None


class _Storage(DHTLocalStorage):
    """hivemind's storage without sub-keys, where only a later expiry replaces a record."""

    expiration_heap: list[Any]
    """hivemind's entries by expiry, those of replaced records among them."""

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: object = None) -> bool:
        held = self.get(key)
        if subkey is not None or (held is not None and held.expiration_time >= expiration_time):
            return False
        stored: bool = super().store(key, value, expiration_time)
        if len(self.expiration_heap) > 2 * len(self.data) + 1024:  # entries of replaced records pile up
            self.expiration_heap = list(self.key_to_heap.values())
            heapq.heapify(self.expiration_heap)
        return stored


class RecordGate(RecordValidatorBase):
    """Our record rule where hivemind asks for it: before storing for a peer and before believing one."""

    def __init__(self, validate: RecordValidator | None, refusals: Refusals) -> None:
        self._validate = validate
        self._refusals = refusals

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._check(record)
        except RemoteProtocolError as error:
            self._refusals.add(_asking_peer.get(), error.reason)
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        if record.subkey != _REGULAR:
            raise DecodeError("DHT records have no sub-keys here", reason="record_key")
        if len(record.value) > _MAX_VALUE_BYTES + 8:
            raise LimitError(f"a DHT record of {len(record.value)} bytes is above its cap", reason="oversize")
        try:
            stored = msgpack.unpackb(record.value, max_bin_len=_MAX_VALUE_BYTES)
        except (ValueError, msgpack.exceptions.UnpackException):
            raise DecodeError("a DHT record is not msgpack") from None
        if not isinstance(stored, bytes):
            raise DecodeError("a DHT record holds no bytes")
        key, value = unwrap(stored)
        if DHTID.generate(source=key).to_bytes() != record.key:
            raise DecodeError("a DHT record lies under another key", reason="record_key")
        if not math.isfinite(record.expiration_time):
            raise LimitError("a DHT record never expires", reason="freshness")
        if self._validate is not None:
            self._validate(key, value, round(record.expiration_time * 1000))


class DhtGuard:
    """Stands before hivemind's request handlers; one for all restarts, so that no peer regains its burst."""

    def __init__(self, limits: TransportLimits, refusals: Refusals) -> None:
        self._refusals = refusals
        self._buckets = limits.buckets(limits.dht_keys_per_s, limits.dht_burst)

    def handler(self, request_type: type[Any], inner: UnaryHandler) -> UnaryHandler:
        """`inner` for requests that are within rate and shape. hivemind tells the peer what is raised."""

        async def guarded(data: bytes, remote_id: PeerID) -> bytes:
            peer_id = remote_id.to_base58()
            try:
                self._check(peer_id, request_type, data)
            except RemoteProtocolError as error:
                self._refusals.add(peer_id, error.reason)
                raise
            _asking_peer.set(peer_id)  # each request runs in a task, hence a context, of its own
            return await inner(data, remote_id)

        return guarded

    def _check(self, peer_id: PeerId, request_type: type[Any], data: bytes) -> None:
        if len(data) > _MAX_REQUEST_BYTES:
            raise LimitError(f"a DHT request of {len(data)} bytes is above its cap", reason="dht_size")
        now_s = asyncio.get_running_loop().time()
        if not self._buckets.take(peer_id, now_s):  # before parsing, which costs too
            raise LimitError(f"{peer_id} sends more DHT requests than it may", reason="dht_rate")
        try:
            request = request_type.FromString(data)
        except ProtobufDecodeError:
            raise DecodeError("a DHT request is not protobuf", reason="dht_decode") from None
        keys = () if request_type is dht_pb2.PingRequest else request.keys
        if len(keys) > _MAX_REQUEST_KEYS:
            raise LimitError(f"a DHT request names {len(keys)} keys", reason="dht_size")
        if len(keys) > 1 and not self._buckets.take(peer_id, now_s, len(keys) - 1):
            raise LimitError(f"{peer_id} asks for more DHT keys than it may", reason="dht_rate")
        if len(request.peer.node_id) not in (0, _NODE_ID_BYTES):
            raise DecodeError("a DHT node id has the wrong length", reason="dht_decode")
        if any(len(key) != _NODE_ID_BYTES for key in keys):
            raise DecodeError("a DHT key has the wrong length", reason="dht_decode")
        if request_type is dht_pb2.StoreRequest and any(subkey != _REGULAR for subkey in request.subkeys):
            raise DecodeError("DHT records have no sub-keys here", reason="record_key")


async def open_dht(
    p2p: P2P,
    peer_id: PeerId,
    validate: RecordValidator | None,
    guard: DhtGuard,
    limits: TransportLimits,
    refusals: Refusals,
) -> DHTNode:
    """A DHT node over a running daemon, knowing nobody. Its id derives from the peer id, so that neighbours
    recognise it after a restart."""
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=peer_id),
        record_validator=RecordGate(validate, refusals),
        wait_timeout=_RPC_TIMEOUT_S,
        cache_locally=False,  # a cached record would hide the owner's newer one until it expires
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
    )
    node.protocol.storage = _Storage(limits.dht_records)
    node.protocol.cache = _Storage(_CACHE_RECORDS)
    node.protocol.call_find = _only_plain_values(node.protocol.call_find)
    handlers = p2p._client.control.unary_handlers
    for name, request_type in _REQUESTS.items():
        handlers[name] = guard.handler(request_type, handlers[name])
    return node


def _only_plain_values(call_find: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """hivemind's `call_find` without dictionaries in the answer and with few neighbours."""

    async def filtered(peer: PeerID, keys: Collection[DHTID]) -> Any:
        _asking_peer.set(peer.to_base58())
        response = await call_find(peer, keys)
        if not response:
            return response
        return {
            key: (
                found if found is not None and isinstance(found.value, bytes) else None,
                dict(list(nearest.items())[:_MAX_NEAREST]),
            )
            for key, (found, nearest) in response.items()
        }

    return filtered
