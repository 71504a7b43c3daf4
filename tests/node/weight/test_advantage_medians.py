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
    # median 0.5; unbiased variance around the mean 0.5: (0.25 + 0.25) / 2; MAD of (0.5, 0.5, 0) is 0.5
    assert mc_grpo([0.0, 1.0, 0.5]) == pytest.approx([-1.0, 1.0, 0.0], abs=1e-5)
    assert mc_grpo([0.0, 1.0, 0.5], "mad") == pytest.approx(
        [-0.998004, 0.998004, 0.0], abs=1e-6
    )  # 0.5 / 0.501
    assert mc_grpo([0.0, 1.0, 0.5], "none") == (-0.5, 0.5, 0.0)


def test_mc_grpo_keeps_signs_where_an_outlier_moves_the_mean() -> None:
    # The mean is 3.67, so GRPO would push 1 down as well as 0 and 2.
    assert mc_grpo([0.0, 1.0, 2.0, 1.0, 20.0, 1.0, 2.0], "none") == (-1.0, 0.0, 1.0, 0.0, 19.0, 0.0, 1.0)


def test_mc_grpo_of_binary_rewards_trains_on_the_minority() -> None:
    # variance (4 x 0.04 + 0.64) / 4 = 0.2, so 1 / sqrt(0.2) = 2.2360680
    assert mc_grpo([0.0, 0.0, 1.0, 0.0, 0.0]) == pytest.approx([0, 0, 2.236068, 0, 0], abs=1e-4)
    assert mc_grpo([1.0, 1.0, 0.0, 1.0, 1.0]) == pytest.approx([0, 0, -2.236068, 0, 0], abs=1e-4)
    # lower middle reward 0, variance 4 x 0.25 / 3, 1 / 0.5773503
    assert mc_grpo([0.0, 1.0, 1.0, 0.0]) == pytest.approx([0, 1.732051, 1.732051, 0], abs=1e-4)


def test_mc_grpo_by_mad_of_tied_rewards_falls_back_to_std() -> None:
    """An odd group of binary rewards always has a MAD of 0; dividing by the epsilon would give 1000."""
    for binary in ([0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0, 1.0]):
        assert mc_grpo(binary, "mad") == mc_grpo(binary, "std")


def test_mc_grpo_by_mad_is_bounded() -> None:
    # median 0.02, distances 0.02 0.01 0 0.01 4.98, MAD 0.01: 0.02 / 0.011, 0.01 / 0.011; 4.98 / 0.011 = 453
    expected = [-1.818182, -0.909091, 0.0, 0.909091, 10.0]
    assert mc_grpo(OUTLIER, "mad") == pytest.approx(expected, abs=1e-6)


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
    # around 0.4: (0.16 + 0.01 + 0 + 0.01 + 0.25 + 0.36) / 5 = 0.158, sqrt 0.3974921
    around = [-1.006309, -0.251577, 0.0, 0.251577, 1.257887, 1.509464]
    assert gapo(SKEWED, scale="deviation") == pytest.approx(around, abs=1e-5)


def test_gapo_of_the_whole_group_is_around_its_median() -> None:
    # median 0.45, std 0.3763863
    assert gapo(SKEWED, mass=1.0)[0] == pytest.approx(-0.45 / 0.3763863, abs=1e-5)
    # a third: two of six, widths 0.3 0.1 0.1 0.4 0.1: of the three narrowest the lowest, 0.3 and 0.4
    assert gapo(SKEWED, mass=1 / 3)[0] == pytest.approx(-0.35 / 0.3763863, abs=1e-5)


def test_gapo_counts_what_is_inside_in_spite_of_rounding() -> None:
    """0.28 x 25 is 7.000000000000001 in floating point, and still seven rewards."""
    assert 0.28 * 25 > 7
    rewards = [float(place) for place in range(25)]
    assert gapo(rewards, mass=0.28)[3] == 0.0  # 0 to 6; of eight the median would be 3.5


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


@pytest.mark.parametrize("mass", [0.0, -0.5, 1.01, math.nan])
def test_gapo_refuses_a_mass_that_is_no_share(mass: float) -> None:
    with pytest.raises(ValueError, match="mass is"):
        gapo([0.0, 1.0], mass=mass)
