"""Lengths with a long tail, and groups of rollouts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from node.rollout.policy import Policy
from swarm_cli.bench.workload import Group, LongTail, groups


def test_lengths_are_log_normal_and_capped() -> None:
    lengths = LongTail(median=100, sigma=1.0, cap=8).draw(20_000, seed=1)
    assert median(lengths) == pytest.approx(100, rel=0.03)
    assert max(lengths) == 800
    # P(log-normal > 8 medians) = P(normal > ln 8 = 2.079) = 0.0188
    assert np.mean([length == 800 for length in lengths]) == pytest.approx(0.0188, abs=0.004)
    # One sigma up: P(length <= 100 e) = P(normal <= 1) = 0.841
    assert np.mean([length <= 100 * np.e for length in lengths]) == pytest.approx(0.841, abs=0.01)


def test_no_length_is_zero() -> None:
    assert min(LongTail(median=1, sigma=3.0).draw(1000, seed=0)) == 1


def test_without_spread_all_are_the_median() -> None:
    assert LongTail(median=24, sigma=0.0).draw(3, seed=5) == [24, 24, 24]


def test_same_seed_same_lengths() -> None:
    tail = LongTail(median=24)
    assert tail.draw(8, seed=3) == tail.draw(8, seed=3) != tail.draw(8, seed=4)


def test_a_group_is_a_request_per_rollout_of_exactly_its_length() -> None:
    requests = Group((5, 6), (3, 9)).requests()
    assert [request.prompt_ids for request in requests] == [(5, 6), (5, 6)]
    assert [request.n for request in requests] == [1, 1]
    assert [request.min_new_tokens for request in requests] == [3, 9]
    assert [request.sampling.max_new_tokens for request in requests] == [3, 9]


def test_groups_are_the_same_for_both_sides_and_differ_from_each_other(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    tail = LongTail(median=4)
    one = list(islice(groups(policy, tail, 2, first=100), 3))
    assert one == list(islice(groups(policy, tail, 2, first=100), 3))
    assert len({group.prompt_ids for group in one}) == 3
    assert all(len(group.lengths) == 2 for group in one)
