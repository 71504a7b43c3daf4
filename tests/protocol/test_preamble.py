"""What two versions can always read of each other."""

from __future__ import annotations

import pytest

from protocol.errors import DecodeError, VersionError
from protocol.preamble import MAX_PREAMBLE_BYTES, PREAMBLE, require_same_version


def test_the_form_is_fixed_for_all_versions() -> None:
    assert PREAMBLE == b"murmuration/2"
    require_same_version(PREAMBLE)


@pytest.mark.parametrize(
    ("preamble", "sentence"),
    [
        (b"murmuration/1", "it speaks protocol version 1, this node 2: it must be updated"),
        (b"murmuration/3", "it speaks protocol version 3, this node 2: update this node"),
        (b"murmuration/999999999", "it speaks protocol version 999999999, this node 2: update this node"),
        (b"murmuration/0", "it speaks protocol version 0, this node 2: it must be updated"),
    ],
)
def test_another_version_is_one_sentence(preamble: bytes, sentence: str) -> None:
    assert len(preamble) <= MAX_PREAMBLE_BYTES
    with pytest.raises(VersionError) as raised:
        require_same_version(preamble)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    "preamble",
    [
        b"",
        b"murmuration/",
        b"murmuration/2\n",
        b"murmuration/-1",
        b"murmuration/" + b"1" * 10,
        b"other/1",
        b"\xc1",
    ],
)
def test_what_is_no_preamble_is_refused(preamble: bytes) -> None:
    with pytest.raises(DecodeError):
        require_same_version(preamble)
