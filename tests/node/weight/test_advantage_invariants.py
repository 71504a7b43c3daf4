"""What holds for every estimator: order, shifts, scales, sums, ties, bad numbers; and the registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.weight.advantage.means import dr_grpo, grpo, max_rl, rloo
from node.weight.advantage.medians import gapo, mad, mc_grpo, pivot
from node.weight.advantage.numbers import has_signal
from node.weight.advantage.registry import ADVANTAGES, ALL_ADVANTAGES

Estimate = Callable[[Sequence[float]], tuple[float, ...]]

VARIANTS: dict[str, Estimate] = {name: each.estimate for name, each in ADVANTAGES.items()}
every_variant = pytest.mark.parametrize("estimate", VARIANTS.values(), ids=VARIANTS)

# Eighths are exact, so shifts and doublings change no tie.
EIGHTHS = st.integers(-40, 40).map(lambda count: count / 8)
REWARDS = st.lists(EIGHTHS, min_size=1, max_size=9)
POSITIVE = st.lists(EIGHTHS.map(abs), min_size=2, max_size=9)
BINARY = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9)
ANY = st.lists(st.floats(-1e100, 1e100), max_size=6)
FEW = settings(max_examples=25, deadline=None)


@every_variant
@FEW
@given(rewards=REWARDS | BINARY, seed=st.integers(0, 1000))
def test_the_order_of_rollouts_does_not_matter(estimate: Estimate, rewards: list[float], seed: int) -> None:
    order = list(range(len(rewards)))
    Random(seed).shuffle(order)
    straight = estimate(rewards)
    shuffled = estimate([rewards[place] for place in order])
    assert shuffled == pytest.approx([straight[place] for place in order], abs=1e-9)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "max_rl"])
@FEW
@given(rewards=st.lists(EIGHTHS, min_size=2, max_size=9) | BINARY, shift=EIGHTHS)
def test_a_shift_of_all_rewards_changes_nothing_but_max_rl(
    name: str, rewards: list[float], shift: float
) -> None:
    estimate = VARIANTS[name]
    assert estimate([reward + shift for reward in rewards]) == pytest.approx(estimate(rewards), abs=1e-8)


def test_max_rl_is_no_shift_invariant() -> None:
    assert max_rl([1.0, 0.0]) == (1.0, -1.0)
    assert max_rl([2.0, 1.0]) == pytest.approx([1 / 3, -1 / 3])


@FEW
@given(rewards=REWARDS, power=st.integers(-3, 3))
def test_what_divides_by_a_spread_or_the_mean_has_no_unit(rewards: list[float], power: int) -> None:
    larger = [reward * 2.0**power for reward in rewards]
    for estimate in (mc_grpo, gapo, mad, max_rl):
        assert estimate(larger) == pytest.approx(estimate(rewards), rel=2e-3, abs=1e-9)
    if len(rewards) > 1:
        assert grpo(larger) == pytest.approx(grpo(rewards), rel=2e-3, abs=1e-9)


@FEW
@given(rewards=REWARDS, power=st.integers(-3, 3))
def test_what_divides_by_nothing_grows_with_the_rewards(rewards: list[float], power: int) -> None:
    factor = 2.0**power
    for estimate in (dr_grpo, rloo):
        grown = [factor * value for value in estimate(rewards)]
        assert estimate([reward * factor for reward in rewards]) == pytest.approx(grown)


@FEW
@given(rewards=POSITIVE | BINARY)
def test_advantages_around_the_mean_sum_to_zero(rewards: list[float]) -> None:
    for estimate in (grpo, dr_grpo, rloo, max_rl):
        assert math.fsum(estimate(rewards)) == pytest.approx(0.0, abs=1e-8)


@every_variant
@FEW
@given(rewards=ANY)
def test_every_finite_reward_has_a_finite_advantage(estimate: Estimate, rewards: list[float]) -> None:
    made = estimate(rewards)
    assert len(made) == len(rewards)
    assert all(map(math.isfinite, made))


@every_variant
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.3])
def test_rewards_that_are_all_alike_teach_nothing(estimate: Estimate, reward: float) -> None:
    for count in range(2, 8):
        assert estimate([reward] * count) == pytest.approx([0.0] * count, abs=1e-9)


@every_variant
def test_no_rewards_and_a_group_of_one(estimate: Estimate) -> None:
    assert estimate([]) == ()
    # GRPO in verl has mean 0 and std 1 for a group of one; nothing else has a baseline for it.
    expected = 0.7 if estimate is grpo else 0.0
    assert estimate([0.7]) == pytest.approx([expected], abs=1e-5)


@every_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e101])
def test_a_reward_that_is_no_finite_number_is_refused(estimate: Estimate, bad: float) -> None:
    for rewards in ([0.0, bad, 1.0], [0.5, bad], [bad, bad]):
        assert not has_signal(rewards)  # who asks first gets an answer
        with pytest.raises(ValueError, match=r"reward \d is "):
            estimate(rewards)


@every_variant
@FEW
@given(rewards=BINARY)
def test_of_binary_rewards_success_is_never_pushed_down(estimate: Estimate, rewards: list[float]) -> None:
    made = estimate(rewards)
    for reward, advantage in zip(rewards, made, strict=True):
        assert advantage * (1 if reward == 1.0 else -1) >= 0.0
    if has_signal(rewards):
        # equal rewards, equal advantages, and those of success and failure differ enough to teach something
        success = {round(value, 9) for reward, value in zip(rewards, made, strict=True) if reward == 1.0}
        failure = {round(value, 9) for reward, value in zip(rewards, made, strict=True) if reward == 0.0}
        assert len(success) == len(failure) == 1
        assert 0.999 < success.pop() - failure.pop() < len(rewards) + 0.001


@FEW
@given(rewards=REWARDS | BINARY)
def test_the_pivot_halves_an_odd_group_and_has_no_advantage(rewards: list[float]) -> None:
    center = rewards[pivot(rewards)]
    assert mc_grpo(rewards)[pivot(rewards)] == 0.0
    if len(rewards) % 2:
        assert sum(reward < center for reward in rewards) <= len(rewards) // 2
        assert sum(reward > center for reward in rewards) <= len(rewards) // 2


def test_the_config_may_name_what_needs_rewards_only() -> None:
    assert list(ADVANTAGES) == ["dr_grpo", "gapo", "grpo", "mad", "max_rl", "mc_grpo", "rloo"]
    assert [name for name, each in ADVANTAGES.items() if each.drops_pivot] == ["mc_grpo"]
    assert ADVANTAGES["rloo"]([1.0, 0.0]) == (1.0, -1.0)


def test_every_estimator_says_where_it_is_from_and_how_sure_we_are() -> None:
    assert len({each.name for each in ALL_ADVANTAGES}) == len(ALL_ADVANTAGES) == 8
    for each in ALL_ADVANTAGES:
        assert each.summary
        assert "arXiv" in each.source
        assert each.needs or each.name in ADVANTAGES
    evidence = {each.name: each.evidence for each in ALL_ADVANTAGES}
    assert {name for name, label in evidence.items() if label == "CORE"} == {"gapo", "mad", "mc_grpo"}
