"""What a control works on, and what it is.

An objective starts from the surrogate r A and hands it, a `Draft`, from control to control. Each may do four
things: give tokens another shape of surrogate, scale them by a detached weight, drop them, or add a penalty.
A control that must know the whole batch of its treatment `measure`s it first, and is then given the
statistic, so that the size of micro-batches changes no gradient.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from node.train.objectives.base import LossInputs, Need
from node.train.objectives.ratio import Ratio

__all__ = ["Control", "Draft"]


@dataclass(frozen=True)
class Draft:
    """What will be maximised is weight x surrogate - penalty, token by token. Masked places hold finite
    values."""

    inputs: LossInputs
    """Clean."""
    mask_BT: Tensor
    advantages_BT: Tensor
    log_ratio_BT: Tensor
    """Of the objective's ratio, detached."""
    ratio_BT: Tensor
    """With gradient."""
    surrogate_BT: Tensor
    """With gradient."""
    penalty_BT: Tensor
    weight_BT: Tensor
    """Detached; 0 drops the token."""
    unclipped_BT: Tensor
    """False where the surrogate has no gradient."""
    importance_BT: Tensor
    """Detached importance weight that is reported."""

    @classmethod
    def begin(cls, inputs: LossInputs, ratio: Ratio) -> Draft:
        """r A with nothing in its way. `inputs` are clean."""
        attached_BT = ratio.attached(inputs)
        ratio_BT = attached_BT.exp()
        advantages_BT = inputs.advantages_B[:, None].expand_as(ratio_BT)
        return cls(
            inputs=inputs,
            mask_BT=inputs.mask_BT,
            advantages_BT=advantages_BT,
            log_ratio_BT=attached_BT.detach(),
            ratio_BT=ratio_BT,
            surrogate_BT=ratio_BT * advantages_BT,
            penalty_BT=torch.zeros_like(advantages_BT),
            weight_BT=torch.ones_like(advantages_BT),
            unclipped_BT=inputs.mask_BT,
            importance_BT=ratio_BT.detach(),
        )

    def harmful(self) -> Tensor:
        """True where the policy has already moved in the direction of the advantage."""
        ahead_BT = (self.advantages_BT > 0) & (self.log_ratio_BT > 0)
        behind_BT = (self.advantages_BT < 0) & (self.log_ratio_BT < 0)
        return (ahead_BT | behind_BT) & self.mask_BT

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """One of two numbers for each token, by the sign of its advantage."""
        like = self.weight_BT
        return torch.where(
            self.advantages_BT < 0, torch.full_like(like, negative), torch.full_like(like, positive)
        )

    def shaped(self, surrogate_BT: Tensor, unclipped_BT: Tensor) -> Draft:
        """With another surrogate, which has gradient only where unclipped."""
        return dataclasses.replace(
            self, surrogate_BT=surrogate_BT, unclipped_BT=self.unclipped_BT & unclipped_BT
        )

    def weighed(self, factor_BT: Tensor, importance_BT: Tensor | None = None) -> Draft:
        """With one more detached factor, which may be reported."""
        return dataclasses.replace(
            self,
            weight_BT=self.weight_BT * factor_BT,
            importance_BT=self.importance_BT if importance_BT is None else importance_BT,
        )

    def only(self, kept_BT: Tensor) -> Draft:
        """Without the other tokens."""
        return dataclasses.replace(self, weight_BT=torch.where(kept_BT, self.weight_BT, 0.0))

    def penalised(self, penalty_BT: Tensor) -> Draft:
        """With one more penalty, dropped tokens too."""
        return dataclasses.replace(self, penalty_BT=self.penalty_BT + penalty_BT)


class Control(ABC):
    """A frozen dataclass of settings that changes a draft."""

    whole_batch: ClassVar[bool] = False
    """Whether `measure` says anything."""
    also_needs: ClassVar[frozenset[Need]] = frozenset()
    """What must be there beyond what the control's ratios need."""

    @property
    def needs(self) -> frozenset[Need]:
        """What must be there."""
        ratios = [value for value in vars(self).values() if isinstance(value, Ratio)]
        return self.also_needs.union(*(ratio.needs for ratio in ratios))

    @property
    def believes_claims(self) -> bool:
        """Whether a lie about log mu moves a gradient by more than `MAX_CLAIM_FACTOR`, although none makes
        the ratio of a token larger than that."""
        return False

    def measure(self, draft: Draft) -> Tensor:
        """The statistic over all rows of the treatment, without gradient."""
        return draft.weight_BT.new_empty(0)

    @abstractmethod
    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        """The changed draft of some rows. `statistic` is what `measure` found in all of them."""
