"""One back-off: how long, up to what, for how many keys."""

from __future__ import annotations

import random

import pytest

from node.peers.backoff import Backoff


def test_waits_double_up_to_the_longest_and_start_anew_after_a_success() -> None:
    backoff = Backoff[str](2.0, 30.0, max_keys=8)
    assert backoff.ready_in_s("a", 0.0) == 0.0
    assert [backoff.failed("a", 100.0) for _ in range(6)] == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff.ready_in_s("a", 110.0) == 20.0
    assert backoff.ready_in_s("a", 130.0) == backoff.ready_in_s("a", 999.0) == 0.0
    assert backoff.ready_in_s("b", 100.0) == 0.0
    backoff.succeeded("a")
    assert backoff.ready_in_s("a", 110.0) == 0.0
    assert backoff.failed("a", 110.0) == 2.0
    backoff.succeeded("never failed")


def test_growth_may_be_gentle() -> None:
    backoff = Backoff[str](0.5, 0.7, max_keys=1, growth=1.2)
    assert [backoff.failed("a", 0.0) for _ in range(3)] == pytest.approx([0.5, 0.6, 0.7])


def test_jitter_spreads_the_wait_and_does_not_add_up() -> None:
    backoff = Backoff[str](1.0, 4.0, max_keys=1, jitter_rng=random.Random(1))
    waits = [backoff.failed("a", 0.0) for _ in range(200)]
    assert 0.5 <= waits[0] <= 1.5
    assert 2.0 <= min(waits[2:]) < 2.2
    assert 5.8 < max(waits[2:]) <= 6.0
    assert backoff.ready_in_s("a", 0.0) == waits[-1]


def test_the_key_that_failed_longest_ago_is_forgotten_first() -> None:
    backoff = Backoff[str](1.0, 8.0, max_keys=2)
    for key in ("a", "b", "a", "c"):
        backoff.failed(key, 0.0)
    assert [backoff.ready_in_s(key, 0.0) for key in "abc"] == [2.0, 0.0, 1.0]
