"""Could this text have come from something like my policy: claimed log-probabilities against the local ones.

Soft evidence only, because an honest stranger may be a very different model. One batched forward pass per
group, the dearest check, so it comes last. Same tokenizer: the author's token ids are scored as they are, at
its temperature. Other tokenizer: the text is tokenized here (algorithms.md A2). The worst rollout decides, so
that one lie cannot be hidden behind seven small ones of the other sign. The two sides differ:

    below   the claim is lower than what this node finds: it would make importance ratios explode. Whoever
            tells the truth is hardly ever there, whatever its model: it sampled the text from what it claims,
            so P(local - claimed > K nats a rollout) <= exp(-K), for any two models and any length. With K =
            9.2 at most one honest rollout in 10,000 is doubted.
    above   the claim is higher: the text is improbable here. An honest author knows words that this node does
            not, so no theorem holds, and the charter says what its models may differ by, per token of this
            node's tokenizer. Such a claim only weighs its own rollout down.

Measured on 23,936 honest rollouts (of 2 to 9 tokens) that the three unlike policies of `swarm demo` judged of
each other, three seeds: below, 6.1 nats at most; above, 0.41 % more than 4 nats a token, 0.12 % more than 6,
0.008 % more than 10, which the demo's charter therefore says. Of lies about one rollout below: 14 nats a
token, all but one; 14 nats in all, 91 %; 3 nats a token, 99.8 % at 8 tokens, 87 % at 5, none at 2, 64 % of
all; 3 nats in all, none. (With 6 nats a token on both sides: 14 in all, 20 %; 3 a token, 0.03 %.) Honest
trust at the end of a demo: 0.990 in five of six places, 0.981 in one; before, 0.945 to 0.990.

What a claim may do to a gradient is bounded whatever is found here (`node/train/claims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from node.rollout.engine.base import Engine, TokenSequence
from node.verify.base import ACCEPT, Item, Verdict, reject, suspect
from protocol.errors import ModelError
from protocol.messages import FinishReason, VerificationRules

if TYPE_CHECKING:  # a node that only observes needs no torch
    from node.rollout.policy import Policy

__all__ = ["MAX_BELOW_NATS", "Distance", "Plausibility"]

MAX_TOKENS_PER_NEW_TOKEN = 8
"""A re-tokenized completion longer than this times the charter's cap is not worth a forward pass."""
MAX_BELOW_NATS = math.log(10_000)
"""By how much a rollout's claim may lie below the local log-probability, in all its tokens together."""


class Distance(NamedTuple):
    """How far the claims of a group's worst rollouts lie from the local log-probabilities."""

    above: float = 0.0
    """Nats per token of this node's tokenizer."""
    below: float = 0.0
    """Nats."""


class Plausibility:
    """`implausible_logprobs`: a claim above the local value by more nats per token than the charter's
    `max_logprob_gap`, or below it by more nats than `MAX_BELOW_NATS`. Soft."""

    name = "plausibility"

    def __init__(self, rules: VerificationRules, max_new_tokens: int, policy: Policy, engine: Engine) -> None:
        self._max_gap = rules.max_logprob_gap
        self._max_tokens = MAX_TOKENS_PER_NEW_TOKEN * max_new_tokens
        self._policy = policy
        self._engine = engine

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        try:
            distance = self.distance(item)
        except ModelError:  # a word that this node's model has no row for, and the author's may have
            return reject("no_row", blames_author=False)
        honest = distance.above <= self._max_gap and distance.below <= MAX_BELOW_NATS
        return ACCEPT if honest else suspect("implausible_logprobs")

    def distance(self, item: Item) -> Distance:
        """Of the claims from the local log-probabilities. Raises ModelError."""
        prompt_ids = tuple(self._policy.encode_prompt(item.group.question, item.group.environment))
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
            return Distance()
        local = self._engine.logprobs(sequences)
        above = [
            said - float(logprobs_T.sum(dtype=np.float64))
            for said, logprobs_T in zip(claimed, local, strict=True)
        ]
        per_token = (nats / len(each.token_ids) for nats, each in zip(above, sequences, strict=True))
        return Distance(max(0.0, *per_token), max(0.0, -min(above)))

    def _fits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether the engine takes it. A stranger's text may be long in the local tokenizer, and a model with
        the same tokenizer may have more rows than the local one; neither is a lie."""
        return (
            0 < len(token_ids) <= self._max_tokens
            and len(prompt_ids) + len(token_ids) <= self._engine.context
            and max(token_ids) < self._policy.vocab_size
        )
