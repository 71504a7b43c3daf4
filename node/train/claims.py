"""How far a peer's claimed log-probabilities are believed: never below half of what this policy gives.

    log mu' = max(log mu, log pi - ln 2)            each token of a peer's rollout
    log mu'(y) = max(log mu(y), log pi(y) - T ln 2)   and the completion, of T tokens here

log pi is this node's own, from when the rollout was first trained on: the forward pass of the step has it, so
the bound costs nothing and is exact. A claim that is too low would multiply a gradient without limit; now a
ratio is at most 2, by token and by mean over a completion, times what the policy itself has moved since. A
claim that is too high only weighs its own rollout down. Own rollouts are as their engine computed them. A cap
of 2 on a token's weight is that of truncated importance sampling; to use it against lies is ours: evidence
RECONSTRUCTED. For objectives that multiply ratios over a completion, punish their size or give the weight of
dropped rollouts to the others this is no bound: they say so (`Objective.believes_claims`), and are refused
where peers' groups are trained on. Not for finding liars (`node/verify/plausibility.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from node.train.objectives import MAX_CLAIM_FACTOR, LossInputs

__all__ = ["bounded_claims"]


def bounded_claims(inputs: LossInputs, own_B: Tensor) -> LossInputs:
    """`inputs` with the claims of rows that are not in `own_B` bounded."""
    floor_BT = inputs.ingestion_BT - math.log(MAX_CLAIM_FACTOR)
    floor_B = torch.where(inputs.mask_BT, floor_BT, 0.0).sum(-1)
    return replace(
        inputs,
        behaviour_BT=torch.where(
            own_B[:, None], inputs.behaviour_BT, torch.maximum(inputs.behaviour_BT, floor_BT)
        ),
        behaviour_sum_B=torch.where(
            own_B, inputs.behaviour_sum_B, torch.maximum(inputs.behaviour_sum_B, floor_B)
        ),
    )
