"""Earlier rollouts of a prompt as drafts of new ones (SPEC-RL).

For: prompts that come back. Each rollout of a new group gets a draft of its own, an earlier rollout of the
same prompt; all drafts are scored in one pass under the current weights, and each is kept up to its first
token that fails a random test. The engine samples the rest. Not for: prompts, or peers' rollouts.

What is kept counts as sampled by the current version: its log-probabilities and versions are the current
ones. That is not exactly true, not even with lenience 1. Speculative decoding draws the first token after a
rejection from the residual max(0, pi - q); here, as in the published method, it comes from pi itself, because
q's other probabilities were never stored. So a token that the old policy q liked less than pi does is too
rare. Two tokens, q = (.5, .5) and pi = (.8, .2) at every place:

    one place     min(q, pi) = (.5, .2), rejected .3:    (.74, .26) in place of (.8, .2), total variation .06
    two places    aa .562, ab .178, ba .196, bb .064 in place of .64, .16, .16, .04,      total variation .078

A lenience above 1 keeps more and drifts towards q: at one place .164 with 1.65, and .3, all of it, with 2.5.
A draft that was itself partly kept bears the log-probabilities of its last acceptance, as in the published
method. Peers rightly call a group of drafts kept whole `replayed` (`node.verify.copies`): reuse is for nodes
that train alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from node.rollout.engine.base import Engine, GenerationRequest, Prefix, TokenSequence
from protocol.errors import ConfigError
from protocol.messages import Rollout
from protocol.rollouts import parse_tokens

__all__ = ["ReuseBook", "accepted_length"]

MAX_PROMPTS = 4096
MAX_ROLLOUTS = 64
"""Drafts of one prompt."""
MAX_TOKENS = 2**24
"""All drafts together, 128 MiB: with long answers fewer prompts are remembered."""

_NOTHING = Prefix((), (), ())


def accepted_length(
    old_logprobs_T: NDArray[np.float32],
    new_logprobs_T: NDArray[np.float32],
    log_uniforms_T: NDArray[np.float64],
    lenience: float,
) -> int:
    """Tokens of a draft before the first that is rejected. EXACT (SPEC-RL).

    Token t is accepted when log u_t <= new_t - old_t + ln(lenience), all in nats, u_t uniform on [0, 1) and
    independent of the draft. One that the new policy cannot produce (-inf) is always rejected. Raises
    ValueError for a lenience of 0 or less.
    """
    if not lenience > 0:
        raise ValueError(f"lenience is {lenience}; it must be above 0, and 1 for the exact acceptance rule")
    with np.errstate(invalid="ignore"):  # -inf minus -inf, which is rejected as such
        margin_T = new_logprobs_T.astype(np.float64) - old_logprobs_T + math.log(lenience)
    accepted_T = (log_uniforms_T <= margin_T) & (new_logprobs_T > -np.inf)
    return len(accepted_T) if accepted_T.all() else int(accepted_T.argmin())


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    token_ids_T: NDArray[np.uint32]
    logprobs_T: NDArray[np.float32]
    """As sampled."""


class ReuseBook:
    """The newest group of own rollouts of each prompt, by universe index; the prompts used longest ago are
    forgotten first. Safe to call from several threads. Raises ConfigError where `top_p` cuts the
    distribution: the stored log-probabilities would be of the cut one and the new scores of the whole."""

    def __init__(
        self,
        lenience: float,
        *,
        top_p: float = 1.0,
        max_prompts: int = MAX_PROMPTS,
        max_rollouts: int = MAX_ROLLOUTS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        if top_p < 1:
            raise ConfigError(
                f"rollout.reuse_lenience needs a charter with top_p = 1, not {top_p:g}; set it to 0"
            )
        self._lenience = lenience
        self._max_rollouts = max_rollouts
        least = max_tokens // max_prompts  # what a prompt counts at least bounds their number
        self._drafts: LRUCache[int, list[_Draft]] = LRUCache(
            max_tokens, getsizeof=lambda drafts: max(least, _tokens_of(drafts))
        )
        self._lock = threading.Lock()
        self.drafted = 0
        """Tokens of drafts that were tested."""
        self.accepted = 0
        """Tokens of drafts that were kept."""

    def __len__(self) -> int:
        """Prompts remembered."""
        return len(self._drafts)

    def remember(self, prompt_index: int, rollouts: Sequence[Rollout]) -> None:
        """These finished rollouts are the drafts of the prompt from now on, in place of earlier ones."""
        drafts = [
            _Draft(arrays.token_ids_T, arrays.logprobs_T)
            for arrays in map(parse_tokens, rollouts[: self._max_rollouts])
        ]
        with self._lock:
            self._drafts.pop(prompt_index, None)
            if _tokens_of(drafts) <= self._drafts.maxsize:
                self._drafts[prompt_index] = drafts

    def prefixes(self, engine: Engine, prompt_index: int, request: GenerationRequest) -> tuple[Prefix, ...]:
        """What the rollouts of a new group begin with: one prefix each, perhaps an empty one; or none at all
        when nothing is kept. Blocks while the engine scores the drafts. The seed of `request` must be the
        group's own, so that no two tests of a draft share their random numbers. Raises EngineError.

        When new weights come in between, nothing is kept: the scores may be of two versions.
        """
        with self._lock:
            drafts = self._drafts.get(prompt_index, [])[: request.n]
        if not drafts:
            return ()
        version = engine.policy_version
        temperature = request.sampling.temperature
        scored = engine.logprobs(
            [
                TokenSequence(request.prompt_ids, tuple(draft.token_ids_T.tolist()), temperature)
                for draft in drafts
            ]
        )
        if engine.policy_version != version:
            return ()
        uniforms = np.random.default_rng(request.seed)
        prefixes = []
        for draft, new_T in zip(drafts, scored, strict=True):
            log_uniforms_T = np.log1p(-uniforms.random(len(new_T)))  # of 1 - u: never 0, so never -inf
            kept = accepted_length(draft.logprobs_T, new_T, log_uniforms_T, self._lenience)
            token_ids, logprobs = draft.token_ids_T[:kept].tolist(), new_T[:kept].tolist()
            prefixes.append(Prefix(tuple(token_ids), tuple(logprobs), (version,) * kept))
        with self._lock:
            self.drafted += _tokens_of(drafts)
            self.accepted += sum(len(prefix.token_ids) for prefix in prefixes)
        if not any(prefix.token_ids for prefix in prefixes):
            return ()
        return (*prefixes, *[_NOTHING] * (request.n - len(prefixes)))


def _tokens_of(drafts: Sequence[_Draft]) -> int:
    return sum(len(draft.token_ids_T) for draft in drafts)
