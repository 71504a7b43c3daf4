"""Are these tokens what a sampler can have produced: range, end, text, and possible log-probabilities.

Text that does not follow from the tokens would be scored as one thing and trained on as another, so it must
be equal to the decoded tokens wherever this node has the tokenizer. For tokenizers it lacks, only the text is
used later on. `PrefixConsistency` needs no model either: one policy gives one probability to a token after
the same tokens, so a group that contradicts itself carries invented numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from node.verify.base import ACCEPT, Item, Verdict, reject, suspect
from node.verify.schema import tokenizer_spec
from protocol.messages import Charter, Digest, FinishReason, Rollout, TokenizerSpec
from protocol.rollouts import TokenArrays

__all__ = ["Decode", "PrefixConsistency", "Tokens", "tokens_fault"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens removed."""

IMPOSSIBLE_NATS = 40.0
"""Beyond ln(vocabulary): tokens less likely than vocabulary * e**-40 together are never sampled (4e-18)."""
PREFIX_TOKENS = 64
"""Tokens per rollout that are compared with the rest of the group."""
PREFIX_TOLERANCE_NATS = 0.5
"""Same prefix, same weights: only rounding differs, which is far below this even in bfloat16."""


class Tokens:
    """`token_range`, `termination`, `text_mismatch`, `impossible_logprobs`. Hard. `decoders` by tokenizer
    digest."""

    name = "tokens"

    def __init__(self, charter: Charter, decoders: Mapping[Digest, Decode]) -> None:
        self._charter = charter
        self._decoders = decoders

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        spec = tokenizer_spec(self._charter, item.announcement)
        if spec is None:
            return reject("unknown_tokenizer")
        decode = self._decoders.get(spec.digest)
        for rollout, arrays in zip(item.group.rollouts, item.tokens, strict=True):
            fault = tokens_fault(rollout, arrays, spec, item.group.sampling.max_new_tokens, decode)
            if fault is not None:
                return reject(fault)
        return ACCEPT


def tokens_fault(
    rollout: Rollout, arrays: TokenArrays, spec: TokenizerSpec, max_new_tokens: int, decode: Decode | None
) -> str | None:
    """Why no sampler can have produced this rollout, in a word; None where one can."""
    if int(arrays.token_ids_T.max()) >= spec.vocab_size:
        return "token_range"
    ends_T = np.isin(arrays.token_ids_T, spec.end_token_ids)
    if bool(ends_T[:-1].any()) or bool(ends_T[-1]) != (rollout.finish is FinishReason.STOP):
        return "termination"
    if rollout.finish is FinishReason.LENGTH and len(ends_T) != max_new_tokens:
        return "termination"
    if float(arrays.logprobs_T.min()) < -(math.log(spec.vocab_size) + IMPOSSIBLE_NATS):
        return "impossible_logprobs"
    if decode is not None and decode(arrays.token_ids_T.tolist()) != rollout.text:
        return "text_mismatch"
    return None


class PrefixConsistency:
    """`inconsistent_logprobs`: equal tokens after equal prefixes, of equal versions, have different claims.
    Soft."""

    name = "consistency"

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        claims: dict[tuple[bytes, bytes], float] = {}
        for rollout, arrays in zip(item.group.rollouts, item.tokens, strict=True):
            answer = rollout.answer
            for t, logprob in enumerate(arrays.logprobs_T[:PREFIX_TOKENS].tolist()):
                end = 4 * (t + 1)
                first = claims.setdefault((answer.token_ids[:end], answer.versions[:end]), logprob)
                if abs(first - logprob) > PREFIX_TOLERANCE_NATS:
                    return suspect("inconsistent_logprobs")
        return ACCEPT
