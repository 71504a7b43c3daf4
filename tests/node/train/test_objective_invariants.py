"""What holds for every objective, on random tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.train.objectives import Compat, DppoTv, Graft, Hacpo, LossInputs, Objective, PpoClip, Tis, TokenLoss

OBJECTIVES = [PpoClip(), PpoClip(denominator="ingestion"), DppoTv(), Tis(), Compat(), Hacpo(), Graft()]
ROWS, TOKENS = 4, 5

every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.name}")
seeds = given(st.integers(0, 2**32 - 1), st.floats(0.01, 1000.0))


def random_inputs(seed: int, spread: float) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> Tensor:
        return -spread * torch.rand((ROWS, TOKENS), generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    behaviour_BT, mask_BT = logprobs(), torch.arange(TOKENS) < lengths_B[:, None]
    return LossInputs(
        logprobs_BT=logprobs(),
        ingestion_BT=logprobs(),
        behaviour_BT=behaviour_BT,
        behaviour_sum_B=torch.where(mask_BT, behaviour_BT, 0.0).sum(-1),
        mask_BT=mask_BT,
        advantages_B=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        uses_B=torch.randint(0, 3, (ROWS,), generator=generator).double(),
        own_mean_logprobs_N=-spread * torch.rand(6, generator=generator, dtype=torch.float64),
    )


def evaluate(objective: Objective, inputs: LossInputs) -> tuple[TokenLoss, Tensor]:
    current_BT = inputs.logprobs_BT.clone().requires_grad_()
    result = objective(with_fields(inputs, logprobs_BT=current_BT))
    if not result.loss_BT.requires_grad:
        return result, torch.zeros_like(current_BT)
    (gradient_BT,) = torch.autograd.grad(result.loss_BT.sum(), current_BT)
    return result, gradient_BT


def with_fields(inputs: LossInputs, **fields: Tensor) -> LossInputs:
    values = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__}
    return LossInputs(**{**values, **fields})


@every_objective
@settings(max_examples=25)
@seeds
def test_finite_in_finite_out(objective: Objective, seed: int, spread: float) -> None:
    result, gradient_BT = evaluate(objective, random_inputs(seed, spread))
    for tensor in (result.loss_BT, result.weights_BT, result.log_ratio_BT, gradient_BT):
        assert tensor.isfinite().all()


@every_objective
@settings(max_examples=15)
@seeds
def test_masked_places_do_not_matter(objective: Objective, seed: int, spread: float) -> None:
    inputs = random_inputs(seed, spread)
    result, gradient_BT = evaluate(objective, inputs)
    hidden_BT = ~inputs.mask_BT
    assert (gradient_BT[hidden_BT] == 0).all()
    assert (result.loss_BT[hidden_BT] == 0).all()
    assert not result.kept_BT[hidden_BT].any()
    for junk in (math.nan, math.inf, 1e30):
        spoiled = with_fields(
            inputs,
            **{
                name: getattr(inputs, name).masked_fill(hidden_BT, junk)
                for name in ("logprobs_BT", "ingestion_BT", "behaviour_BT")
            },
        )
        other, other_gradient_BT = evaluate(objective, spoiled)
        assert torch.equal(other.loss_BT, result.loss_BT)
        assert torch.equal(other_gradient_BT, gradient_BT)
        assert torch.equal(other.weights_BT, result.weights_BT)


@every_objective
@settings(max_examples=15)
@seeds
def test_order_of_rows_does_not_matter(objective: Objective, seed: int, spread: float) -> None:
    inputs = random_inputs(seed, spread)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    result, gradient_BT = evaluate(objective, inputs)
    other, other_gradient_BT = evaluate(objective, inputs.rows(order))
    assert torch.equal(other.loss_BT, result.loss_BT[order])
    assert torch.equal(other_gradient_BT, gradient_BT[order])


@every_objective
@settings(max_examples=15)
@seeds
def test_at_ratio_one_all_are_the_policy_gradient(objective: Objective, seed: int, spread: float) -> None:
    """pi = pi_old = mu, and text as usual as one's own: the gradient of each token is -A."""
    inputs = random_inputs(seed, spread)
    same_BT = inputs.logprobs_BT
    inputs = with_fields(
        inputs,
        ingestion_BT=same_BT,
        behaviour_BT=same_BT,
        behaviour_sum_B=torch.where(inputs.mask_BT, same_BT, 0.0).sum(-1),
        own_mean_logprobs_N=torch.full((3,), -2.0 * spread, dtype=torch.float64),
    )
    result, gradient_BT = evaluate(objective, inputs)
    expected_BT = torch.where(inputs.mask_BT, -inputs.advantages_B[:, None], 0.0)
    assert torch.allclose(gradient_BT, expected_BT, atol=1e-12)
    assert torch.equal(result.kept_BT, inputs.mask_BT)


@every_objective
@settings(max_examples=10)
@seeds
def test_zero_advantage_teaches_nothing(objective: Objective, seed: int, spread: float) -> None:
    inputs = random_inputs(seed, spread)
    _, gradient_BT = evaluate(
        objective, with_fields(inputs, advantages_B=torch.zeros(ROWS, dtype=torch.float64))
    )
    assert (gradient_BT == 0).all()
