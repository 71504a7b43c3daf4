"""Merging peers' weights: the task vectors of one set of contributions become one change of the common base,
the same bytes on every node that has the same set.

    base bits + [(Contribution, its bits)] --guards--> task vectors --strategy--> Merged

A task vector is a contribution minus the common base, in double precision. Order of arrival does not matter:
contributions are taken in the order of their tags. Memory: pieces of `PIECE` values, beside the weight sets.

Guards: what does not fit the base or is too old is dropped. Longer task vectors than `norm_limit` times the
median length are shortened to that: who trained longer than most has gone further honestly.

Strategies. `mean`: FedBuff's weight (1 + tau)^-1/2 (arXiv 2106.06639; UNVERIFIED against its code), tau
counted in windows between a contribution's date and the newest one's; versions of unequal machines cannot be
compared, time can. `trimmed`: per weight, without the least and the greatest values (Yin et al., arXiv
1803.01498; CORE). `clipping`: v <- v + mean_i (x_i - v) min(1, r/||x_i - v||) (Karimireddy et al., arXiv
2012.10333; CORE, radius and number of rounds are ours), from v = 0, the common base. The latter two weigh all
alike: an author can lie about its date, and they are for swarms where authors lie.
Not for who may contribute (`exchange.py`), nor for whether the result is any good (`node/train/gate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

import numpy as np

from node.config import MergeConfig
from node.weights.chain.bf16 import all_finite, ties_of
from node.weights.merge import _kernels as kernels
from node.weights.merge._kernels import F64, U16, VALUES
from node.weights.merge.contributions import Contribution
from protocol._delta_layout import read_only
from protocol.codec import digest, framed
from protocol.errors import LocalProtocolError
from protocol.messages import Digest, PeerId

__all__ = ["Dropped", "MergeRule", "Merged", "Used", "fedbuff_weight", "resolve", "warm_up"]

Bits = Mapping[str, U16]

PIECE = 1 << 14
"""Values in work at a time; does not change the result."""


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """How a set is resolved. All who want the same bytes need the same rule; the order of its fields is that
    in `digest`. Raises LocalProtocolError for values out of range."""

    strategy: Literal["mean", "trimmed", "clipping"] = "mean"
    window_ms: int
    """A window of the charter, for staleness."""
    max_age_windows: int = 64
    """Older contributions than this, against the newest, are dropped."""
    norm_limit: float = 3.0
    """Longest task vector, in median lengths."""
    trim: float = 0.2
    """Share of values cut at each end by `trimmed`."""
    clip_radius: float = 1.0
    """r of `clipping`, in median lengths."""
    clip_rounds: int = 3
    """Rounds of `clipping`; each reads all weights once."""
    min_contributions: int = 2
    """Fewer are not merged."""

    @classmethod
    def of(cls, settings: MergeConfig, window_ms: int) -> MergeRule:
        """The rule that a configuration asks for, in a swarm with such windows."""
        names = [field.name for field in fields(cls) if field.name != "window_ms"]
        return cls(window_ms=window_ms, **{name: getattr(settings, name) for name in names})

    def __post_init__(self) -> None:
        bounds = {
            "window_ms": self.window_ms > 0,
            "max_age_windows": self.max_age_windows >= 0,
            "norm_limit": 1 <= self.norm_limit < math.inf,
            "trim": 0 <= self.trim < 0.5,
            "clip_radius": 0 < self.clip_radius < math.inf,
            "clip_rounds": self.clip_rounds >= 1,
            "min_contributions": self.min_contributions >= 1,
        }
        for name, fits in bounds.items():
            if not fits:
                raise LocalProtocolError(f"merge rule with {name} = {getattr(self, name)} is out of range")

    def ages(self, contributions: Sequence[Contribution]) -> list[int]:
        """Windows by which each is older than the newest of them."""
        windows = [each.link.created_at // self.window_ms for each in contributions]
        newest = max(windows, default=0)
        return [newest - window for window in windows]

    def digest(self) -> Digest:
        """Equal for equal rules only: nodes compare it before they take each other's contributions."""
        return digest(framed("merge-rule", *(repr(value).encode() for value in astuple(self))))


@dataclass(frozen=True)
class Used:
    """A contribution in the merge."""

    author: PeerId
    tag: Digest
    age_windows: int
    norm: float
    """Length of its task vector."""
    scale: float
    """What the norm guard multiplied it with, 1 for nothing."""
    weight: float
    """Its share in the merged change; of `trimmed` the one it has where nothing is cut."""


@dataclass(frozen=True)
class Dropped:
    """A contribution that is not in the merge. `reason`: merge_shapes, merge_not_finite, merge_tied,
    merge_stale."""

    author: PeerId
    tag: Digest
    reason: str


@dataclass(frozen=True)
class Merged:
    """The outcome. `bits` is None when fewer than `min_contributions` were usable; tied weights of the base
    are tied in it."""

    bits: dict[str, U16] | None
    used: tuple[Used, ...]
    dropped: tuple[Dropped, ...]


_Taken = tuple[Contribution, Bits, int]
"""A contribution to be merged, its weights, and windows by which it is older than the newest one."""


def resolve(base: Bits, contributions: Sequence[tuple[Contribution, Bits]], rule: MergeRule) -> Merged:
    """Merge. Blocking: each strategy reads all weights two to five times. Arrays are not written to. Raises
    LocalProtocolError for base weights that are not finite or not contiguous, or one contribution twice."""
    ordered = sorted(contributions, key=lambda each: each[0].tag)
    if len({contribution.author for contribution, _ in ordered}) < len(ordered):
        raise LocalProtocolError("two contributions of one author in a merge; the set keeps the newest only")
    if not all_finite(base):
        raise LocalProtocolError("the common base of a merge has infinities or NaN")
    names = sorted(base)
    taken, dropped = _guarded(base, ordered, rule)
    if len(taken) < rule.min_contributions:
        return Merged(None, (), tuple(dropped))
    ones = [1.0] * len(taken)
    norms = _distances(base, names, taken, ones, None)
    median = _lower_median([norm for norm in norms if norm > 0])
    scales = [min(1.0, rule.norm_limit * median / norm) if norm > 0 else 1.0 for norm in norms]
    weights = _weights(base, names, taken, scales, median, rule)
    cut = int(rule.trim * len(taken)) if rule.strategy == "trimmed" else None
    bits = _merged(base, names, taken, scales, weights, cut)
    used = [
        Used(contribution.author, contribution.tag, age, norm, scale, weight)
        for (contribution, _, age), norm, scale, weight in zip(taken, norms, scales, weights, strict=True)
    ]
    return Merged(bits, tuple(used), tuple(dropped))


def fedbuff_weight(age_windows: int) -> float:
    """s(tau) = (1 + tau)^-1/2. Square root and division are rounded alike everywhere; a power is not."""
    return 1.0 / math.sqrt(1 + age_windows)


def warm_up() -> None:
    """Compile the loops over weights, or read them compiled from numba's cache. For a moment when nobody
    waits; else the first merge takes 2 s longer."""
    bits, change = _flat(np.zeros(1, np.uint16)), np.zeros(1)
    kernels.add_squares(0.0, bits, bits, 1.0, change, VALUES)
    kernels.accumulate(change, bits, bits, 1.0, VALUES)
    kernels.difference(change, bits, bits, 1.0, VALUES)
    kernels.trimmed_mean(np.zeros((1, 1)), 0, change)
    kernels.rounded(bits, change, VALUES, np.zeros(1, np.uint16))


# --- guards -------------------------------------------------------------------------------------------------


def _guarded(
    base: Bits, ordered: Sequence[tuple[Contribution, Bits]], rule: MergeRule
) -> tuple[list[_Taken], list[Dropped]]:
    ties = ties_of(base)
    sound, dropped = [], []
    for contribution, bits in ordered:
        reason = _fault(base, bits, ties)
        if reason:
            dropped.append(Dropped(contribution.author, contribution.tag, reason))
        else:
            sound.append((contribution, bits))
    taken = []
    ages = rule.ages([contribution for contribution, _ in sound])
    for (contribution, bits), age in zip(sound, ages, strict=True):
        if age <= rule.max_age_windows:
            taken.append((contribution, bits, age))
        else:
            dropped.append(Dropped(contribution.author, contribution.tag, "merge_stale"))
    return taken, sorted(dropped, key=lambda each: each.tag)


def _fault(base: Bits, bits: Bits, ties: Mapping[str, str]) -> str:
    """What is wrong with a contribution's weights: a reason, "" for nothing."""
    if bits.keys() != base.keys():
        return "merge_shapes"
    if any(bits[name].shape != base[name].shape or bits[name].dtype != np.uint16 for name in base):
        return "merge_shapes"
    if not all_finite(bits):
        return "merge_not_finite"
    for name, source in ties.items():
        if bits[name] is not bits[source] and not np.array_equal(bits[name], bits[source]):
            return "merge_tied"
    return ""


# --- strategies ---------------------------------------------------------------------------------------------


def _weights(
    base: Bits,
    names: Sequence[str],
    taken: Sequence[_Taken],
    scales: Sequence[float],
    median: float,
    rule: MergeRule,
) -> list[float]:
    """The merged change as a combination of the task vectors that the norm guard left. Centered clipping
    moves from one combination to another, so that no copy of the weights in double precision is ever made."""
    count = len(taken)
    if rule.strategy == "trimmed":
        return [1.0 / count] * count
    if rule.strategy == "mean":
        staleness = [fedbuff_weight(age) for _, _, age in taken]
        total = math.fsum(staleness)
        return [weight / total for weight in staleness]
    weights = [0.0] * count
    for _ in range(rule.clip_rounds):
        distances = _distances(base, names, taken, scales, weights)
        radius = rule.clip_radius * median
        steps = [min(1.0, radius / distance) if distance > 0 else 1.0 for distance in distances]
        kept = 1.0 - math.fsum(steps) / count
        weights = [kept * weight + step / count for weight, step in zip(weights, steps, strict=True)]
    return weights


def _distances(
    base: Bits,
    names: Sequence[str],
    taken: Sequence[_Taken],
    scales: Sequence[float],
    weights: Sequence[float] | None,
) -> list[float]:
    """Lengths of x_i - v, where x_i are the scaled task vectors and v their combination by `weights`, None
    for nothing."""
    totals = [0.0] * len(taken)
    for old, parts in _pieces(base, names, taken):
        centre = np.zeros(old.size)
        if weights is not None:
            _combine(centre, old, parts, scales, weights)
        for k, part in enumerate(parts):
            totals[k] = kernels.add_squares(totals[k], old, part, scales[k], centre, VALUES)
    return [math.sqrt(total) for total in totals]


def _merged(
    base: Bits,
    names: Sequence[str],
    taken: Sequence[_Taken],
    scales: Sequence[float],
    weights: Sequence[float],
    cut: int | None,
) -> dict[str, U16]:
    """The weights, tensor by tensor. `cut`: how many values at each end `trimmed` leaves out, None for a
    combination."""
    ties = ties_of(base)
    merged: dict[str, U16] = {}
    for name in names:
        if name in ties:
            merged[name] = merged[ties[name]]
            continue
        result = np.empty(base[name].shape, np.uint16)
        out, start = result.reshape(-1), 0
        for old, parts in _pieces(base, [name], taken):
            change = np.zeros(old.size)
            if cut is None:
                _combine(change, old, parts, scales, weights)
            else:
                rows = np.empty((len(parts), old.size))
                for row, part, scale in zip(rows, parts, scales, strict=True):
                    kernels.difference(row, old, part, scale, VALUES)
                kernels.trimmed_mean(rows, cut, change)
            kernels.rounded(old, change, VALUES, out[start : start + old.size])
            start += old.size
        merged[name] = result
    return merged


def _combine(
    out: F64, old: U16, parts: Sequence[U16], scales: Sequence[float], weights: Sequence[float]
) -> None:
    for part, scale, weight in zip(parts, scales, weights, strict=True):
        kernels.accumulate(out, old, part, scale * weight, VALUES)


def _pieces(base: Bits, names: Sequence[str], taken: Sequence[_Taken]) -> Iterator[tuple[U16, list[U16]]]:
    """The same piece of the base and of every contribution, in order."""
    for name in names:
        flats = [_flat(base[name]), *(_flat(bits[name]) for _, bits, _ in taken)]
        for start in range(0, flats[0].size, PIECE):
            old, *parts = (flat[start : start + PIECE] for flat in flats)
            yield old, parts


def _flat(array: U16) -> U16:
    if not array.flags.c_contiguous:
        raise LocalProtocolError("weights in a merge must be contiguous arrays")
    return read_only(array.reshape(-1))  # the loops are compiled for each kind of array: show them one


def _lower_median(values: Sequence[float]) -> float:
    """The median, the lower one of two: half of the authors cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
