"""Bytes to `Item`: sizes, digests, types, and the agreement of a body with its announcement and the charter.

The first step for every candidate, also with verification off, because a body is a stranger's bytes. Order:
the announced size and digest before anything is parsed, then strict decoding, then the relations that types
cannot express. No count from a peer is used to allocate: token arrays are views on bytes that are already
here, and their lengths are compared with each other. Everything wrong raises a `RemoteProtocolError` whose
`reason` says what.
"""

from __future__ import annotations

import math

import numpy as np

from node.share.heard import Candidate, Heard
from node.verify.base import Item
from protocol.charter import sampling
from protocol.codec import decode, digest
from protocol.errors import DecodeError, LimitError, RemoteProtocolError
from protocol.messages import Announcement, Charter, Rollout, RolloutGroup, TokenizerSpec
from protocol.receipts import slot_digest
from protocol.rollouts import (
    TEXT_BYTES_PER_TOKEN,
    TokenArrays,
    max_body_bytes,
    parse_tokens,
    version_span,
)

__all__ = ["Schema", "tokenizer_spec"]

LOGPROB_ROUNDING = 1e-6
"""A certain token's log-probability may come out this far above 0 in float32."""


def tokenizer_spec(charter: Charter, announcement: Announcement) -> TokenizerSpec | None:
    """The charter's entry for the lineage's tokenizer; None when the charter does not list it."""
    wanted = announcement.lineage.tokenizer
    return next((spec for spec in charter.tokenizers if spec.digest == wanted), None)


class Schema:
    """Shapes and relations, checked against one charter."""

    name = "schema"

    def __init__(self, charter: Charter) -> None:
        self._charter = charter
        self._max_body_bytes = max_body_bytes(charter)

    def check_announcement(self, announcement: Announcement) -> None:
        """What can be said without the body. Raises RemoteProtocolError."""
        charter = self._charter
        if tokenizer_spec(charter, announcement) is None:
            raise RemoteProtocolError(
                f"tokenizer {announcement.lineage.tokenizer[:12]} is not in the charter",
                reason="unknown_tokenizer",
            )
        if len(announcement.rewards) != charter.group_size:
            raise DecodeError(
                f"{len(announcement.rewards)} rewards in a group of {charter.group_size}", reason="group_size"
            )
        if not all(math.isfinite(reward) for reward in announcement.rewards):
            raise DecodeError("an announced reward is not finite", reason="not_finite")
        if not announcement.oldest_version <= announcement.mean_version <= announcement.policy_version:
            raise DecodeError(
                f"a mean version of {announcement.mean_version} between {announcement.oldest_version} and "
                f"{announcement.policy_version}",
                reason="version_order",
            )
        if announcement.body.size > self._max_body_bytes:
            raise LimitError(
                f"a body of {announcement.body.size} bytes; groups here need at most {self._max_body_bytes}",
                reason="body_too_large",
            )

    def open(self, candidate: Candidate) -> Item:
        """The item behind a candidate. Raises RemoteProtocolError."""
        heard, body = candidate.heard, candidate.body
        announcement = heard.announcement
        self.check_announcement(announcement)
        blob = announcement.body
        if len(body) != blob.size:
            raise DecodeError(f"announced {blob.size} bytes, got {len(body)}", reason="size")
        if digest(body) != blob.digest:
            raise DecodeError("the body is not the announced one", reason="body_digest")
        group = decode(body, RolloutGroup, max_bytes=self._max_body_bytes)
        self._check_agreement(heard, group)
        self._check_caps(group)
        tokens = tuple(self._token_arrays(rollout, group) for rollout in group.rollouts)
        span = version_span(tokens)
        if (span.newest, span.mean, span.oldest) != (
            group.policy_version,
            group.mean_version,
            group.oldest_version,
        ):
            raise DecodeError("versions that are not those of the group's tokens", reason="version_order")
        if slot_digest(group.author, group.lineage, group.prompt, group.rollouts) != announcement.completions:
            raise DecodeError("the completions are not the announced ones", reason="completions_digest")
        return Item(heard.sender, announcement, heard.arrived_at, heard.envelope, group, tokens)

    def _check_agreement(self, heard: Heard, group: RolloutGroup) -> None:
        announcement = heard.announcement
        if group.author != heard.sender:
            raise DecodeError(f"{heard.sender} sent a group of {group.author}", reason="author")
        said = (
            announcement.lineage,
            announcement.policy_version,
            announcement.mean_version,
            announcement.oldest_version,
            announcement.prompt,
            announcement.rewards,
            announcement.commitment,
        )
        if said != (
            group.lineage,
            group.policy_version,
            group.mean_version,
            group.oldest_version,
            group.prompt,
            tuple(rollout.reward for rollout in group.rollouts),
            group.commitment,
        ):
            raise DecodeError("the body differs from its announcement", reason="announcement_mismatch")

    def _check_caps(self, group: RolloutGroup) -> None:
        charter = self._charter
        if len(group.rollouts) != charter.group_size:
            raise DecodeError(
                f"{len(group.rollouts)} rollouts, not {charter.group_size}", reason="group_size"
            )
        if group.sampling != sampling(charter):
            raise DecodeError(f"sampled with {group.sampling}, not {sampling(charter)}", reason="sampling")

    def _token_arrays(self, rollout: Rollout, group: RolloutGroup) -> TokenArrays:
        arrays = parse_tokens(rollout)
        count = len(arrays.token_ids_T)
        if count > group.sampling.max_new_tokens:
            raise LimitError(f"{count} tokens of at most {group.sampling.max_new_tokens}", reason="too_long")
        text_bytes = len(rollout.text.encode())
        if text_bytes > TEXT_BYTES_PER_TOKEN * count:
            raise LimitError(f"{text_bytes} bytes of text from {count} tokens", reason="text_too_long")
        if not np.isfinite(arrays.logprobs_T).all():
            raise DecodeError("a log-probability is not finite", reason="not_finite")
        if bool((arrays.logprobs_T > LOGPROB_ROUNDING).any()):
            raise DecodeError("a log-probability above 0", reason="positive_logprob")
        return arrays
