"""The learning rate by effective sample size: shares and factors worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from node.train.ess_scaling import ess_share, rate_factor, sequence_log_weights


def logs(*weights: float) -> torch.Tensor:
    return torch.tensor(weights).log()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 1.0, 1.0, 1.0), 1.0),
        ((4.0, 1.0, 1.0, 2.0), 64 / (4 * 22)),  # sum 8, sum of squares 16 + 1 + 1 + 4
        ((3.0, 1.0), 16 / (2 * 10)),
        ((5.0,), 1.0),
        ((1.0, 1e-12, 1e-12, 1e-12), 0.25),
    ],
)
def test_share_is_that_of_the_formula(weights: tuple[float, ...], expected: float) -> None:
    assert ess_share(logs(*weights)) == pytest.approx(expected, rel=1e-6)


def test_share_does_not_depend_on_a_common_factor_however_large() -> None:
    shift = torch.tensor([math.log(4), 0.0, 0.0, math.log(2)], dtype=torch.float64)
    for common in (-5000.0, -50.0, 0.0, 50.0, 5000.0):
        assert ess_share(shift + common) == pytest.approx(64 / 88, rel=1e-9)


def test_weights_that_are_no_numbers_are_left_out_and_none_leave_the_rate_alone() -> None:
    assert ess_share(torch.tensor([math.log(3), math.nan, 0.0, math.inf])) == pytest.approx(16 / 20)
    assert ess_share(torch.tensor([])) == 1.0
    assert ess_share(torch.tensor([math.nan])) == 1.0


def test_log_weights_are_sums_over_unmasked_tokens() -> None:
    """Row 0: (-1 + 1.5) + (-2 + 2.25) = 0.75. Row 1 has no token and no weight. Row 2: one ratio of +30,
    which is cut to 20, and one of 0.5."""
    logprobs_BT = torch.tensor(
        [[-1.0, -2.0, math.nan], [9.0, 9.0, 9.0], [-1.0, -1.0, 0.0]], requires_grad=True
    )
    behaviour_BT = torch.tensor([[-1.5, -2.25, 7.0], [math.nan, 0.0, 0.0], [-31.0, -1.5, 0.0]])
    mask_BT = torch.tensor([[True, True, False], [False, False, False], [True, True, False]])
    found = sequence_log_weights(logprobs_BT, behaviour_BT, mask_BT)
    assert found.tolist() == [0.75, 20.5]
    assert not found.requires_grad


def test_a_bad_number_under_the_mask_costs_its_row() -> None:
    logprobs_BT = torch.tensor([[-1.0, math.nan], [-1.0, -1.0]])
    found = sequence_log_weights(logprobs_BT, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert ess_share(found) == 1.0
    assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize(("ess", "expected"), [(0.25, 0.5), (1.0, 1.0)])
def test_the_learning_rate_goes_with_the_root(ess: float, expected: float) -> None:
    assert rate_factor(ess) == expected
