"""How surprising it is that two groups hold the same completions, in nats, if nobody copied.

Equal text proves nothing: after 60 steps 70 % of one honest node's completions also occur in another's group.
So what is summed up is the evidence against coincidence, and nothing else counts:

    drawn   -sum of the claimed log-probabilities of the matching completions, minus the ways to match them.
            Holds between equal weights too, and catches copies whose log-probabilities were replaced.
    equal   per distinct prefix, how unlikely two different sets of weights give this log-probability, to the
            last bit or within 0.001. Left out where the weights may be the same; that a stranger names its
            victim's lineage does not make them so.

A copy is claimed above 20 nats: one honest pair of groups in 5e8. Groups with less information than that
cannot be told from honest ones, and such a copy gains its author little: the prompt had to be its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Lineage, PeerId, RolloutGroup
from protocol.rollouts import TokenArrays

__all__ = ["COPY_NATS", "GroupPrint", "RolloutPrint", "evidence_nats", "print_group"]

COPY_NATS = 20.0
PRINT_TOKENS = 64
"""Tokens of a rollout that are kept for comparison: 64 rollouts of any length take 48 KB."""
TOLERANCE_NATS = 1e-3
"""A copier may jitter the log-probabilities; more than this changes them for its own training, too."""
EQUAL_BITS_NATS = 10.0
"""Log-probabilities of different weights lie about 0.5 apart, and float32 has a value every 2.4e-7 there:
they agree to the last bit once in 2**20. ln 2**14 leaves room for engines that round. At half of it, copies
of one-digit answers (four different first tokens) passed in a run of the demo."""
NEAR_NATS = 4.0
"""Most that one log-probability within TOLERANCE_NATS can say."""


@dataclass(frozen=True, slots=True)
class RolloutPrint:
    """The beginning of one rollout (at most PRINT_TOKENS), and the log-probability of all of it."""

    key: bytes
    """Token ids as they travel; equal keys are equal beginnings."""
    logprobs: bytes
    versions: bytes
    logprob_sum: float


@dataclass(frozen=True, slots=True)
class GroupPrint:
    """What is remembered of one group: about 3 KB for eight short answers, in bytes rather than arrays, which
    would be 5."""

    author: PeerId
    lineage: Lineage
    window: int
    slot: int
    prompt: int
    """Its index in the universe."""
    arrived_at: int
    rollouts: tuple[RolloutPrint, ...] = field(repr=False)


def print_group(group: RolloutGroup, tokens: Sequence[TokenArrays], arrived_at: int) -> GroupPrint:
    """The print of a well-formed group. Copies what it keeps, so that the body can be freed."""
    return GroupPrint(
        author=group.author,
        lineage=group.lineage,
        window=group.prompt.window,
        slot=group.prompt.slot,
        prompt=group.prompt.index,
        arrived_at=arrived_at,
        rollouts=tuple(
            RolloutPrint(
                key=rollout.answer.token_ids[: 4 * PRINT_TOKENS],
                logprobs=rollout.answer.logprobs[: 4 * PRINT_TOKENS],
                versions=rollout.answer.versions[: 4 * PRINT_TOKENS],
                logprob_sum=float(arrays.logprobs_T.sum(dtype=np.float64)),
            )
            for rollout, arrays in zip(group.rollouts, tokens, strict=True)
        ),
    )


def _floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<f4")


def evidence_nats(later: GroupPrint, earlier: GroupPrint, *, believed: bool = True) -> float:
    """Evidence that `later` is a copy of `earlier`; 0 when less than half of its rollouts match. `believed`:
    whether the author of `later` is believed about the lineage that it names."""
    pairs = _match(later.rollouts, earlier.rollouts)
    if 2 * len(pairs) < len(later.rollouts):
        return 0.0
    same_policy = later.author == earlier.author or (believed and later.lineage == earlier.lineage)
    return _drawn_nats(later, earlier, pairs) + _equal_nats(later, earlier, pairs, same_policy=same_policy)


def _match(later: Sequence[RolloutPrint], earlier: Sequence[RolloutPrint]) -> list[tuple[int, int]]:
    """Pairs of rollouts with equal beginnings, each used once, those at the same place first."""
    pairs = [(i, i) for i in range(min(len(later), len(earlier))) if later[i].key == earlier[i].key]
    taken = {i for i, _ in pairs}
    free: dict[bytes, list[int]] = {}
    for j, rollout in enumerate(earlier):
        if j not in taken:
            free.setdefault(rollout.key, []).append(j)
    for i, rollout in enumerate(later):
        if i not in taken and free.get(rollout.key):
            pairs.append((i, free[rollout.key].pop()))
    return sorted(pairs)


def _drawn_nats(later: GroupPrint, earlier: GroupPrint, pairs: Sequence[tuple[int, int]]) -> float:
    """-ln of a bound on the chance to draw the matching completions. The bound counts whatever would have
    matched as well: any k places on both sides in any arrangement, or any places in the same order."""
    size, count = len(later.rollouts), len(pairs)
    surprise = -sum(later.rollouts[i].logprob_sum for i, _ in pairs)
    in_order = -sum(later.rollouts[i].logprob_sum for i, j in pairs if i == j)
    subsets = 2 * math.log(math.comb(size, count))
    repeats = Counter(later.rollouts[i].key for i, _ in pairs)
    arrangements = math.lgamma(count + 1) - sum(math.lgamma(times + 1) for times in repeats.values())
    return max(0.0, surprise - subsets - arrangements, in_order - size * math.log(2))


def _equal_nats(
    later: GroupPrint, earlier: GroupPrint, pairs: Sequence[tuple[int, int]], *, same_policy: bool
) -> float:
    same_base = later.lineage.base_model == earlier.lineage.base_model
    total = 0.0
    seen: set[bytes] = set()
    for i, j in pairs:
        one, other = later.rollouts[i], earlier.rollouts[j]
        nats_T = _token_nats(_floats(one.logprobs), _floats(other.logprobs), near_counts=not same_base)
        if same_base:
            # Same start: the weights may be equal where both are at version 0, or where both generated with
            # one policy: one author twice, or an owner and its followers.
            ours_T, theirs_T = (np.frombuffer(each.versions, "<u4") for each in (one, other))
            equal_versions_T = ours_T == theirs_T
            maybe_same_T = equal_versions_T if same_policy else equal_versions_T & (ours_T == 0)
            nats_T = np.where(maybe_same_T, 0.0, nats_T)
        for t in np.flatnonzero(nats_T > 0.0):
            prefix = one.key[: 4 * (int(t) + 1)]
            if prefix not in seen:
                seen.add(prefix)
                total += float(nats_T[t])
    return total


def _token_nats(
    one_T: NDArray[np.float32], other_T: NDArray[np.float32], *, near_counts: bool
) -> NDArray[np.float64]:
    """Per token: two policies' log-probabilities differ by about their own size, so they fall within the
    tolerance with a chance of about 2 * tolerance / |log-probability|."""
    size_T = np.abs(one_T.astype(np.float64))
    gap_T = np.abs(one_T.astype(np.float64) - other_T.astype(np.float64))
    near_T = np.clip(np.log(np.maximum(size_T, 1e-12) / (2 * TOLERANCE_NATS)), 0.0, NEAR_NATS)
    near_T = np.where((gap_T <= TOLERANCE_NATS) & near_counts, near_T, 0.0)
    bits_T = np.where((one_T == other_T) & (size_T > TOLERANCE_NATS), EQUAL_BITS_NATS, 0.0)
    strongest_T: NDArray[np.float64] = np.maximum(near_T, bits_T)
    return strongest_T
