"""Advantages that need more than one group's rewards: several rewards, clusters, ratios, gradient norms."""

from __future__ import annotations

import math

import pytest

from node.weight.advantage.minimum_variance import minimum_variance, minimum_variance_baseline
from node.weight.advantage.several_rewards import gdpo
from node.weight.advantage.uniqueness import uniqueness_aware

# z-scores of (1, 0) are +-0.5 / 0.7071068 = +-0.7071068; those of the format in the first group are 0.
GROUPS = [
    {"correct": [1.0, 0.0], "format": [1.0, 1.0]},
    {"correct": [0.0, 1.0], "format": [0.0, 1.0]},
]
WEIGHTS = {"correct": 1.0, "format": 0.5}
# S is +-0.7071068 in the first group and -+1.0606602 in the second.
LENGTHS = [[1, 3], [2, 2]]


def test_gdpo_whitened_over_samples() -> None:
    # TRL's epsilon: +-0.5 / 0.7072068 = +-0.7070068, S2 = -+1.0605102; variance (2 x 0.4998586 +
    # 2 x 1.1246818) / 3 = 1.0830270, std 1.0406858, divisor 1.0407858
    made = gdpo(GROUPS, whiten="samples", weights=WEIGHTS)
    assert made[0] == pytest.approx([0.679301, -0.679301], abs=1e-6)
    assert made[1] == pytest.approx([-1.018951, 1.018951], abs=1e-6)


def test_small_differences_count_less_over_samples_because_of_its_epsilon() -> None:
    # 0.0005 / (0.0007071 + 0.0001) = 0.6194967 beside 0.7070068; variance 2 x (0.3837762 + 0.4998586) / 3,
    # std 0.7675219, divisor 0.7676219. Over tokens 0.0005 / 0.0007081 = 0.7061082 beside 0.7071058.
    groups = [{"r": [0.001, 0.0]}, {"r": [1.0, 0.0]}]
    made = gdpo(groups, whiten="samples")
    assert (made[0][0], made[1][0]) == pytest.approx((0.807034, 0.921035), abs=2e-6)
    made = gdpo(groups, whiten="tokens", lengths=[[1, 1], [1, 1]])
    # variance 2 x (0.4985888 + 0.4999986) / 3 = 0.6657249, std 0.8159196
    assert (made[0][0], made[1][0]) == pytest.approx((0.865414, 0.866637), abs=2e-6)


def test_gdpo_whitened_over_tokens() -> None:
    # mean (1 x 0.7071068 - 3 x 0.7071068 + 0) / 8 = -0.1767767; variance (4 x 0.5 + 4 x 1.125 - 8 x 0.03125)
    # / 7 = 0.8928571, std 0.9449112
    made = gdpo(GROUPS, whiten="tokens", weights=WEIGHTS, lengths=LENGTHS)
    assert made[0] == pytest.approx([0.935414, -0.561249], abs=1e-5)
    assert made[1] == pytest.approx([-0.935414, 1.309580], abs=1e-5)


def test_whitening_over_tokens_gives_a_group_without_signal_an_advantage() -> None:
    """As in verl: the batch mean is not zero where rollouts differ in length. Over samples it is."""
    groups = [{"correct": [1.0, 0.0]}, {"correct": [1.0, 1.0]}]
    # mean -0.1767767, variance (4 x 0.5 - 0.25) / 7 = 0.25
    made = gdpo(groups, whiten="tokens", lengths=LENGTHS)
    assert made[0] == pytest.approx([1.767767, -1.060660], abs=1e-5)
    assert made[1] == pytest.approx([0.353553, 0.353553], abs=1e-5)
    # S +-0.7070068, variance 2 x 0.4998586 / 3, std 0.5772686, divisor 0.5773686
    made = gdpo(groups, whiten="samples", lengths=LENGTHS)
    assert made[0] == pytest.approx([1.224533, -1.224533], abs=1e-6)
    assert made[1] == (0.0, 0.0)


def test_rollouts_without_tokens_count_nothing_over_tokens() -> None:
    groups = [{"r": [1.0, 0.0]}, {"r": [0.0, 1.0]}]
    # the values that count: +0.7071068 and -0.7071068 once each; variance 0.5 x 2 / 1 = 1
    made = gdpo(groups, whiten="tokens", lengths=[[1, 0], [1, 0]])
    assert made[0] == pytest.approx([0.707107, -0.707107], abs=1e-5)


def test_gdpo_keeps_apart_what_a_sum_of_rewards_confuses() -> None:
    """Correct without format and format without correct have the same sum, so GRPO cannot tell them apart."""
    group = {"correct": [1.0, 0.0, 0.0, 0.0], "format": [0.0, 1.0, 1.0, 0.0]}
    only_correct, only_format, _, _ = gdpo([group], whiten="samples")[0]
    assert only_correct > only_format > 0


def test_gdpo_of_nothing_to_whiten_is_zeros() -> None:
    assert gdpo([], whiten="samples") == ()
    assert gdpo([], whiten="tokens", lengths=[]) == ()
    assert gdpo([{"r": []}], whiten="samples") == ((),)
    assert gdpo([{"r": [0.7]}], whiten="samples") == ((0.0,),)
    assert gdpo([{"r": [0.3, 0.3]}, {"r": [1.0, 1.0]}], whiten="samples") == ((0.0, 0.0), (0.0, 0.0))
    assert gdpo([{"r": [0.0, 1.0]}], whiten="tokens", lengths=[[0, 0]]) == ((0.0, 0.0),)
    assert gdpo([{"r": [0.0, 1.0]}], whiten="tokens", lengths=[[1, 0]]) == ((0.0, 0.0),)


def test_rewards_that_oppose_each_other_leave_nothing_to_blow_up() -> None:
    """z-scores of (0, 1/8) and (0, -1/4) cancel but for TRL's epsilon, which would become 0.84 and -0.84."""
    group = {"a": [0.0, 0.125], "b": [0.0, -0.25]}
    assert gdpo([group], whiten="samples") == ((0.0, 0.0),)
    assert gdpo([group], whiten="tokens", lengths=[[3, 4]]) == ((0.0, 0.0),)


def test_gdpo_of_a_group_of_one_is_not_its_bare_reward() -> None:
    made = gdpo([{"r": [0.7]}, {"r": [0.0, 1.0]}], whiten="samples")
    assert made[0] == (0.0,)


def test_gdpo_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"group 1 has the rewards \['b'\], not \['a'\]"):
        gdpo([{"a": [1.0]}, {"b": [1.0]}], whiten="samples")
    with pytest.raises(ValueError, match=r"group 0 has the rewards \['a'\], not \['a', 'b'\]"):
        gdpo([{"a": [1.0]}], whiten="samples", weights={"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="group 0 has the rewards"):
        gdpo([{}], whiten="samples")
    with pytest.raises(ValueError, match=r"of \[1, 2\] rollouts"):
        gdpo([{"a": [1.0, 0.0], "b": [1.0]}], whiten="samples")
    with pytest.raises(ValueError, match=r"of \[1, 2\] rollouts"):
        gdpo([{"a": [1.0, 0.0]}], whiten="tokens", lengths=[[1]])
    with pytest.raises(ValueError, match="needs their numbers"):
        gdpo([{"a": [1.0, 0.0]}], whiten="tokens")
    with pytest.raises(ValueError, match="1 groups, lengths of 2"):
        gdpo([{"a": [1.0, 0.0]}], whiten="tokens", lengths=[[1, 1], [1, 1]])
    with pytest.raises(ValueError, match="length 1 is -1"):
        gdpo([{"a": [1.0, 0.0]}], whiten="tokens", lengths=[[1, -1]])
    with pytest.raises(ValueError, match="reward 0 is nan"):
        gdpo([{"a": [math.nan, 0.0]}], whiten="samples")
    with pytest.raises(ValueError, match="weight 0 is inf"):
        gdpo([{"a": [1.0, 0.0]}], whiten="samples", weights={"a": math.inf})


def test_uniqueness_aware() -> None:
    """Three right answers, two of them by one strategy: weights 1/2, 1/2, 1, mean 2/3."""
    made = uniqueness_aware([1.0, 1.0, 1.0, -3.0], [True, True, True, False], "aabc")
    assert made == pytest.approx([0.75, 0.75, 1.5, -3.0])


def test_wrong_answers_make_a_cluster_larger_but_keep_their_advantage() -> None:
    # sizes 3, 3, 1: weights 1/3, 1/3, 1, mean 5/9
    made = uniqueness_aware([1.0, 1.0, 1.0, -3.0], [True, True, True, False], "aaba")
    assert made == pytest.approx([0.6, 0.6, 1.8, -3.0])


def test_the_exponent_says_how_much_uniqueness_counts() -> None:
    advantages, correct = [1.0, 1.0, 1.0, -3.0], [True, True, True, False]
    # weights 1/4, 1/4, 1, mean 1/2
    assert uniqueness_aware(advantages, correct, "aabc", exponent=2.0) == pytest.approx([0.5, 0.5, 2.0, -3.0])
    assert uniqueness_aware(advantages, correct, "aabc", exponent=0.0) == pytest.approx(advantages)
    # f^-a alone would be 0 for all of two clusters of two
    assert uniqueness_aware(advantages[:2] * 2, [True] * 4, "aabb", exponent=1e6) == pytest.approx([1.0] * 4)
    # a wrong answer alone in its cluster has no power to be taken to
    assert uniqueness_aware(advantages, correct, "aaab", exponent=1e6) == pytest.approx(advantages)


def test_uniqueness_without_a_right_answer_changes_nothing() -> None:
    assert uniqueness_aware([0.5, -0.5], [False, False], "ab") == (0.5, -0.5)
    assert uniqueness_aware([], [], []) == ()
    assert uniqueness_aware([0.7], [True], ["a"]) == pytest.approx([0.7])


def test_uniqueness_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="2 advantages, 1 verdicts, 2 clusters"):
        uniqueness_aware([1.0, 0.0], [True], "ab")
    with pytest.raises(ValueError, match="advantage 1 is nan"):
        uniqueness_aware([1.0, math.nan], [True, True], "ab")
    with pytest.raises(ValueError, match="exponent 0 is -1"):
        uniqueness_aware([1.0], [True], "a", exponent=-1.0)


def test_minimum_variance() -> None:
    # W^2 g^2 = 1 and 4: b* = 1/5; std of (1, 0) with G in it 1/2
    assert minimum_variance_baseline([1.0, 0.0], [1.0, 2.0], [1.0, 1.0]) == pytest.approx(0.2)
    assert minimum_variance([1.0, 0.0], [1.0, 2.0], [1.0, 1.0]) == pytest.approx([1.6, -0.4])
    assert minimum_variance([1.0, 0.0], [1.0, 2.0], [1.0, 1.0], scale="none") == pytest.approx([0.8, -0.2])
    # W^2 g^2 = 9, 4, 0.25: (9 + 2) / 13.25
    assert minimum_variance_baseline([1.0, 0.5, 0.0], [1.0, 2.0, 0.5], [3.0, 1.0, 1.0]) == pytest.approx(
        11 / 13.25
    )


def test_minimum_variance_by_length() -> None:
    # g / L = 1 and 1/2, W g / L = 1 and 1: the plain mean
    assert minimum_variance_baseline([1.0, 0.0], [1.0, 2.0], [1.0, 1.0], [1, 2]) == pytest.approx(0.5)


def test_minimum_variance_on_policy_with_equal_gradients_is_the_mean() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert minimum_variance_baseline(rewards, [1.0] * 4, [0.3] * 4) == pytest.approx(0.25)


def test_gradients_as_small_as_any_decide_as_large_ones_do() -> None:
    assert minimum_variance_baseline([1.0, 0.0], [1.0, 2.0], [1e-9, 1e-9]) == pytest.approx(0.2)
    assert minimum_variance_baseline([1.0, 0.0], [1e90, 1e-90], [1e90, 1e-90]) == pytest.approx(1.0)


def test_minimum_variance_where_nothing_can_be_weighed() -> None:
    assert minimum_variance_baseline([], [], []) == 0.0
    assert minimum_variance_baseline([1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4) == 0.5
    assert minimum_variance([], [], []) == ()
    assert minimum_variance([0.7], [2.0], [1.0]) == (0.0,)
    assert minimum_variance([1.0, 1.0], [1.0, 2.0], [1.0, 3.0]) == (0.0, 0.0)


def test_minimum_variance_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"of \[1, 2\] rollouts"):
        minimum_variance([1.0, 0.0], [1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"of \[1, 2\] rollouts"):
        minimum_variance([1.0, 0.0], [1.0, 1.0], [1.0, 1.0], lengths=[3])
    with pytest.raises(ValueError, match="reward 1 is nan"):
        minimum_variance([1.0, math.nan], [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="ratio 0 is -1"):
        minimum_variance([1.0, 0.0], [-1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="ratio 1 is inf"):
        minimum_variance([1.0, 0.0], [1.0, math.inf], [1.0, 1.0])
    with pytest.raises(ValueError, match="gradient norm 0 is nan"):
        minimum_variance([1.0, 0.0], [1.0, 1.0], [math.nan, 1.0])
    with pytest.raises(ValueError, match="length 1 is 0"):
        minimum_variance([1.0, 0.0], [1.0, 1.0], [1.0, 1.0], lengths=[1, 0])
