"""What an objective is: per-token losses from log-probabilities, for the rows of one treatment.

An objective makes three choices: the ratio (`ratio.py`: whose probabilities are compared), the control
(`control.py`: what bounds or drops a token) and the aggregation (`aggregation.py`: what the sum is divided
by). Objectives are pure functions of padded tensors; trust, the weight of a source and the denominator are
applied by the batch afterwards, so an objective never sees them. Masked places may hold anything, even NaN.
Letters: B rollouts, T tokens of a completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from node.train.objectives.aggregation import Aggregation

__all__ = ["LossInputs", "Objective", "TokenLoss"]


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

    def rows(self, kept: Tensor) -> LossInputs:
        """The inputs of some rows."""
        return LossInputs(
            logprobs_BT=self.logprobs_BT[kept],
            ingestion_BT=self.ingestion_BT[kept],
            behaviour_BT=self.behaviour_BT[kept],
            behaviour_sum_B=self.behaviour_sum_B[kept],
            mask_BT=self.mask_BT[kept],
            advantages_B=self.advantages_B[kept],
            uses_B=self.uses_B[kept],
            own_mean_logprobs_N=self.own_mean_logprobs_N,
        )


@dataclass(frozen=True)
class TokenLoss:
    """objective -> trainer."""

    loss_BT: Tensor
    """To be minimised; 0 where masked."""
    kept_BT: Tensor
    """True where a token's gradient was neither dropped nor clipped away."""
    weights_BT: Tensor
    """Detached importance weight of each token, 0 where masked; for the effective sample size."""
    log_ratio_BT: Tensor
    """Detached log pi - log mu, or its mean per token for sequence ratios; 0 where masked."""


class Objective(Protocol):
    """A frozen dataclass of settings that can be called."""

    name: ClassVar[str]
    needs_token_behaviour: ClassVar[bool]
    """Whether log mu must be known for each token (same tokenizer)."""

    @property
    def aggregation(self) -> Aggregation: ...

    def __call__(self, inputs: LossInputs) -> TokenLoss: ...
