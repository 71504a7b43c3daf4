"""Does the engine compute with the weights that were meant? A fixed probe after every update.

For: catching an update that went silently wrong (a packed weight, a stale tied layer, a missed shard) before
anything that was generated with it is used or shared. Any engine will do: its log-probabilities of fixed
tokens are compared with those that the trainer computes from its own weights. A failed probe loads everything
anew; a second failure is a `ParityError`, on which a node stops sharing. Not for: judging peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from node.rollout.engine.base import Engine, EngineError, TokenSequence

if TYPE_CHECKING:
    import torch

__all__ = [
    "PROBE_PROMPTS",
    "PROBE_TOKENS",
    "ParityError",
    "ParityProbe",
    "largest_gap",
    "make_probe",
    "parity",
    "probe_sequences",
]

PROBE_PROMPTS = 4
PROBE_TOKENS = 24
"""Tokens for each prompt of a node's probe."""


class ParityError(EngineError):
    """The engine's log-probabilities differ from the trainer's even after loading all weights anew."""


def parity(
    engine: Engine, reference_logprobs: Sequence[NDArray[np.float32]], sequences: Sequence[TokenSequence]
) -> float:
    """`largest_gap` between the engine and a reference."""
    return largest_gap(reference_logprobs, engine.logprobs(sequences))


def largest_gap(
    reference_logprobs: Sequence[NDArray[np.float32]], logprobs: Sequence[NDArray[np.float32]]
) -> float:
    """Largest absolute difference in nats; infinite where either side is not finite or a length differs."""
    largest = 0.0
    for ours, theirs in zip(reference_logprobs, logprobs, strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        gap = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        largest = max(largest, float(gap.max(initial=0.0)) if bool(np.isfinite(gap).all()) else float("inf"))
    return largest


def probe_sequences(
    prompts: Sequence[Sequence[int]], vocab_size: int, tokens: int = PROBE_TOKENS
) -> list[TokenSequence]:
    """Real prompts, each with tokens spread over the vocabulary: unlikely ones too, whose log-probabilities
    move most."""
    draw = np.random.default_rng(0)
    return [
        TokenSequence(tuple(prompt), tuple(int(token) for token in draw.integers(0, vocab_size, tokens)))
        for prompt in prompts
    ]


@dataclass(frozen=True)
class ParityProbe:
    """Fixed sequences and how far two implementations may differ on them."""

    sequences: tuple[TokenSequence, ...]
    tolerance: float
    """Nats; float32 engines agree within 1e-4, bfloat16 ones within 0.1."""

    def check(self, engine: Engine, reference_logprobs: Sequence[NDArray[np.float32]]) -> float:
        """Largest difference. Raises ParityError above the tolerance."""
        max_abs = parity(engine, reference_logprobs, self.sequences)
        if not max_abs <= self.tolerance:
            raise ParityError(
                f"the {engine.name} engine at version {engine.policy_version} differs from the trainer by "
                f"{max_abs:.3g} nats on the probe; at most {self.tolerance:g} is allowed"
            )
        return max_abs

    def update(
        self,
        engine: Engine,
        state: Mapping[str, torch.Tensor],
        policy_version: int,
        reference_logprobs: Sequence[NDArray[np.float32]],
    ) -> tuple[float, bool]:
        """Give the engine new weights and probe it. Returns the largest difference and whether everything had
        to be loaded anew. Raises ParityError when even that did not help."""
        engine.update(state, policy_version)
        max_abs = parity(engine, reference_logprobs, self.sequences)
        if max_abs <= self.tolerance:
            return max_abs, False
        engine.reload(state, policy_version)
        return self.check(engine, reference_logprobs), True


def make_probe(
    prompts: Sequence[Sequence[int]], vocab_size: int, context: int, tolerance: float
) -> ParityProbe:
    """The probe of a node whose engine takes `context` tokens, more than the longest of these prompts has."""
    room = context - max(len(prompt) for prompt in prompts)
    return ParityProbe(tuple(probe_sequences(prompts, vocab_size, min(PROBE_TOKENS, room))), tolerance)
