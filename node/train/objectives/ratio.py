"""Ratio: how much more probable text is by one policy than by another, at one of several levels.

Every policy is named by where its log-probabilities come from (`Reference`); a `Ratio` compares two of them,
the current one by default. Levels reduce the log ratios l_t of single tokens:

    token           l_t
    sequence        sum of l: the true ratio W of whole completions
    sequence_mean   mean of l: s = W^(1/T), GSPO (2507.18071), HACPO (2603.02604)
    sequence_max    largest l; sequence_min smallest l: for bounds and vetoes
    prefix_mean     mean of l_1..l_t: PNPO (2608.01418), s at t = T
    prefix_min      smallest of l_1..l_(t-1), 0 at t = 1: MinPRO (2601.22718)

Log ratios are clamped to +-20 after that (verl clamps likewise), so that no exponential overflows. Whatever
the level, gradient flows to each token through its own log pi only, as in GSPO's token form: r_t = sg(R_t)
pi_t / sg(pi_t). For levels that are the same for all tokens of a row, and rows that share one factor, this is
the gradient of the ratio itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from node.train.objectives.base import LossInputs, Need, given, masked

__all__ = ["MAX_LOG_RATIO", "ON_POLICY", "ROUNDING", "Level", "Ratio", "Reference", "logprobs", "reduced"]

MAX_LOG_RATIO = 20.0
"""Nats: log ratios are clamped to this on both sides."""
ROUNDING = 1e-4
"""Nats by which two computations of the same log-probability may differ. Where a threshold is one of the
batch's own log ratios, no token may fall on this or that side of it by chance."""


class Reference(StrEnum):
    """Whose log-probabilities."""

    CURRENT = "current"
    """The weights that learn, detached."""
    BEHAVIOUR = "behaviour"
    """mu: the engine, as it sampled."""
    AUTHOR = "author"
    """mu of the whole completion, spread evenly over the receiver's tokens; for sequence levels."""
    INGESTION = "ingestion"
    """pi_old, recomputed: own weights when the rollout was first trained on."""
    SNAPSHOT = "snapshot"
    """pi_old, exact: the weights that generated the token; `INGESTION` where they are not known."""
    EWMA = "ewma"
    """A moving average of the weights; `INGESTION` where it says nothing."""
    INTERPOLATED = "interpolated"
    """A-3PO (2512.06547): log mu + a (log pi - log mu), a = (d - 1) / d at lag d, 0 at lag 0."""


class Level(StrEnum):
    """What a ratio speaks of."""

    TOKEN = "token"  # noqa: S105
    SEQUENCE = "sequence"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_MAX = "sequence_max"
    SEQUENCE_MIN = "sequence_min"
    PREFIX_MEAN = "prefix_mean"
    PREFIX_MIN = "prefix_min"


_NEEDS: Mapping[Reference, frozenset[Need]] = {
    Reference.BEHAVIOUR: frozenset({Need.BEHAVIOUR}),
    Reference.SNAPSHOT: frozenset({Need.SNAPSHOT}),
    Reference.EWMA: frozenset({Need.EWMA}),
    Reference.INTERPOLATED: frozenset({Need.BEHAVIOUR, Need.VERSIONS}),
}


@dataclass(frozen=True)
class Ratio:
    """`of` over `over` at a level."""

    over: Reference
    of: Reference = Reference.CURRENT
    level: Level = Level.TOKEN
    limit: float = MAX_LOG_RATIO

    @property
    def needs(self) -> frozenset[Need]:
        """What must be there."""
        return _NEEDS.get(self.of, frozenset()) | _NEEDS.get(self.over, frozenset())

    @property
    def claimed(self) -> bool:
        """Whether an author's own word decides it."""
        return not _CLAIMS.isdisjoint((self.of, self.over))

    @torch.no_grad()
    def log(self, inputs: LossInputs) -> Tensor:
        """The logarithm, detached and clamped; 0 where masked. `inputs` are clean."""
        return self._raw(inputs).clamp(-self.limit, self.limit)

    def value(self, inputs: LossInputs) -> Tensor:
        """The ratio, detached; 1 where masked."""
        return self.log(inputs).exp()

    def attached(self, inputs: LossInputs) -> Tensor:
        """The logarithm with each token's gradient, none beyond the clamp."""
        moved_BT = inputs.logprobs_BT - inputs.logprobs_BT.detach()
        return (self._raw(inputs) + moved_BT).clamp(-self.limit, self.limit)

    @torch.no_grad()
    def _raw(self, inputs: LossInputs) -> Tensor:
        gaps_BT = logprobs(self.of, inputs) - logprobs(self.over, inputs)
        return reduced(self.level, masked(gaps_BT, inputs.mask_BT), inputs.mask_BT)


_CLAIMS = frozenset({Reference.AUTHOR, Reference.BEHAVIOUR, Reference.INTERPOLATED})

ON_POLICY = Ratio(Reference.CURRENT)
"""1 everywhere, with the gradient of log pi: no correction."""


def logprobs(reference: Reference, inputs: LossInputs) -> Tensor:
    """Log-probabilities by `reference`, detached."""
    if reference is Reference.CURRENT:
        return inputs.logprobs_BT.detach()
    if reference is Reference.BEHAVIOUR:
        return inputs.behaviour_BT
    if reference is Reference.AUTHOR:
        each_B = inputs.behaviour_sum_B / inputs.mask_BT.sum(-1).clamp(min=1)
        return each_B[:, None].expand_as(inputs.logprobs_BT)
    if reference is Reference.SNAPSHOT:
        return _known(given(inputs.snapshot_BT, Need.SNAPSHOT), inputs)
    if reference is Reference.EWMA:
        return _known(given(inputs.ewma_BT, Need.EWMA), inputs)
    if reference is Reference.INTERPOLATED:
        lags_BT = given(inputs.lags_BT, Need.VERSIONS)
        share_BT = (lags_BT - 1).clamp(min=0) / lags_BT.clamp(min=1)
        return inputs.behaviour_BT + share_BT * (inputs.logprobs_BT.detach() - inputs.behaviour_BT)
    return inputs.ingestion_BT


def reduced(level: Level, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Values of tokens at a level, one for each token again; 0 where masked."""
    return masked(_LEVELS[level](values_BT, mask_BT).expand_as(values_BT), mask_BT)


def _known(values_BT: Tensor, inputs: LossInputs) -> Tensor:
    return torch.where(values_BT.isnan(), inputs.ingestion_BT, values_BT)


def _mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return values_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)


def _max(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    if values_BT.shape[-1] == 0:
        return values_BT
    return values_BT.masked_fill(~mask_BT, -math.inf).amax(-1, keepdim=True)


def _prefix_min(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    if values_BT.shape[-1] == 0:
        return values_BT
    lowest_BT = values_BT.masked_fill(~mask_BT, math.inf).cummin(-1).values
    before_BT = torch.nn.functional.pad(lowest_BT[:, :-1], (1, 0), value=math.inf)
    return before_BT.masked_fill(before_BT.isinf(), 0.0)


_LEVELS: Mapping[Level, Callable[[Tensor, Tensor], Tensor]] = {
    Level.TOKEN: lambda values_BT, _: values_BT,
    Level.SEQUENCE: lambda values_BT, _: values_BT.sum(-1, keepdim=True),
    Level.SEQUENCE_MEAN: _mean,
    Level.SEQUENCE_MAX: _max,
    Level.SEQUENCE_MIN: lambda values_BT, mask_BT: -_max(-values_BT, mask_BT),
    Level.PREFIX_MEAN: lambda values_BT, mask_BT: values_BT.cumsum(-1) / mask_BT.cumsum(-1).clamp(min=1),
    Level.PREFIX_MIN: _prefix_min,
}
