"""What the golden tests of objectives share: a 2 x 4 tensor with one masked place, gradients token by token.

Row 0 has advantage +1 and four tokens, row 1 has advantage -1 and three; the fourth place of row 1 is masked
and holds NaN. Probabilities are given, their logarithms go in. Gradients are those of the plain sum of token
losses, so that each is the token's own derivative with respect to its log-probability. Expected values are
worked out in each test from the same probabilities, never by the library.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from node.train.objectives import LossInputs, Objective, TokenLoss

__all__ = ["MASK", "NAN", "logs", "near", "run"]

NAN = math.nan
MASK = torch.tensor([[True, True, True, True], [True, True, True, False]])


def logs(rows: list[list[float]]) -> Tensor:
    return torch.log(doubles(rows))


def doubles(rows: list[list[float]] | list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def run(
    objective: Objective,
    logprobs: Tensor,
    *,
    behaviour: Tensor | None = None,
    ingestion: Tensor | None = None,
    snapshot: Tensor | None = None,
    ewma: Tensor | None = None,
    behaviour_sum: list[float] | None = None,
    advantages: tuple[float, float] = (1.0, -1.0),
    uses: int = 0,
    own: list[float] | None = None,
    own_tokens: list[float] | None = None,
    lags: list[list[float]] | None = None,
    rewards: list[float] | None = None,
    sources: list[int] | None = None,
) -> tuple[TokenLoss, list[list[float]]]:
    """The objective's result and d(sum of losses) / d(log-probabilities)."""
    current = logprobs.clone().requires_grad_()
    result = objective(
        LossInputs(
            logprobs_BT=current,
            ingestion_BT=logprobs if ingestion is None else ingestion,
            behaviour_BT=torch.full_like(logprobs, NAN) if behaviour is None else behaviour,
            behaviour_sum_B=doubles(behaviour_sum or [0.0, 0.0]),
            mask_BT=MASK,
            advantages_B=doubles(list(advantages)),
            uses_B=doubles([float(uses)] * 2),
            own_mean_logprobs_N=doubles(own or []),
            own_tokens_N=doubles(own_tokens or []),
            rewards_B=None if rewards is None else doubles(rewards),
            lags_BT=None if lags is None else doubles(lags),
            source_B=None if sources is None else torch.tensor(sources),
            snapshot_BT=snapshot,
            ewma_BT=ewma,
        )
    )
    (gradient,) = torch.autograd.grad(result.loss_BT.sum(), current)
    return result, gradient.tolist()


def near(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=1e-9) for row in rows]
