"""Golden bytes per protocol version: decoded, encoded again, identical."""

from __future__ import annotations

import pytest

from protocol.charter import decode_charter, swarm_id
from protocol.codec import completions_digest, decode, encode
from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import open_envelope
from tests.protocol.golden_v1 import GOLDEN_V1
from tests.protocol.make_golden import golden
from tests.protocol.samples import CHARTER, GROUP, NOW_MS, RECORDS, TOPIC

SWARM_ID_V1 = "aa49197ab81ab5d681ff9efb8042aa63d7469d019ffd110482bd9b1f6be3e81c"
COMPLETIONS_V1 = "9e8ca4e9700e4787e1f19e3dab04e73dd3372c09a57e2ad9cfbe51e067f2e9c5"


def test_samples_still_give_the_bytes_of_version_1() -> None:
    assert PROTOCOL_VERSION == 1
    assert golden() == GOLDEN_V1


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_golden_bytes_decode_and_encode_again(record) -> None:
    data = bytes.fromhex(GOLDEN_V1[type(record).__name__])
    decoded = decode(data, type(record), max_bytes=len(data))
    assert decoded == record
    assert encode(decoded) == data


def test_golden_signatures_hold() -> None:
    assert decode_charter(bytes.fromhex(GOLDEN_V1["Charter"])) == CHARTER
    envelope = open_envelope(
        bytes.fromhex(GOLDEN_V1["Envelope"]), swarm_id=SWARM_ID_V1, topic=TOPIC, now_ms=NOW_MS
    )
    assert envelope.payload == b"payload"


def test_golden_digests() -> None:
    assert swarm_id(CHARTER) == SWARM_ID_V1
    assert completions_digest(GROUP.rollouts) == COMPLETIONS_V1


def test_announcement_takes_little() -> None:
    """400 bytes are the aim; names of fields and base58 cost the rest, an announcement goes out once a
    slot."""
    assert len(bytes.fromhex(GOLDEN_V1["Announcement"])) < 640
