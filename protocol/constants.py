"""Numbers that every peer must share. Tunable numbers live in `node/config.py`, not here.

No environment override. Each line says what changing it breaks; all of them change together with
`PROTOCOL_VERSION`, which is part of every topic name and every handshake.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
"""Changing breaks: every topic name and handshake; nodes of two versions do not talk."""

DOMAIN = b"murmuration"
"""First field under every signature. Changing breaks: all signatures."""

MAX_DEPTH = 16
"""Nesting of any message. Changing breaks: a deeper message is refused by older nodes."""

MAX_ITEMS = 32_768
"""Values, keys included, in one message: bounds the cost of reading it. Changing breaks: messages with more
values (an annex with 4,096 revoked tokens has 4,500) are refused by older nodes."""

MAX_ENVELOPE_BYTES = 64 * 1024
"""Cap of one gossip message. Changing breaks: larger announcements are dropped by others."""

MAX_DHT_RECORD_BYTES = 16 * 1024
"""Cap of one DHT value. Changing breaks: larger records are refused by storing nodes."""

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Cap of one frame on a direct stream. Changing breaks: larger frames close the stream."""

MAX_BLOB_BYTES = 16 * 1024 * 1024
"""Cap of one content-addressed blob (a group body). Changing breaks: larger bodies are not fetched."""

MAX_TASK_BYTES = 32 * 1024 * 1024
"""Cap of one task in a file, code and questions. Changing breaks: larger ones are not fetched."""

MAX_WEIGHTS_BYTES = 16 * 1024**3
"""Cap of one blob that travels in chunks (an anchor or a delta). Changing breaks: larger ones are refused."""

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 16 * 1024, 1024 * 1024
"""Smallest and largest chunk, powers of two. Changing breaks: blobs in other chunks are refused."""

MAX_CHUNKS = 16_384
"""Chunks of one blob: half a mebibyte of hashes. Changing breaks: blobs in more chunks are refused."""

MAX_CHAIN_LINKS = 1024
"""Links from an anchor to the head of a chain. Changing breaks: longer chains are refused."""

MAX_CONTRIBUTIONS = 64
"""Authors in one merge. Changing breaks: nodes with another number merge other weights."""

MAX_REMOVED_TAGS = 32
"""Contributions that one removal names. Changing breaks: longer removals are refused."""

MAX_CLOCK_SKEW_MS = 60_000
"""How far `created_at` may lie in the future. Changing breaks: agreement on what is fresh."""

MAX_TTL_MS = 60 * 60 * 1000
"""Longest life of an envelope. Changing breaks: longer-lived envelopes are refused by others."""

MAX_GROUP_ROLLOUTS = 64
"""Rollouts of one group. Changing breaks: larger groups are refused."""

MAX_ROLLOUT_TOKENS = 32_768
"""Tokens of one completion. Changing breaks: longer rollouts are refused."""

MAX_SEGMENTS = 64
"""Segments of one rollout. Changing breaks: longer conversations are refused."""

MAX_REWARD_COMPONENTS = 16
"""Named parts of one reward. Changing breaks: rewards of more parts are refused."""

MAX_COMMITMENT_BYTES = 8 * 1024
"""Commitment of one group. Changing breaks: larger ones are refused."""

MAX_RECEIPT_BYTES = 1024**3
"""Bodies that a member keeps to answer for its receipts. Changing breaks: charters that ask for more are
refused."""

MAX_ENVIRONMENTS = 64
"""Tasks of one swarm. Changing breaks: charters and handshakes with more are refused."""

MAX_ADDRESSES = 64
"""Bootstraps, and relays, of one annex. Changing breaks: annexes with more are refused."""

MAX_REVOKED_TOKENS = 4096
"""Tokens that one annex takes back. Changing breaks: annexes with more are refused."""

MAX_TEXT_CHARS = 256 * 1024
"""Characters of one prompt or completion. Changing breaks: longer texts are refused."""

HELD_OUT_BYTE = 26
"""Questions whose SHA-256 begins with a byte below this are for evaluation only (10 %).
Changing breaks: the split between training and held-out prompts."""
