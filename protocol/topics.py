"""Names on the network: topics of envelopes, stream protocols, DHT keys, all with the protocol's version.

Two protocol versions therefore never read each other's bytes; they meet in the handshake only, which tells
them so. Keys have one owner each, `murmuration/2/<kind>/<swarm id>/<peer id>`, and `parse_key` is the only
reader of that shape: what it refuses is never stored. Not for building local paths.
"""

from __future__ import annotations

import re
from enum import StrEnum

from protocol.constants import DOMAIN, PROTOCOL_VERSION
from protocol.errors import DecodeError, SignatureError, VersionError
from protocol.identity import public_key
from protocol.messages import Digest, PeerId, Record

__all__ = [
    "ANNOUNCE_PROTOCOL",
    "BLOB_PROTOCOL",
    "CHAIN_PROTOCOL",
    "CHARTER_PROTOCOL",
    "CHUNKS_PROTOCOL",
    "HELLO_PROTOCOL",
    "MERGE_PROTOCOL",
    "RECONCILE_PROTOCOL",
    "ROLLOUT_PROTOCOL",
    "TASK_PROTOCOL",
    "RecordKey",
    "RecordKind",
    "announcement_topic",
    "parse_key",
    "peer_key",
]

_NAME = DOMAIN.decode("ascii")
ANNOUNCE_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/announce"
"""Gossip: envelopes with an Announcement, each once, to a few neighbours."""
BLOB_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/blob"
"""Content-addressed bodies: BlobRequest, BlobReply, frames."""
CHAIN_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/chain"
"""Versions of a lineage: ChainRequest, ChainReply, SignedLinks."""
CHARTER_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/charter"
"""The swarm's charter, for whoever wants to join, and its annex: two frames, Charter and AnnexReply."""
CHUNKS_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/chunks"
"""Exchange of one blob's chunks: ChunksRequest, ChunksReply, then frames of `protocol.chunks`."""
HELLO_PROTOCOL = f"/{_NAME}/hello"
"""Handshake: preambles (`protocol/preamble.py`), then Hello, HelloReply. The one name without a version, so
that two versions can tell each other."""
MERGE_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/merge"
"""Contributions to a merge: MergeRequest, MergeReply, SignedLinks, SignedRemovals."""
RECONCILE_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/reconcile"
"""Repair of gossip, which is lossy: ReconcileRequest, ReconcileReply, envelopes."""
ROLLOUT_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/rollout"
"""One rollout of a receipt: RolloutRequest, RolloutReply."""
TASK_PROTOCOL = f"/{_NAME}/{PROTOCOL_VERSION}/task"
"""A task in a file, for whoever joins: TaskRequest, TaskReply, frames."""

_KEY = re.compile(rf"{_NAME}/([0-9]{{1,9}})/([a-z]{{1,16}})/([0-9a-f]{{64}})/([1-9A-HJ-NP-Za-km-z]{{52}})")


class RecordKind(StrEnum):
    """What lies under a DHT key."""

    PEER = "peer"


class RecordKey(Record, frozen=True):
    """A DHT key taken apart. Only `owner` may write under it."""

    kind: RecordKind
    swarm_id: Digest
    owner: PeerId

    def __str__(self) -> str:
        return f"{_NAME}/{PROTOCOL_VERSION}/{self.kind.value}/{self.swarm_id}/{self.owner}"


def announcement_topic(swarm_id: Digest) -> str:
    """What envelopes with the swarm's announcements are signed for."""
    return f"{_NAME}/{PROTOCOL_VERSION}/{swarm_id}/announcements"


def peer_key(swarm_id: Digest, owner: PeerId) -> str:
    """DHT key of a node's PeerRecord."""
    return str(RecordKey(RecordKind.PEER, swarm_id, owner))


def parse_key(key: str) -> RecordKey:
    """Take a DHT key apart. Raises `DecodeError` for an unknown shape or kind, `VersionError` for another
    protocol version, `SignatureError` when its owner is no Ed25519 peer id."""
    match = _KEY.fullmatch(key) if len(key) <= 256 else None
    if match is None:
        raise DecodeError(f"no DHT key of this protocol: {key[:64]!r}", reason="record_key")
    version, kind, swarm_id, owner = match.groups()
    if version != str(PROTOCOL_VERSION):
        raise VersionError(
            f"the DHT key is of protocol version {version}, this node speaks {PROTOCOL_VERSION}"
        )
    if kind not in tuple(RecordKind):
        raise DecodeError(
            f"no record of kind {kind!r} exists; known: {', '.join(RecordKind)}", reason="record_key"
        )
    try:
        public_key(owner)
    except SignatureError as error:
        raise SignatureError(f"the DHT key has no owner: {error}", reason="record_key") from None
    return RecordKey(RecordKind(kind), swarm_id, owner)
