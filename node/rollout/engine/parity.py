"""Does the engine compute with the weights that were meant? A fixed probe after every update.

For: catching an update that went silently wrong (a packed weight, a stale tied layer, a missed shard) before
anything that was generated with it is used or shared. Any engine will do: its log-probabilities of fixed
tokens are compared with those that the trainer computes from its own weights. A failed probe loads everything
anew; a second failure is a `ParityError`, on which a node stops sharing. Not for: judging peers.

What is judged is the mean gap and a high quantile, since one rounding is heavy-tailed. MEASURED, SmolLM2-135M
in vLLM on a CPU in bfloat16, nats a token between it and the same weights elsewhere:

                                          480 sampled tokens         96 of this probe
                                        mean    .99     most       mean    .99     most
    float32 trainer                     .029   .163     .336       .065   .226     .342
    bfloat16 forward, rounded weights   .038   .213     .401       .076   .235     .272

A reference in bfloat16 rounds otherwise than the engine does, and is no nearer to it: the trainer's own
float32 is the reference.
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
    "tolerance_of",
]

PROBE_PROMPTS = 4
PROBE_TOKENS = 24
"""Tokens for each prompt of a node's probe."""
HIGH = 0.99
HIGH_FACTOR = 5.0
"""The quantile HIGH of the gaps may be so many times their mean's tolerance."""
_TOLERANCE_FLOAT32, _TOLERANCE = 2e-4, 0.1
"""Nats of the mean: float32 engines agree within 1e-4; others as above, with room for what training makes of
it."""


class ParityError(EngineError):
    """The engine's log-probabilities differ from the trainer's even after loading all weights anew."""


def tolerance_of(dtype: str) -> float:
    """What is allowed to an engine of this type of numbers, nats."""
    return _TOLERANCE_FLOAT32 if dtype == "float32" else _TOLERANCE


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


def _excess(
    reference_logprobs: Sequence[NDArray[np.float32]], logprobs: Sequence[NDArray[np.float32]]
) -> float:
    """The mean gap, or the quantile HIGH over HIGH_FACTOR where that is more, nats; infinite as in
    `largest_gap`."""
    if not np.isfinite(largest_gap(reference_logprobs, logprobs)):
        return float("inf")
    pairs = zip(reference_logprobs, logprobs, strict=True)
    gaps = np.concatenate([np.abs(np.asarray(one, np.float64) - two) for one, two in pairs])
    return float(max(gaps.mean(), np.quantile(gaps, HIGH) / HIGH_FACTOR))


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
    """Nats of the mean (`tolerance_of`)."""

    def check(self, engine: Engine, reference_logprobs: Sequence[NDArray[np.float32]]) -> float:
        """How far they are apart. Raises ParityError above the tolerance."""
        excess = _excess(reference_logprobs, engine.logprobs(self.sequences))
        if not excess <= self.tolerance:
            raise ParityError(
                f"the {engine.name} engine at version {engine.policy_version} differs from the trainer by "
                f"{excess:.3g} nats a token on the probe, in the mean or a fifth of the {HIGH:.0%} quantile; "
                f"at most {self.tolerance:g} is allowed"
            )
        return excess

    def update(
        self,
        engine: Engine,
        state: Mapping[str, torch.Tensor],
        policy_version: int,
        reference_logprobs: Sequence[NDArray[np.float32]],
    ) -> tuple[float, bool]:
        """Give the engine new weights and probe it. Returns how far they are apart, and whether everything
        had to be loaded anew. Raises ParityError when even that did not help."""
        engine.update(state, policy_version)
        excess = _excess(reference_logprobs, engine.logprobs(self.sequences))
        if excess <= self.tolerance:
            return excess, False
        engine.reload(state, policy_version)
        return self.check(engine, reference_logprobs), True


def make_probe(
    prompts: Sequence[Sequence[int]], vocab_size: int, context: int, tolerance: float
) -> ParityProbe:
    """The probe of a node whose engine takes `context` tokens, more than the longest of these prompts has."""
    room = context - max(len(prompt) for prompt in prompts)
    return ParityProbe(tuple(probe_sequences(prompts, vocab_size, min(PROBE_TOKENS, room))), tolerance)
