"""Rollouts <-> arrays: the one way to make a rollout from sampled tokens, and to read it again.

    sampled tokens --single_turn--> Rollout          Rollout --parse_tokens--> TokenArrays

Engines make rollouts; verification parses each one once and hands the arrays on. Not for what the numbers may
be (`node/verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.constants import MAX_BLOB_BYTES, MAX_TEXT_CHARS
from protocol.errors import DecodeError
from protocol.messages import Charter, FinishReason, PolicySegment, Rollout

__all__ = [
    "TEXT_BYTES_PER_TOKEN",
    "TokenArrays",
    "VersionSpan",
    "max_body_bytes",
    "parse_tokens",
    "single_turn",
    "version_span",
]

TEXT_BYTES_PER_TOKEN = 128
"""Longest text of one token. Vocabularies in use stop at 128 spaces; without a bound, 16 tokens may claim 16
MB."""
ARRAY_BYTES_PER_TOKEN = 12
"""Token id, log-probability, version."""
ROLLOUT_OVERHEAD_BYTES = 256
"""Field names, lengths, finish, reward and seed of a rollout, generously."""
GROUP_OVERHEAD_BYTES = 4096 + MAX_TEXT_CHARS
"""Names, digests and numbers of a group, generously, and its question."""


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The T tokens of one rollout: read-only views on its bytes."""

    token_ids_T: NDArray[np.uint32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Newest, mean and oldest policy version among the tokens of a group."""

    newest: int
    mean: float
    oldest: int


def single_turn(
    text: str,
    *,
    token_ids: bytes,
    logprobs: bytes,
    versions: bytes,
    finish: FinishReason,
    reward: float = 0.0,
    seed: int,
) -> Rollout:
    """The rollout of one policy segment; the arrays as `PolicySegment` has them."""
    return Rollout(
        text=text, segments=(PolicySegment(token_ids, logprobs, versions, finish),), reward=reward, seed=seed
    )


def parse_tokens(rollout: Rollout) -> TokenArrays:
    """The arrays of a single-turn rollout. Raises DecodeError when it has other segments than one of the
    policy (`segments`), unequal lengths (`array_length`), or no tokens (`empty`)."""
    answer = rollout.answer
    size = len(answer.token_ids)
    if size % 4 or len(answer.logprobs) != size or len(answer.versions) != size:
        raise DecodeError(
            f"arrays of {size}, {len(answer.logprobs)} and {len(answer.versions)} bytes",
            reason="array_length",
        )
    if size == 0:
        raise DecodeError("a rollout without tokens", reason="empty")
    return TokenArrays(
        token_ids_T=np.frombuffer(answer.token_ids, dtype="<u4"),
        logprobs_T=np.frombuffer(answer.logprobs, dtype="<f4"),
        versions_T=np.frombuffer(answer.versions, dtype="<u4"),
    )


def version_span(tokens: Sequence[TokenArrays]) -> VersionSpan:
    """Of all tokens of a group, which has at least one. The sum of its versions is exact in float64, so the
    mean is the same number on every machine."""
    versions = np.concatenate([arrays.versions_T for arrays in tokens])
    return VersionSpan(
        newest=int(versions.max()),
        mean=int(versions.sum(dtype=np.uint64)) / len(versions),
        oldest=int(versions.min()),
    )


def max_body_bytes(charter: Charter) -> int:
    """Size of the largest body that this charter's groups can need: what is announced as larger is not
    fetched."""
    per_token = ARRAY_BYTES_PER_TOKEN + TEXT_BYTES_PER_TOKEN
    rollout_bytes = charter.max_new_tokens * per_token + ROLLOUT_OVERHEAD_BYTES
    return min(charter.group_size * rollout_bytes + GROUP_OVERHEAD_BYTES, MAX_BLOB_BYTES)
