"""The first frame of a handshake: which protocol version speaks, readable by every version.

    both sides: PREAMBLE out, the other's in --require_same_version--> the handshake of that version follows

It comes before any record, so that fields a later version adds never stand between two nodes and the sentence
that tells them to update. Its form, `murmuration/<decimal version>`, never changes.
"""

from __future__ import annotations

import re

from protocol.constants import DOMAIN, PROTOCOL_VERSION
from protocol.errors import DecodeError, VersionError

__all__ = ["MAX_PREAMBLE_BYTES", "PREAMBLE", "require_same_version"]

MAX_PREAMBLE_BYTES = 32
PREAMBLE = DOMAIN + b"/%d" % PROTOCOL_VERSION

_PREAMBLE = re.compile(re.escape(DOMAIN) + rb"/([0-9]{1,9})")


def require_same_version(preamble: bytes) -> None:
    """Raise `VersionError`, one sentence for people, when the other side speaks another version, and
    `DecodeError` when this is no preamble."""
    match = _PREAMBLE.fullmatch(preamble)
    if match is None:
        raise DecodeError(f"a handshake begins with no protocol version but with {len(preamble)} other bytes")
    theirs = int(match.group(1))
    if theirs != PROTOCOL_VERSION:
        raise VersionError(
            f"it speaks protocol version {theirs}, this node {PROTOCOL_VERSION}: "
            f"{'update this node' if theirs > PROTOCOL_VERSION else 'it must be updated'}"
        )
