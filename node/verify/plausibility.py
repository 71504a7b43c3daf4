"""Could this text have come from something like my policy: claimed log-probabilities against the local ones.

Soft evidence only, because an honest stranger may be a very different model. One batched forward pass per
group, the dearest check, so it comes last. Same tokenizer: the author's token ids are scored as they are, at
its temperature. Other tokenizer: the text is tokenized here and both totals are divided by this node's count
of tokens, so that the ratio of token counts does not enter (algorithms.md A2). Claims far below the local
value make importance ratios explode, claims far above hide improbable text; both are beyond the charter's
gap. The worst rollout decides, so that one lie cannot be hidden behind seven small ones of the other sign.
What a claim may do to a gradient is bounded whatever is found here (`node/train/claims.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from node.rollout.engine.base import Engine, TokenSequence
from node.verify.base import ACCEPT, Item, Verdict, reject, suspect
from protocol.errors import ModelError
from protocol.messages import FinishReason, VerificationRules

if TYPE_CHECKING:  # a node that only observes needs no torch
    from node.rollout.policy import Policy

__all__ = ["Plausibility"]

MAX_TOKENS_PER_NEW_TOKEN = 8
"""A re-tokenized completion longer than this times the charter's cap is not worth a forward pass."""


class Plausibility:
    """`implausible_logprobs`: more nats per token apart than the charter's `max_logprob_gap`. Soft."""

    name = "plausibility"

    def __init__(self, rules: VerificationRules, max_new_tokens: int, policy: Policy, engine: Engine) -> None:
        self._max_gap = rules.max_logprob_gap
        self._max_tokens = MAX_TOKENS_PER_NEW_TOKEN * max_new_tokens
        self._policy = policy
        self._engine = engine

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        try:
            gap = self.gap_nats(item)
        except ModelError:  # a word that this node's model has no row for, and the author's may have
            return reject("no_row", blames_author=False)
        return suspect("implausible_logprobs") if gap > self._max_gap else ACCEPT

    def gap_nats(self, item: Item) -> float:
        """|claimed - local| log-probability of the worst rollout per token of this node's tokenizer."""
        prompt_ids = tuple(self._policy.encode_prompt(item.group.question))
        native = item.group.lineage.tokenizer == self._policy.tokenizer_digest
        temperature = item.group.sampling.temperature
        sequences: list[TokenSequence] = []
        claimed: list[float] = []
        for rollout, arrays in zip(item.group.rollouts, item.tokens, strict=True):
            if native:
                token_ids = tuple(arrays.token_ids_T.tolist())
            else:
                finished = rollout.finish is FinishReason.STOP
                token_ids = tuple(self._policy.encode_completion(rollout.text, finished))
            if self._fits(prompt_ids, token_ids):
                sequences.append(TokenSequence(prompt_ids, token_ids, temperature))
                claimed.append(float(arrays.logprobs_T.sum(dtype=np.float64)))
        if not sequences:
            return 0.0
        local = self._engine.logprobs(sequences)
        return max(
            abs(said - float(logprobs_T.sum(dtype=np.float64))) / len(logprobs_T)
            for said, logprobs_T in zip(claimed, local, strict=True)
        )

    def _fits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether the engine takes it. A stranger's text may be long in the local tokenizer, and a model with
        the same tokenizer may have more rows than the local one; neither is a lie."""
        return (
            0 < len(token_ids) <= self._max_tokens
            and len(prompt_ids) + len(token_ids) <= self._engine.context
            and max(token_ids) < self._policy.vocab_size
        )
