"""Advantages around a median against numbers worked out by hand; ties, which binary rewards always have."""

from __future__ import annotations

import math

import pytest

from node.weight.advantage.medians import gapo, mad, mc_grpo, pivot

SKEWED = [0.0, 0.3, 0.4, 0.5, 0.9, 1.0]
OUTLIER = [0.0, 0.01, 0.02, 0.03, 5.0]


def test_the_pivot_is_the_first_rollout_with_the_median_reward() -> None:
    assert pivot([3.0, 1.0, 2.0]) == 2
    assert pivot([1.0, 0.0, 0.0]) == 1
    assert pivot([0.0, 1.0, 1.0]) == 1
    assert pivot([0.5]) == 0
    assert pivot([1.0, 0.0, 1.0, 0.0]) == 1  # even: the lower middle reward, 0
    with pytest.raises(ValueError, match="no rewards"):
        pivot([])


def test_mc_grpo() -> None:
    # median 0.5; unbiased variance around the mean 0.5: (0.25 + 0.25) / 2
    assert mc_grpo([0.0, 1.0, 0.5]) == pytest.approx([-1.0, 1.0, 0.0], abs=1e-5)


def test_mc_grpo_keeps_signs_where_an_outlier_moves_the_mean() -> None:
    # The mean is 3.67, so GRPO would push 1 down as well as 0 and 2.
    signs = [math.copysign(bool(each), each) for each in mc_grpo([0.0, 1.0, 2.0, 1.0, 20.0, 1.0, 2.0])]
    assert signs == [-1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_mc_grpo_of_binary_rewards_trains_on_the_minority() -> None:
    # variance (4 x 0.04 + 0.64) / 4 = 0.2, so 1 / sqrt(0.2) = 2.2360680
    assert mc_grpo([0.0, 0.0, 1.0, 0.0, 0.0]) == pytest.approx([0, 0, 2.236068, 0, 0], abs=1e-4)
    assert mc_grpo([1.0, 1.0, 0.0, 1.0, 1.0]) == pytest.approx([0, 0, -2.236068, 0, 0], abs=1e-4)
    # lower middle reward 0, variance 4 x 0.25 / 3, 1 / 0.5773503
    assert mc_grpo([0.0, 1.0, 1.0, 0.0]) == pytest.approx([0, 1.732051, 1.732051, 0], abs=1e-4)


def test_mad() -> None:
    # median 2, distances 2 1 0 1 8, MAD 1: divided by 1.482601
    expected = [-1.348981, -0.674490, 0.0, 0.674490, 5.395923]
    assert mad([0.0, 1.0, 2.0, 3.0, 10.0]) == pytest.approx(expected, abs=2e-6)
    # 1.4826 x 0.01 + 1e-6 = 0.014827; 4.98 / 0.014827 = 336
    assert mad(OUTLIER) == pytest.approx([-1.348891, -0.674445, 0.0, 0.674445, 10.0], abs=2e-6)


def test_mad_of_binary_rewards() -> None:
    # exactly half: median 0.5, MAD 0.5, 0.5 / 0.741301
    assert mad([1.0, 1.0, 0.0, 0.0]) == pytest.approx([0.674490, 0.674490, -0.674490, -0.674490], abs=1e-6)
    # more than half tie: MAD 0, std 0.5
    assert mad([1.0, 0.0, 0.0, 0.0]) == pytest.approx([2.0, 0.0, 0.0, 0.0], abs=1e-5)
    assert mad([0.0, 1.0, 1.0, 1.0]) == pytest.approx([-2.0, 0.0, 0.0, 0.0], abs=1e-5)


def test_mad_of_rewards_that_nearly_tie_falls_back_to_std() -> None:
    """A MAD of 1e-7, plus 1e-6, would give 9 x 10^5."""
    rewards = [0.5, 0.5 + 1e-7, 0.5 - 1e-7, 1.5]
    # mean 0.75, variance (3 x 0.0625 + 0.5625) / 3 = 0.25
    assert mad(rewards) == pytest.approx([0.0, 0.0, 0.0, 2.0], abs=1e-4)


def test_gapo() -> None:
    """Three of six are inside; widths 0.4, 0.2, 0.5, 0.5: the interval is 0.3 to 0.5, its median 0.4."""
    # std: mean 31/60, sum of squares 0.7083333 / 5 = 0.1416667, sqrt 0.3763863
    by_std = [-1.062738, -0.265684, 0.0, 0.265684, 1.328422, 1.594107]
    assert gapo(SKEWED) == pytest.approx(by_std, abs=1e-5)


def test_gapo_of_binary_rewards() -> None:
    # 1 of 4 and 3 of 4: the majority is the baseline, std 0.5
    assert gapo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([2.0, 0.0, 0.0, 0.0], abs=1e-5)
    assert gapo([0.0, 1.0, 1.0, 1.0]) == pytest.approx([-2.0, 0.0, 0.0, 0.0], abs=1e-5)
    # exactly half: two intervals of width 0, the lower one counts; std 0.5773503
    assert gapo([0.0, 1.0, 0.0, 1.0]) == pytest.approx([0.0, 1.732051, 0.0, 1.732051], abs=1e-5)
    assert gapo([1.0, 0.0]) == pytest.approx([math.sqrt(2), 0.0], abs=1e-5)


def test_gapo_takes_the_lower_of_intervals_that_only_rounding_tells_apart() -> None:
    """0.3 - 0.2 is less than 0.2 - 0.1 in floating point."""
    assert 0.3 - 0.2 < 0.2 - 0.1
    assert gapo([0.1, 0.2, 0.3]) == pytest.approx([-0.5, 0.5, 1.5], abs=1e-4)  # Q 0.15, std 0.1
