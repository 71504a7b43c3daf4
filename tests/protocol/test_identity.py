"""Keys, peer ids and signatures, against RFC 8032 and the libp2p encoding worked out by hand."""

from __future__ import annotations

import copy
import pickle

import base58
import pytest

from protocol.errors import KeyFileError, SignatureError
from protocol.identity import Identity, peer_id_of, public_key, verify

# RFC 8032, section 7.1, test 2
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_signature_is_the_one_of_rfc_8032() -> None:
    identity = Identity.from_seed(SEED)
    assert public_key(identity.peer_id) == PUBLIC
    assert identity.sign(b"\x72") == SIGNATURE
    assert verify(identity.peer_id, b"\x72", SIGNATURE)
    assert not verify(identity.peer_id, b"\x73", SIGNATURE)


def test_peer_id_is_base58_of_the_identity_multihash() -> None:
    peer_id = Identity.from_seed(SEED).peer_id
    assert peer_id.startswith("12D3KooW")
    assert len(peer_id) == 52
    assert base58.b58decode(peer_id) == bytes.fromhex("002408011220") + PUBLIC


def test_libp2p_key_is_prefix_seed_and_public_key() -> None:
    identity = Identity.from_seed(SEED)
    data = identity.to_libp2p()
    assert data == bytes.fromhex("08011240") + SEED + PUBLIC
    assert Identity.from_libp2p(data) == identity


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes.fromhex("08011240") + SEED,
        bytes.fromhex("08001240") + SEED + PUBLIC,
        bytes.fromhex("08011240") + SEED + PUBLIC + b"\x00",
        bytes.fromhex("08011240") + SEED + bytes(32),
    ],
    ids=["empty", "short", "rsa", "trailing", "foreign public half"],
)
def test_malformed_private_key_is_refused_without_showing_it(data: bytes) -> None:
    with pytest.raises(KeyFileError) as raised:
        Identity.from_libp2p(data)
    assert SEED.hex() not in str(raised.value)
    assert repr(SEED)[2:20] not in str(raised.value)


def test_two_generated_keys_differ() -> None:
    assert Identity.generate() != Identity.generate()


def test_identity_shows_only_its_peer_id() -> None:
    identity = Identity.from_seed(SEED)
    for text in (repr(identity), str(identity), f"{identity}", repr([identity])):
        assert identity.peer_id in text
        assert SEED.hex() not in text
        assert repr(SEED)[2:-1] not in text
    assert not hasattr(identity, "__dict__")
    assert not hasattr(identity, "seed")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_identity_is_never_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(Identity.from_seed(SEED), protocol)


def test_identity_is_never_copied() -> None:
    identity = Identity.from_seed(SEED)
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never pickled or copied"):
            make(identity)


@pytest.mark.parametrize("seed_bytes", [0, 31, 33, 64])
def test_seed_of_wrong_length_is_refused(seed_bytes: int) -> None:
    with pytest.raises(KeyFileError, match=str(seed_bytes)):
        Identity.from_seed(bytes(seed_bytes))


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "12D3KooW",
        "12D3KooW" + "0" * 44,  # 0 is not in the base58 alphabet
        "12D3KooW" + "z" * 44,
        "1" * 52,
        "é" * 52,
        Identity.from_seed(SEED).peer_id + "1",
        Identity.from_seed(SEED).peer_id[:-1] + "\n",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_what_is_no_ed25519_peer_id_is_refused(peer_id: str) -> None:
    with pytest.raises(SignatureError):
        public_key(peer_id)
    assert not verify(peer_id, b"", bytes(64))


WEAK_KEYS = {
    "order 1": "0100000000000000000000000000000000000000000000000000000000000000",
    "order 2": "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "order 4": "0000000000000000000000000000000000000000000000000000000000000000",
    "order 4, other sign": "0000000000000000000000000000000000000000000000000000000000000080",
    "order 8": "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "order 8, other": "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "order 8, other sign": "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "second spelling of order 4": "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "second spelling of y = 2": "efffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
}


@pytest.mark.parametrize("key", WEAK_KEYS.values(), ids=WEAK_KEYS)
def test_weak_public_key_is_refused(key: str) -> None:
    """Under the key of order 1 the signature (R = identity, s = 0) verifies for every message."""
    peer_id = peer_id_of(bytes.fromhex(key))
    with pytest.raises(SignatureError):
        public_key(peer_id)
    assert not verify(peer_id, b"anything", bytes.fromhex(WEAK_KEYS["order 1"]) + bytes(32))


def test_signature_with_s_above_the_group_order_is_refused() -> None:
    """s + L would be a second signature of the same message."""
    group_order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(SIGNATURE[32:], "little") + group_order
    forged = SIGNATURE[:32] + s.to_bytes(32, "little")
    assert not verify(Identity.from_seed(SEED).peer_id, b"\x72", forged)


@pytest.mark.parametrize("signature", [b"", SIGNATURE[:63], SIGNATURE + b"\x00"])
def test_signature_of_wrong_length_is_refused(signature: bytes) -> None:
    assert not verify(Identity.from_seed(SEED).peer_id, b"\x72", signature)
