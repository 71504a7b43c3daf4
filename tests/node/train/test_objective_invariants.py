"""What holds for every preset, on random tensors."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.train.objectives import Aggregation, LossInputs, Objective, Reference, TokenLoss, all_presets
from node.train.objectives.presets.decoupled import decoupled_ppo, mis, tis
from node.train.objectives.presets.direct import sat
from node.train.objectives.presets.proximal import ppo_clip
from node.train.objectives.ratio import MAX_LOG_RATIO

OBJECTIVES = {each.name: each.make(**dict.fromkeys(each.required, 0.1)) for each in all_presets()} | {
    "ppo_clip-ingestion": ppo_clip(denominator=Reference.INGESTION),
    "decoupled_ppo-snapshot": decoupled_ppo(old=Reference.SNAPSHOT),
    "mis-normalised": mis(normalise=True),
    "mis-rollout-means": mis(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
    "tis-normalised": tis(normalise=True),
    "sat-continuous": sat(continuous=True),
}
ROWS, TOKENS = 4, 5
OWN_ADVANTAGES = {"erils"}
"""Presets that put an advantage of their own in the place of the one they are given."""

every_objective = pytest.mark.parametrize("name", OBJECTIVES)
seeds = given(st.integers(0, 2**32 - 1), st.floats(0.01, 1000.0))
FEW = settings(max_examples=6)


def random_inputs(seed: int, spread: float, rows: int = ROWS, tokens: int = TOKENS) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> Tensor:
        return -spread * torch.rand((rows, tokens), generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(min(1, tokens), tokens + 1, (rows,), generator=generator)
    behaviour_BT, mask_BT = logprobs(), torch.arange(tokens) < lengths_B[:, None]
    return LossInputs(
        logprobs_BT=logprobs(),
        ingestion_BT=logprobs(),
        behaviour_BT=behaviour_BT,
        behaviour_sum_B=torch.where(mask_BT, behaviour_BT, 0.0).sum(-1),
        mask_BT=mask_BT,
        advantages_B=torch.randn(rows, generator=generator, dtype=torch.float64),
        uses_B=torch.randint(0, 3, (rows,), generator=generator).double(),
        own_mean_logprobs_N=-spread * torch.rand(6, generator=generator, dtype=torch.float64),
        own_tokens_N=torch.randint(1, TOKENS, (6,), generator=generator).double(),
        rewards_B=torch.rand(rows, generator=generator, dtype=torch.float64),
        lags_BT=torch.randint(0, 9, (rows, tokens), generator=generator).double(),
        source_B=torch.randint(0, 2, (rows,), generator=generator),
        snapshot_BT=logprobs(),
        ewma_BT=logprobs(),
    )


def evaluate(objective: Objective, inputs: LossInputs, all_rows: LossInputs | None = None) -> TokenLoss:
    """The result of some rows, planned with all of them."""
    plan = None if all_rows is None else objective.plan(all_rows)
    return objective(inputs, plan)


def slope(objective: Objective, inputs: LossInputs, all_rows: LossInputs | None = None) -> Tensor:
    """d(sum of losses) / d(log-probabilities)."""
    current_BT = inputs.logprobs_BT.clone().requires_grad_()
    result = evaluate(objective, dataclasses.replace(inputs, logprobs_BT=current_BT), all_rows)
    (gradient_BT,) = torch.autograd.grad(result.loss_BT.sum(), current_BT)
    return gradient_BT


def on_policy(inputs: LossInputs) -> LossInputs:
    """pi = pi_old = mu of the current version, and text as usual and as long as one's own."""
    same_BT = inputs.logprobs_BT
    return dataclasses.replace(
        inputs,
        ingestion_BT=same_BT,
        behaviour_BT=same_BT,
        snapshot_BT=same_BT,
        ewma_BT=same_BT,
        behaviour_sum_B=torch.where(inputs.mask_BT, same_BT, 0.0).sum(-1),
        lags_BT=torch.zeros_like(same_BT),
        own_mean_logprobs_N=torch.full((3,), 10.0 * float(same_BT.min()), dtype=torch.float64),
    )


@every_objective
@settings(max_examples=12)
@seeds
def test_finite_in_finite_out(name: str, seed: int, spread: float) -> None:
    inputs = random_inputs(seed, spread)
    for given_inputs in (inputs, single_precision(inputs)):
        result = evaluate(OBJECTIVES[name], given_inputs)
        for tensor in (result.loss_BT, result.weights_BT, result.log_ratio_BT):
            assert tensor.isfinite().all()
        assert slope(OBJECTIVES[name], given_inputs).isfinite().all()
        assert result.log_ratio_BT.abs().max() <= MAX_LOG_RATIO


def single_precision(inputs: LossInputs) -> LossInputs:
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return LossInputs(
        **{name: value.float() if value.dtype is torch.float64 else value for name, value in values.items()}
    )


@every_objective
@FEW
@seeds
def test_masked_places_do_not_matter(name: str, seed: int, spread: float) -> None:
    objective, inputs = OBJECTIVES[name], random_inputs(seed, spread)
    result, gradient_BT = evaluate(objective, inputs), slope(objective, inputs)
    hidden_BT = ~inputs.mask_BT
    assert (gradient_BT[hidden_BT] == 0).all()
    assert (result.loss_BT[hidden_BT] == 0).all()
    assert not result.kept_BT[hidden_BT].any()
    assert not result.dropped_BT[hidden_BT].any()
    for junk in (math.nan, math.inf, 1e30):
        spoiled = dataclasses.replace(
            inputs,
            **{
                field: getattr(inputs, field).masked_fill(hidden_BT, junk)
                for field in (
                    "logprobs_BT",
                    "ingestion_BT",
                    "behaviour_BT",
                    "snapshot_BT",
                    "ewma_BT",
                    "lags_BT",
                )
            },
        )
        other = evaluate(objective, spoiled)
        assert torch.equal(other.loss_BT, result.loss_BT)
        assert torch.equal(slope(objective, spoiled), gradient_BT)
        assert torch.equal(other.weights_BT, result.weights_BT)


@every_objective
@FEW
@seeds
def test_order_of_rows_does_not_matter(name: str, seed: int, spread: float) -> None:
    objective, inputs = OBJECTIVES[name], random_inputs(seed, spread)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    result, other = evaluate(objective, inputs), evaluate(objective, inputs.rows(order))
    assert torch.allclose(other.loss_BT, result.loss_BT[order], rtol=1e-9)
    assert torch.allclose(slope(objective, inputs.rows(order)), slope(objective, inputs)[order], rtol=1e-9)


@every_objective
@FEW
@seeds
def test_parts_with_a_plan_are_the_whole(name: str, seed: int, spread: float) -> None:
    """What micro-batches rest on."""
    objective, inputs = OBJECTIVES[name], random_inputs(seed, spread)
    whole_BT = slope(objective, inputs)
    parts = [torch.tensor([0, 2]), torch.tensor([1]), torch.tensor([3])]
    for rows in parts:
        part_BT = slope(objective, inputs.rows(rows), inputs if objective.whole_batch else None)
        assert torch.allclose(part_BT, whole_BT[rows], rtol=1e-12, atol=0.0)


@every_objective
@FEW
@seeds
def test_at_ratio_one_all_are_the_policy_gradient(name: str, seed: int, spread: float) -> None:
    """pi = pi_old = mu at lag 0, and text as usual as one's own: the gradient of each token is -A. Where a
    preset makes advantages of its own, A is that one."""
    objective, inputs = OBJECTIVES[name], on_policy(random_inputs(seed, spread))
    advantages_B = inputs.advantages_B
    if name in OWN_ADVANTAGES:
        inputs = dataclasses.replace(inputs, source_B=torch.arange(ROWS))
        advantages_B = inputs.rewards_B - 0.5  # sources of one rollout each
    expected_BT = torch.where(inputs.mask_BT, -advantages_B[:, None], 0.0)
    assert torch.allclose(slope(objective, inputs), expected_BT, atol=1e-12)
    assert torch.equal(evaluate(objective, inputs).kept_BT, inputs.mask_BT)


@every_objective
@FEW
@seeds
def test_zero_advantage_teaches_nothing(name: str, seed: int, spread: float) -> None:
    inputs = random_inputs(seed, spread)
    nothing = dataclasses.replace(
        inputs,
        advantages_B=torch.zeros(ROWS, dtype=torch.float64),
        rewards_B=torch.full((ROWS,), 0.5, dtype=torch.float64),
    )
    if name == "dro":  # its penalty asks for no advantage
        nothing = dataclasses.replace(nothing, behaviour_BT=nothing.logprobs_BT)
    assert (slope(OBJECTIVES[name], nothing) == 0).all()


# --- what must not happen, and has a defined result ---------------------------------------------------------


@every_objective
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_advantage_is_left_out(name: str, bad: float) -> None:
    objective, inputs = OBJECTIVES[name], random_inputs(3, 1.0)
    spoiled_B = inputs.advantages_B.clone()
    spoiled_B[1] = bad
    spoiled = dataclasses.replace(inputs, advantages_B=spoiled_B)
    result, gradient_BT = evaluate(objective, spoiled), slope(objective, spoiled)
    assert (result.loss_BT[1] == 0).all()
    assert (gradient_BT[1] == 0).all()
    assert not result.kept_BT[1].any()
    others = torch.tensor([0, 2, 3])
    assert torch.allclose(gradient_BT[others], slope(objective, inputs.rows(others)), rtol=1e-9)


@every_objective
def test_nothing_in_nothing_out(name: str) -> None:
    """An all-masked batch, no tokens, no rows, one row of one token."""
    objective, inputs = OBJECTIVES[name], random_inputs(3, 1.0)
    masked = dataclasses.replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    empty = inputs.rows(torch.zeros(0, dtype=torch.long))
    for nothing in (masked, empty, random_inputs(3, 1.0, tokens=0)):
        result = evaluate(objective, nothing)
        assert result.loss_BT.shape == nothing.logprobs_BT.shape
        assert (result.loss_BT == 0).all()
        assert (slope(objective, nothing) == 0).all()
        assert not result.kept_BT.any()
    single = random_inputs(3, 1.0, rows=1, tokens=1)
    assert evaluate(objective, single).loss_BT.isfinite().all()
    assert slope(objective, single).isfinite().all()
