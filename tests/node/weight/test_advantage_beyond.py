"""Advantages of several rewards, which need more than one group."""

from __future__ import annotations

import math

import pytest

from node.weight.advantage.several_rewards import gdpo

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
