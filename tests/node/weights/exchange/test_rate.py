"""Caps and measured rates, with time as an argument."""

from __future__ import annotations

from collections import Counter

import pytest

from node.transport.limits import OTHER_PEERS
from node.weights.exchange.rate import Flow, RateLimit, tally


@pytest.mark.parametrize("piece", [1_000, 65_536, 1 << 20])
def test_limit_lets_through_its_rate(piece):
    limit = RateLimit(20.0)
    now_s, sent = 0.0, 0
    while now_s < 60.0:
        delay_s = limit.delay_s(now_s)
        if delay_s > 0:
            now_s += delay_s
            continue
        limit.take(piece, now_s)
        sent += piece
    on_the_wire = 1.04 * sent
    assert on_the_wire == pytest.approx(20e6 / 8 * 60, rel=0.05)


def test_limit_saves_up_a_tenth_of_a_second_only():
    limit = RateLimit(8.32)
    assert limit.delay_s(0.0) == 0.0
    limit.take(100_000, 1000.0)
    assert limit.delay_s(1000.0) == 0.0
    limit.take(500_000, 1000.0)
    assert limit.delay_s(1000.0) == pytest.approx(0.5)
    limit.take(-500_000, 1000.0)
    assert limit.delay_s(1000.0) == 0.0


def test_no_limit_never_waits():
    limit = RateLimit(0.0)
    limit.take(1 << 40, 0.0)
    assert limit.delay_s(0.0) == 0.0


def test_flow_measures_a_steady_rate_and_its_window():
    flow = Flow(0.0)
    assert flow.window_bytes() == 0.0
    for step in range(1, 500):
        flow.delivered(10_000, step / 100, 0.05 + step % 3 / 100)
    assert flow.bytes_per_s(4.99) == pytest.approx(1e6, rel=0.05)
    assert flow.round_trip_s == pytest.approx(0.05)
    assert flow.window_bytes() == pytest.approx(1e6 * 0.25, rel=0.1)
    assert flow.bytes_per_s(10.0) < 0.01e6


def test_window_does_not_shrink_with_a_short_lull():
    flow = Flow(0.0)
    for step in range(1, 300):
        flow.delivered(10_000, step / 100, 0.05)
    before = flow.window_bytes()
    flow.delivered(10_000, 4.0, 0.05)
    assert flow.window_bytes() > 0.85 * before
    flow.delivered(10_000, 60.0, 0.05)
    assert flow.window_bytes() < 0.1 * before


def test_strangers_beyond_the_table_are_counted_together():
    counter: Counter[str] = Counter()
    for number in range(2000):
        tally(counter, f"peer {number}", 2)
    assert len(counter) == 1025
    assert counter[OTHER_PEERS] == 2 * (2000 - 1024)
    tally(counter, "peer 5", 1)
    assert counter["peer 5"] == 3
