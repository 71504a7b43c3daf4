"""Temperature, nucleus and inverse transform against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.rollout.engine.sampling import nucleus, sample_tokens
from tests.node.rollout.rounding import rounding

LOGITS_RV = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7999, 1), (0.8001, 2), (1 - 2**-53, 2)]
)
def test_inverse_transform(uniform: float, token: int) -> None:
    tokens_R, logprobs_R = sample_tokens(
        LOGITS_RV, torch.tensor([uniform], dtype=torch.float64), torch.ones(1), None
    )
    assert tokens_R.tolist() == [token]
    assert logprobs_R.item() == pytest.approx(math.log([0.5, 0.3, 0.2][token]), abs=rounding(16))


def test_temperature_counts_in_the_logprob() -> None:
    # T = 0.5 squares the probabilities: 0.25, 0.09, 0.04 of 0.38
    _, logprobs_R = sample_tokens(
        LOGITS_RV, torch.tensor([0.0], dtype=torch.float64), torch.tensor([0.5]), None
    )
    assert logprobs_R.item() == pytest.approx(math.log(0.25 / 0.38), abs=rounding(16))


def test_nucleus_renormalises() -> None:
    # mass before: 0, 0.5, 0.8; top-p 0.7 keeps the first two
    kept = nucleus(LOGITS_RV, torch.tensor([0.7]))
    assert kept.exp().tolist()[0] == pytest.approx([0.625, 0.375, 0.0], abs=rounding(16))


def test_nucleus_keeps_the_likeliest_token() -> None:
    kept = nucleus(LOGITS_RV[:, [2, 0, 1]], torch.tensor([1e-6]))
    assert kept.exp().tolist()[0] == pytest.approx([0.0, 1.0, 0.0])


def test_rows_have_their_own_top_p() -> None:
    kept = nucleus(LOGITS_RV.expand(2, 3), torch.tensor([0.7, 1.0]))
    assert kept.exp()[1].tolist() == pytest.approx([0.5, 0.3, 0.2], abs=rounding(16))


def test_greedy_takes_the_likeliest() -> None:
    tokens_R, _ = sample_tokens(
        LOGITS_RV, torch.tensor([0.99], dtype=torch.float64), torch.ones(1), None, greedy=True
    )
    assert tokens_R.tolist() == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_give_nan(bad: float) -> None:
    _, logprobs_R = sample_tokens(
        torch.tensor([[0.0, bad, 1.0]]), torch.tensor([0.1], dtype=torch.float64), torch.ones(1), None
    )
    assert logprobs_R.isnan().all()


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.1, 3.0), st.floats(0.05, 1.0))
def test_sampled_token_is_possible(seed: int, temperature: float, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 5 * torch.randn((4, 7), generator=generator)
    uniforms_R = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens_R, logprobs_R = sample_tokens(
        logits_RV, uniforms_R, torch.full((4,), temperature), torch.full((4,), top_p)
    )
    assert ((tokens_R >= 0) & (tokens_R < 7)).all()
    assert logprobs_R.isfinite().all()
    assert (logprobs_R <= rounding(16)).all()
