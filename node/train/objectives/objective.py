"""An objective: a ratio, controls and an aggregation, put together.

    ratio --> r A --> control --> control --> ... --> weight x surrogate - penalty --> TokenLoss
                         ^
                      statistics over the whole batch, from `plan`

Pure functions of padded tensors. Published methods are presets: `presets/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from node.train.objectives.aggregation import Aggregation, rescale, row_rescale
from node.train.objectives.base import LossInputs, Need, TokenLoss, masked
from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import Level, Ratio, Reference

__all__ = ["Objective", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What all rows of one treatment have in common."""

    statistics: tuple[Tensor, ...]
    """Of each control."""
    rescale_S: Tensor
    """Of each source; empty if dropped tokens count in the denominator."""


@dataclass(frozen=True)
class Objective:
    """What the rows of a treatment minimise."""

    ratio: Ratio
    controls: tuple[Control, ...] = ()
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    kept_only: bool = False
    """Dropped tokens leave the denominator, and so do rollouts of which none is left."""
    name: str = "objective"
    """Of the preset."""

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that must be there."""
        return self.ratio.needs.union(*(control.needs for control in self.controls))

    @property
    def believes_claims(self) -> bool:
        """Whether an author's lie about its log-probabilities moves a gradient by more than a factor of
        `MAX_CLAIM_FACTOR`: then it is not for peers' groups."""
        product = self.ratio.level is Level.SEQUENCE and self.ratio.claimed
        # With `kept_only` a rollout whose claim gets it dropped leaves its weight to the others.
        passed_on = self.kept_only and Need.BEHAVIOUR in self.needs
        return product or passed_on or any(control.believes_claims for control in self.controls)

    @property
    def whole_batch(self) -> bool:
        """Whether a micro-batch needs the `plan` of all rows."""
        return self.kept_only or any(control.whole_batch for control in self.controls)

    @torch.no_grad()
    def plan(self, inputs: LossInputs) -> Plan:
        """Statistics over `inputs`: all rows of one treatment in the batch."""
        draft = Draft.begin(inputs.clean(), self.ratio)
        statistics = []
        for control in self.controls:
            statistics.append(control.measure(draft))
            draft = control(draft, statistics[-1])
        if not self.kept_only:
            return Plan(tuple(statistics), draft.weight_BT.new_empty(0))
        mask_BT = draft.mask_BT
        return Plan(
            tuple(statistics),
            rescale(self.aggregation, mask_BT, draft.weight_BT == 0, draft.inputs.sources()),
        )

    def __call__(self, inputs: LossInputs, plan: Plan | None = None) -> TokenLoss:
        """Losses of some rows. Without a plan, these are all there are."""
        if plan is None:
            plan = self.plan(inputs) if self.whole_batch else self._no_plan
        draft = Draft.begin(inputs.clean(), self.ratio)
        for control, statistic in zip(self.controls, plan.statistics, strict=True):
            draft = control(draft, statistic)
        mask_BT, dropped_BT = draft.mask_BT, draft.mask_BT & (draft.weight_BT == 0)
        loss_BT = -masked(draft.weight_BT * draft.surrogate_BT - draft.penalty_BT, mask_BT)
        if self.kept_only:
            factor_B = plan.rescale_S[inputs.sources()] * row_rescale(self.aggregation, mask_BT, dropped_BT)
            loss_BT = loss_BT * factor_B[:, None].to(loss_BT.dtype)
        return TokenLoss(
            loss_BT=loss_BT,
            kept_BT=mask_BT & draft.unclipped_BT & ~dropped_BT,
            dropped_BT=dropped_BT,
            weights_BT=masked(draft.importance_BT, mask_BT),
            log_ratio_BT=self._gap.log(draft.inputs),
        )

    @property
    def _no_plan(self) -> Plan:
        return Plan((torch.empty(0),) * len(self.controls), torch.empty(0))

    @property
    def _gap(self) -> Ratio:
        if Need.BEHAVIOUR in self.needs:
            return Ratio(Reference.BEHAVIOUR)
        return Ratio(Reference.AUTHOR, level=Level.SEQUENCE_MEAN)
