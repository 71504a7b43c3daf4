"""Who signs: one Ed25519 key whose public half is the libp2p peer id, so that a signature *is* the peer id.

`Identity` holds the private half of this node and signs; `verify` and `public_key` work on the peer id of
anybody. A peer id is the base58 text of `00 24 08 01 12 20 || public key` (an identity multihash of the
libp2p protobuf), always 52 characters for Ed25519. Other key types are unknown here: no giant RSA key is ever
parsed. Not for files: `node/state/keys.py` keeps the key on disk. What is signed is built by
`protocol.codec.framed`.

The key never leaves through `repr`, logs, `copy` or pickling; only `to_libp2p` hands it out, for the key
file.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import KeyFileError, SignatureError
from protocol.messages import PeerId

__all__ = ["PEER_ID_CHARS", "SIGNATURE_BYTES", "Identity", "peer_id_of", "public_key", "verify"]

PEER_ID_CHARS = 52
SIGNATURE_BYTES = 64

_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PRIVATE_KEY_PREFIX = bytes.fromhex("08011240")
_SEED_BYTES = 32
_PUBLIC_KEY_BYTES = 32
_FIELD_PRIME = 2**255 - 19
_D = -121665 * pow(121666, -1, _FIELD_PRIME) % _FIELD_PRIME


class Identity:
    """This node's key pair. Equal and hashed by its peer id."""

    __slots__ = ("_key", "peer_id")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != _SEED_BYTES:
            raise KeyFileError(f"an Ed25519 seed has {_SEED_BYTES} bytes, this one {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer_id: PeerId = peer_id_of(self._key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Identity:
        """A new key from the operating system's random source."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The key of 32 given bytes: for tests and simulations that must repeat."""
        return cls(seed)

    @classmethod
    def from_libp2p(cls, data: bytes) -> Identity:
        """Read a libp2p `PrivateKey` protobuf, exactly `08 01 12 40 || seed || public key`.

        Raises `KeyFileError` for any other key type or layout, and when the public half does not fit the
        seed.
        """
        expected_bytes = len(_PRIVATE_KEY_PREFIX) + _SEED_BYTES + _PUBLIC_KEY_BYTES
        if len(data) != expected_bytes or not data.startswith(_PRIVATE_KEY_PREFIX):
            raise KeyFileError(
                f"not an Ed25519 libp2p private key: {len(data)} bytes, expected {expected_bytes} that begin "
                f"with {_PRIVATE_KEY_PREFIX.hex(' ')}"
            )
        identity = cls(data[len(_PRIVATE_KEY_PREFIX) : len(_PRIVATE_KEY_PREFIX) + _SEED_BYTES])
        if public_key(identity.peer_id) != data[-_PUBLIC_KEY_BYTES:]:
            raise KeyFileError("the public half of the private key does not belong to its seed")
        return identity

    def to_libp2p(self) -> bytes:
        """The libp2p `PrivateKey` protobuf. Secret: only for the key file."""
        return _PRIVATE_KEY_PREFIX + self._key.private_bytes_raw() + public_key(self.peer_id)

    def sign(self, data: bytes) -> bytes:
        """64 bytes of signature over `data`, which must come from `protocol.codec.framed`."""
        return self._key.sign(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.peer_id == other.peer_id

    def __hash__(self) -> int:
        return hash(self.peer_id)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a private key is never pickled or copied; pass the Identity object itself")


def peer_id_of(public_key_bytes: bytes) -> PeerId:
    """Peer id of a 32-byte Ed25519 public key."""
    return base58.b58encode(_PEER_ID_PREFIX + public_key_bytes).decode("ascii")


@functools.lru_cache(maxsize=4096)
def public_key(peer_id: PeerId) -> bytes:
    """The 32 bytes of public key inside `peer_id`. Raises `SignatureError` when there is no usable key in
    it."""
    if len(peer_id) != PEER_ID_CHARS:
        raise SignatureError(f"a peer id has {PEER_ID_CHARS} characters, this one {len(peer_id)}")
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        raise SignatureError(f"the peer id {peer_id!r} is not base58") from None
    if len(data) != len(_PEER_ID_PREFIX) + _PUBLIC_KEY_BYTES or not data.startswith(_PEER_ID_PREFIX):
        raise SignatureError(f"the peer id {peer_id!r} does not hold an Ed25519 key")
    key = data[len(_PEER_ID_PREFIX) :]
    if _is_weak(key):
        raise SignatureError(f"the peer id {peer_id!r} holds a weak key under which anybody could sign")
    return key


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made by the key of `peer_id`. Never raises."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key(peer_id)).verify(signature, data)
    except (InvalidSignature, SignatureError, ValueError):
        return False
    return True


def _is_weak(key: bytes) -> bool:
    """Whether `key` is a point of small order or written in a non-canonical way.

    Under a small-order key a signature made by anybody verifies for many messages, and a second spelling of a
    key would be a second peer id for it. OpenSSL accepts both. The orders 1, 2 and 4 have y = 1, -1 and 0;
    for order 8, doubling must give y = 0, that is x^2 = -y^2 on the curve -x^2 + y^2 = 1 + d x^2 y^2.
    """
    y = int.from_bytes(key, "little") & (2**255 - 1)
    if y >= _FIELD_PRIME or y in (0, 1, _FIELD_PRIME - 1):
        return True
    y2 = y * y % _FIELD_PRIME
    return (2 * y2 - 1 + _D * y2 * y2) % _FIELD_PRIME == 0
