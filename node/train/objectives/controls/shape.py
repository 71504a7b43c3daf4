"""Shapes: other surrogates than r A.

Score     A log pi: REINFORCE, whose weight is detached (CISPO, DPPO, TOPR, VESPO)
SoftGate  (4 / tau) sigmoid(tau (r - 1)) A, soft-SAPO: A grad log pi at r = 1, fading on both sides
Penalty   - coefficient x (log r)^2, dropped tokens too (DRO, prime-rl)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.ratio import Ratio

__all__ = ["Penalty", "Score", "SoftGate"]


@dataclass(frozen=True)
class Score(Control):
    """The gradient is that of r A at r = 1, the value another one."""

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        return draft.shaped(draft.advantages_BT * draft.inputs.logprobs_BT, draft.mask_BT)


@dataclass(frozen=True)
class SoftGate(Control):
    """tau by the sign of the advantage."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        tau_BT = draft.by_sign(self.tau_positive, self.tau_negative)
        gate_BT = 4.0 / tau_BT * torch.sigmoid(tau_BT * (draft.ratio_BT - 1.0))
        return draft.shaped(gate_BT * draft.advantages_BT, draft.mask_BT)


@dataclass(frozen=True)
class Penalty(Control):
    """Pulls the ratio `of` towards one."""

    of: Ratio
    coefficient: float

    @property
    def believes_claims(self) -> bool:
        """The pull grows with the log ratio, without bound where a claim is too high."""
        return self.coefficient > 0 and self.of.claimed

    def __call__(self, draft: Draft, statistic: Tensor) -> Draft:
        return draft.penalised(self.coefficient * self.of.attached(draft.inputs) ** 2)
