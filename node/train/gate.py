"""Whether weights are kept: only if held-out prompts are not answered worse, at a lower confidence bound.

    rewards of the same prompts before and after (held out, same seeds) --judge--> GateResult

A one-sided Student bound on the mean of the paired differences. Why not a bootstrap: it needs a generator,
and resampling few prompts makes its bound too high, the wrong side to err on. The bound is the usual
approximation where rewards are not normal; with MIN_PROMPTS or more, at a nominal 5 %, no more than about 6 %
of harmless or slightly harmful merges of 0/1 rewards pass by luck (tests). Every node judges for itself, by
how much its own policy gains. For merges, and for steps that are taken back. Not for the probe nor for what
follows from it (`node/weights/merge/adopt.py`, `stability.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from protocol.errors import LocalProtocolError

__all__ = ["MIN_PROMPTS", "GateResult", "judge", "student_quantile"]

MIN_PROMPTS = 16
"""Fewer say nothing: a merge is not adopted on them."""


@dataclass(frozen=True)
class GateResult:
    """What the probe says. `lower_bound` of the mean gain in reward, -inf with too few prompts."""

    adopted: bool
    prompts: int
    gain: float
    lower_bound: float
    why: str
    """One sentence for the operator."""


def judge(
    before: Sequence[float], after: Sequence[float], *, confidence: float = 0.95, tolerance: float = 0.0
) -> GateResult:
    """Compare mean rewards of the same prompts, in the same order, before and after a merge. `tolerance`:
    loss of mean reward that is taken as none; with 0 a merge must be shown to gain, or to change no reward at
    all. Raises LocalProtocolError for lists of unequal length or rewards that are not finite."""
    if len(before) != len(after):
        raise LocalProtocolError(f"a probe of {len(before)} prompts before a merge and {len(after)} after it")
    if not all(map(math.isfinite, (*before, *after))):
        raise LocalProtocolError("a probe with a reward that is not finite")
    if not 0.5 <= confidence < 1 or tolerance < 0:
        raise LocalProtocolError(f"a gate of confidence {confidence} and tolerance {tolerance}")
    count = len(before)
    if count < MIN_PROMPTS:
        why = f"not adopted: {count} prompts say too little, {MIN_PROMPTS} are needed"
        return GateResult(False, count, 0.0, -math.inf, why)
    gains = [new - old for old, new in zip(before, after, strict=True)]
    gain = math.fsum(gains) / count
    variance = math.fsum((each - gain) ** 2 for each in gains) / (count - 1)
    bound = gain - student_quantile(confidence, count - 1) * math.sqrt(variance / count)
    adopted = bound >= -tolerance
    why = (
        f"{'adopted' if adopted else 'not adopted'}: mean reward {gain:+.4f} over {count} prompts, at least "
        f"{bound:+.4f} with {confidence:.0%} confidence, {-tolerance:+.4f} is needed"
    )
    return GateResult(adopted, count, gain, bound, why)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher expansion in 1/degrees (Abramowitz and Stegun 26.7.5):
    within 0.001 for 10 degrees or more and probabilities up to 0.99."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / math.pow(degrees, power) for power, term in enumerate(terms, 1))
