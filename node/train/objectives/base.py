"""What an objective is given and what it gives: log-probabilities in, per-token losses out.

For: the two records between trainer and objective, and the names of inputs that not every trainer has
(`Need`). Masked places may hold anything, even NaN; `LossInputs.clean` empties them and takes out rows whose
advantage is no number. Not for: trust, the weight of a source and denominators, which the batch applies
afterwards, so that an objective never sees them. Letters: B rollouts, T tokens of a completion, N own
rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["MAX_CLAIM_FACTOR", "PROVIDERS", "LossInputs", "Need", "TokenLoss", "given", "masked"]

MAX_CLAIM_FACTOR = 2.0
"""What an author claims about its log-probabilities makes no ratio of a token larger than this
(`node/train/claims.py`), nor may an objective that peers' groups use make more of it."""


class Need(StrEnum):
    """An input that must be there for an objective, beyond log pi, advantages and the author's log mu of the
    whole completion."""

    BEHAVIOUR = "behaviour"
    """log mu of each token as sampled."""
    SNAPSHOT = "snapshot"
    """log pi_old of each token, by the very weights that generated it."""
    EWMA = "ewma"
    """log pi of each token by a moving average of the weights."""
    VERSIONS = "versions"
    """The lag of each token, in versions."""
    REWARDS = "rewards"
    OWN_ROLLOUTS = "own_rollouts"
    """Own rollouts in the batch, to compare other models' with."""


PROVIDERS: Mapping[Need, str] = {
    Need.BEHAVIOUR: "log mu of each token, which rollouts of the own tokenizer carry, re-made tokens do not",
    Need.SNAPSHOT: "log pi_old of each token by the version that generated it, which snapshots of the "
    "versions in use provide",
    Need.EWMA: "log pi by a moving average of the weights, which a trainer that keeps one provides",
    Need.VERSIONS: "the version of each token, which rollouts of the own lineage carry",
    Need.REWARDS: "rewards, which this node's verifier provides",
    Need.OWN_ROLLOUTS: "own rollouts to compare with, which a step with own groups provides",
}
"""What it is and who provides it, for messages."""


@dataclass(frozen=True)
class LossInputs:
    """trainer -> objective. Only `logprobs_BT` carries gradient."""

    logprobs_BT: Tensor
    """log pi: current weights, at the temperature of the rollout."""
    ingestion_BT: Tensor
    """log pi_old: own weights when the rollout was first trained on; the detached log pi on first use."""
    behaviour_BT: Tensor
    """log mu of each token as sampled; meaningless for re-tokenised text."""
    behaviour_sum_B: Tensor
    """log mu of the whole completion under its author, in the author's tokens."""
    mask_BT: Tensor
    """True on tokens of the completion."""
    advantages_B: Tensor
    uses_B: Tensor
    """How often the rollout was trained on before."""
    own_mean_logprobs_N: Tensor
    """Mean log-probability per token of N own rollouts: what this policy finds usual."""
    own_tokens_N: Tensor | None = None
    """Their lengths."""
    rewards_B: Tensor | None = None
    lags_BT: Tensor | None = None
    """Versions by which the trainer is ahead of the one that generated the token."""
    source_B: Tensor | None = None
    """Number of the source; None: one source."""
    snapshot_BT: Tensor | None = None
    """log pi_old by the weights that generated the token; NaN where they are no longer kept."""
    ewma_BT: Tensor | None = None
    """log pi by a moving average of the weights."""

    def sources(self) -> Tensor:
        """`source_B`, or zeros."""
        zeros_B = torch.zeros_like(self.advantages_B, dtype=torch.long)
        return zeros_B if self.source_B is None else self.source_B

    def rows(self, kept: Tensor) -> LossInputs:
        """The inputs of some rows."""
        return self._with(lambda value: value[kept], ("_B", "_BT"))

    def clean(self) -> LossInputs:
        """0 where masked, whatever stood there; rows with an advantage that is no finite number are masked
        altogether."""
        finite_B = self.advantages_B.isfinite()
        mask_BT = self.mask_BT & finite_B[:, None]
        cleaned = self._with(lambda value: masked(value, mask_BT), ("_BT",))
        return dataclasses.replace(
            cleaned, mask_BT=mask_BT, advantages_B=torch.where(finite_B, self.advantages_B, 0.0)
        )

    def _with(self, change: Callable[[Tensor], Tensor], endings: tuple[str, ...]) -> LossInputs:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return LossInputs(
            **{
                name: change(value) if value is not None and name.endswith(endings) else value
                for name, value in values.items()
            }
        )


@dataclass(frozen=True)
class TokenLoss:
    """objective -> trainer."""

    loss_BT: Tensor
    """To be minimised; 0 where masked."""
    kept_BT: Tensor
    """True where a token's gradient was neither dropped nor clipped away."""
    dropped_BT: Tensor
    """True where a token was taken out altogether; what is neither kept nor dropped was clipped."""
    weights_BT: Tensor
    """Detached importance weight of each token, 0 where masked; for the effective sample size."""
    log_ratio_BT: Tensor
    """Detached log pi - log mu, or its mean per token for objectives that know mu of whole completions only;
    0 where masked."""


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`values_BT` with 0 where masked, whatever stood there."""
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def given(values: Tensor | None, need: Need) -> Tensor:
    """An input that `require` has promised. Raises ValueError without it."""
    if values is None:
        raise ValueError(f"the trainer gave no {need}; `require` checks beforehand that it can")
    return values
