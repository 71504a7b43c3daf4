"""Pairs, medians and the envelope of reports."""

from __future__ import annotations

import pytest

from swarm_cli.bench.measure import Pairs, envelope, in_turn, spread


def test_ratio_is_the_median_of_the_pairs_ratios() -> None:
    """Not the ratio of medians, which would be 2 / 4 here."""
    pairs = Pairs(ours=(1.0, 2.0, 30.0), theirs=(2.0, 10.0, 4.0))
    assert pairs.ratios == (0.5, 0.2, 7.5)
    assert pairs.ratio == 0.5
    assert Pairs(ours=(1.0, 3.0), theirs=(1.0, 1.0)).ratio == 2.0


def test_sides_take_turns_at_beginning() -> None:
    order: list[str] = []
    lines: list[str] = []

    def side(name: str, value: float) -> object:
        def measure(pair: int) -> float:
            order.append(f"{name}{pair}")
            return value + pair

        return measure

    pairs = in_turn(3, side("a", 10.0), side("b", 5.0), lines.append)  # type: ignore[arg-type]
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert pairs == Pairs((10.0, 11.0, 12.0), (5.0, 6.0, 7.0))
    assert lines[0] == "pair 1 of 3: 10.0 against 5.0 (2.00)"


def test_spread() -> None:
    assert spread([2.0, 1.0, 3.0]) == 3.0


def test_envelope_names_the_bench_and_the_machine() -> None:
    report = envelope("rollout", {"ratio": 1.0})
    assert report["bench"] == "rollout"
    assert report["ratio"] == 1.0
    assert report["cores"] >= 1
    assert report["load_average"] >= 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1234.5678, 1235.0),
        (0.000123456, 0.0001235),
        (7, 7),
        (None, None),
        ("text", "text"),
        ({"a": (0.33333333, 2)}, {"a": [0.3333, 2]}),
    ],
)
def test_results_keep_four_significant_digits(value: object, expected: object) -> None:
    assert envelope("rollout", {"value": value})["value"] == expected
