"""Group advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.weight.advantage.capability import CapabilityTracker, capability_aware
from node.weight.advantage.means import dr_grpo, grpo, max_rl, rloo
from node.weight.advantage.numbers import has_signal

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def test_grpo() -> None:
    # mean 0.25, unbiased variance (3 x 0.0625 + 0.5625) / 3 = 0.25
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_of_one_has_mean_zero_and_std_one() -> None:
    assert grpo([0.7]) == pytest.approx([0.7], abs=1e-5)


def test_rloo() -> None:
    # others' means: 1, 4/3, 5/3 ... for 3: (0 + 1) / 2
    assert rloo([3.0, 0.0, 1.0]) == pytest.approx([2.5, -2.0, -0.5])
    assert rloo([3.0]) == (0.0,)


def test_dr_grpo_only_centres() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_max_rl_weighs_a_prompt_by_one_over_its_success_rate() -> None:
    assert max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])  # mean 1/4
    assert max_rl([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])  # mean 3/4
    assert max_rl([0.5, 1.0]) == pytest.approx([-1 / 3, 1 / 3])


def test_max_rl_without_success_has_no_signal() -> None:
    assert max_rl([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0)
    assert max_rl([-1.0, 1.0]) == (0.0, 0.0)  # mean 0
    assert max_rl([-1.0, -0.5]) == (0.0, 0.0)
    assert max_rl([1.0, 1.0]) == (0.0, 0.0)
    assert max_rl([1.0]) == (0.0,)


def test_max_rl_of_rewards_of_both_signs_is_bounded() -> None:
    # mean 0.0005: (1 - 0.0005) / 0.0005 would be 2001
    assert max_rl([-1.0, 1.001]) == (-1.0, 1.0)
    assert max_rl([-1.0, 0.0, 1.003]) == (-2.0, -1.0, 2.0)


def test_has_signal() -> None:
    assert has_signal([0.0, 1.0])
    assert not has_signal([0.3, 0.3, 0.3])
    assert not has_signal([])
    for bad in (math.nan, math.inf, -math.inf):
        assert not has_signal([0.0, bad, 1.0])
        assert not has_signal([bad, 0.0, 1.0])


def test_capability_aware() -> None:
    """Two agents, two rollouts each; P = 0.6 and 0.3, so omega(a, b) = 2 and omega(b, a) = 1/2."""
    rewards = {"a": [1.0, 0.0], "b": [1.0, 1.0]}
    # pooled mean 0.75, unbiased variance (3 x 0.0625 + 0.5625) / 3 = 0.25, std 0.5
    # mu_a = ((1 + 0) + 2 (1 + 1)) / 4 = 1.25;  mu_b = (0.5 (1 + 0) + (1 + 1)) / 4 = 0.625
    # A_a = (-0.25, -1.25) / 0.5;  A_b = (0.375, 0.375) / 0.5 = 0.75
    learner_a = capability_aware(rewards, {"a": 0.6, "b": 0.3}, "a")
    assert learner_a["a"] == pytest.approx([-0.5, -2.5], abs=1e-4)
    assert learner_a["b"] == pytest.approx([0.375, 0.375], abs=1e-4)  # times omega(b, a) = 1/2
    learner_b = capability_aware(rewards, {"a": 0.6, "b": 0.3}, "b")
    assert learner_b["a"] == pytest.approx([-1.0, -5.0], abs=1e-4)  # times omega(a, b) = 2
    assert learner_b["b"] == pytest.approx([0.75, 0.75], abs=1e-4)


def test_capability_ratio_is_clamped() -> None:
    rewards = {"a": [1.0, 0.0], "b": [1.0, 0.0]}
    # omega(a, b) = 1/3 instead of 1/9: mu_a = (1 + 1/3) / 4 = 1/3, std of (1, 0, 1, 0) = sqrt(1/3)
    advantages = capability_aware(rewards, {"a": 0.1, "b": 0.9}, "a")
    assert advantages["a"][0] == pytest.approx((1 - 1 / 3) / math.sqrt(1 / 3), abs=1e-4)
    # omega(b, a) = 3: mu_b = (3 + 1) / 4 = 1, and the learner's factor is 3 again
    assert advantages["b"] == pytest.approx([0.0, -3 / math.sqrt(1 / 3)], abs=1e-4)


def test_alike_rewards_of_unlike_agents_teach_nothing() -> None:
    """mu_k differs from the common reward, and the std is zero: dividing would give 10^5."""
    made = capability_aware({"a": [1.0, 1.0], "b": [1.0, 1.0]}, {"a": 0.3, "b": 0.6}, "a")
    assert made == {"a": (0.0, 0.0), "b": (0.0, 0.0)}
    nearly = capability_aware({"a": [1.0, 1.0], "b": [1.0, 1.00001]}, {"a": 0.3, "b": 0.6}, "a")
    assert max(abs(value) for group in nearly.values() for value in group) <= 10.0


def test_two_agents_that_never_succeed_are_alike() -> None:
    advantages = capability_aware({"a": [0.0, 1.0], "b": [0.0, 0.0]}, {"a": 0.0, "b": 0.0}, "a")
    # omega = 1, mu = 0.25, std = 0.5
    assert advantages["a"] == pytest.approx([-0.5, 1.5], abs=1e-4)


@settings(max_examples=40)
@given(REWARDS)
def test_equal_capability_is_grpo_over_the_pool(rewards: list[float]) -> None:
    split = len(rewards) // 2
    groups = {"a": rewards[:split], "b": rewards[split:]}
    made = capability_aware(groups, {"a": 0.5, "b": 0.5}, "a")
    # rewards that are alike up to rounding have no signal, and the capability-aware rule then says so
    expected = grpo(rewards) if has_signal(rewards) else (0.0,) * len(rewards)
    assert [*made["a"], *made["b"]] == pytest.approx(expected, abs=1e-6, rel=1e-6)


@settings(max_examples=40)
@given(REWARDS, st.randoms(use_true_random=False))
def test_order_does_not_matter(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for advantage in (grpo, rloo, dr_grpo):
        straight = advantage(rewards)
        assert all(math.isfinite(value) for value in straight)
        shuffled = advantage([rewards[place] for place in order])
        assert list(shuffled) == pytest.approx([straight[place] for place in order], abs=1e-3, rel=1e-3)


def test_tracker_averages_the_last_five() -> None:
    tracker = CapabilityTracker(5)
    for reward in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        tracker.observe("a", mixed(reward))
    assert tracker.value("a") == pytest.approx(0.6)
    assert tracker.value("stranger") == pytest.approx(0.6)
    tracker.observe("b", mixed(0.2))
    assert tracker.value("stranger") == pytest.approx(0.4)
    assert CapabilityTracker(5).value("stranger") == 0.0


def mixed(mean: float) -> tuple[float, float]:
    """Rewards that differ, with this mean."""
    return mean - 0.1, mean + 0.1


def test_tracker_looks_at_mixed_groups_only() -> None:
    """All that arrives of peers is mixed; own groups must be measured alike."""
    tracker = CapabilityTracker(3)
    for rewards in ((0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)):
        tracker.observe("own", rewards)
    assert tracker.value("own") == 0.5


def test_tracker_ignores_rewards_that_are_no_numbers() -> None:
    tracker = CapabilityTracker(3)
    tracker.observe("own", (0.0, 1.0))
    tracker.observe("own", (0.0, math.nan, 1.0))
    assert tracker.value("own") == 0.5


def test_capability_aware_of_nobody_and_of_a_bad_number() -> None:
    assert capability_aware({}, {}, "a") == {}
    assert capability_aware({"a": [], "b": [0.5]}, {"a": 0.5, "b": 0.5}, "a") == {"a": (), "b": (0.0,)}
    with pytest.raises(ValueError, match="reward 1 is nan"):
        capability_aware({"a": [0.0, math.nan]}, {"a": 0.5}, "a")
    with pytest.raises(ValueError, match="capability 0 is inf"):
        capability_aware({"a": [0.0, 1.0]}, {"a": math.inf}, "a")


def test_tracker_is_bounded() -> None:
    tracker = CapabilityTracker(5, max_agents=2)
    for agent in ("a", "b", "a", "c"):
        tracker.observe(agent, mixed(0.9 if agent == "b" else 0.1))
    assert tracker.value("b") == pytest.approx(0.1)  # forgotten: the mean over a and c
