"""The rule for our own DHT records, the same for every transport: never send what others would refuse.

What a record must be is `protocol.records`; a transport gets that rule as its `RecordValidator`.
"""

from __future__ import annotations

from node.transport.base import RecordValidator
from protocol.constants import MAX_DHT_RECORD_BYTES
from protocol.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["require_storable"]


def require_storable(validate: RecordValidator | None, key: str, value: bytes, expires_at: int) -> None:
    """Raise `LocalProtocolError` for a record that other nodes would refuse."""
    if len(value) > MAX_DHT_RECORD_BYTES:
        raise LocalProtocolError(
            f"the DHT record {key} has {len(value)} bytes, the cap is {MAX_DHT_RECORD_BYTES}; "
            "large values go over streams"
        )
    if validate is None:
        return
    try:
        validate(key, value, expires_at)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"other nodes would refuse our DHT record {key}: {error}") from error
