"""The gate of a merge: both verdicts, few prompts, and how often luck passes."""

from __future__ import annotations

import math
import random

import pytest

from node.train.gate import MIN_PROMPTS, judge, student_quantile
from protocol.errors import LocalProtocolError

MIXED = [0.0, 1.0] * 16


@pytest.mark.parametrize(
    ("probability", "degrees", "table"),
    [
        (0.95, 10, 1.812461),
        (0.95, 15, 1.753050),
        (0.95, 63, 1.669402),
        (0.99, 15, 2.602480),
        (0.9, 30, 1.310415),
        (0.5, 15, 0.0),
    ],
)
def test_quantiles_are_those_of_tables(probability: float, degrees: int, table: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(table, abs=1e-3)


def test_a_gain_is_adopted() -> None:
    """32 prompts, 16 of which go from 0 to 1: mean 0.5, deviation 0.508, bound 0.5 - 1.696 x 0.0898."""
    judged = judge(MIXED, [1.0] * 32)
    assert judged.adopted
    assert judged.gain == 0.5
    assert judged.lower_bound == pytest.approx(0.5 - 1.6955 * math.sqrt(8 / 31 / 32), abs=1e-3)
    assert judged.why.startswith("adopted: mean reward +0.5000 over 32 prompts, at least +0.347")


def test_a_loss_is_not_adopted() -> None:
    judged = judge(MIXED, [0.0] * 32)
    assert not judged.adopted
    assert judged.gain == -0.5


def test_a_gain_that_may_be_luck_is_not_adopted() -> None:
    after = [1.0, 1.0, *MIXED[2:]]
    assert judge(MIXED, after).gain > 0
    assert not judge(MIXED, after).adopted


def test_no_change_at_all_is_not_worse() -> None:
    judged = judge(MIXED, MIXED)
    assert (judged.adopted, judged.gain, judged.lower_bound) == (True, 0.0, 0.0)


def test_a_tolerance_takes_a_small_loss_as_none() -> None:
    after = [1.0, 1.0, *MIXED[2:]]
    assert judge(MIXED, after, tolerance=0.05).adopted
    assert not judge(MIXED, [0.0] * 32, tolerance=0.05).adopted


def test_pairs_count_not_the_spread_of_the_prompts() -> None:
    """The same gain of 0.05 on each prompt, easy or hard, is certain."""
    assert judge(MIXED, [each + 0.05 for each in MIXED]).lower_bound == pytest.approx(0.05)


def test_more_confidence_needs_more_gain() -> None:
    after = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, *MIXED[6:]]
    assert judge(MIXED, after, confidence=0.9).adopted
    assert not judge(MIXED, after, confidence=0.99).adopted


@pytest.mark.parametrize("count", [0, 1, MIN_PROMPTS - 1])
def test_few_prompts_adopt_nothing(count: int) -> None:
    judged = judge([0.0] * count, [1.0] * count)
    assert (judged.adopted, judged.lower_bound) == (False, -math.inf)
    assert f"{count} prompts say too little, {MIN_PROMPTS} are needed" in judged.why
    assert judge([0.0] * MIN_PROMPTS, [1.0] * MIN_PROMPTS).adopted


@pytest.mark.parametrize("count", [MIN_PROMPTS, 64])
@pytest.mark.parametrize(("up", "down"), [(0.3, 0.3), (0.15, 0.2)])
def test_luck_passes_about_as_often_as_it_says(count: int, up: float, down: float) -> None:
    """Merges that gain nothing or lose: of 0/1 rewards, the share `up` becomes right, `down` wrong."""
    rng = random.Random(f"{count} {up}")
    adopted = 0
    for _ in range(1000):
        gains = rng.choices([1.0, -1.0, 0.0], [up, down, 1 - up - down], k=count)
        adopted += judge([0.0] * count, gains).adopted
    assert adopted / 1000 < 0.07


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ([0.0] * 16, [0.0] * 15, {}),
        ([0.0] * 16, [math.nan] * 16, {}),
        ([math.inf] * 16, [0.0] * 16, {}),
        (MIXED, MIXED, {"confidence": 1.0}),
        (MIXED, MIXED, {"tolerance": -0.1}),
    ],
)
def test_a_probe_that_is_none_is_our_fault(
    before: list[float], after: list[float], changed: dict[str, float]
) -> None:
    with pytest.raises(LocalProtocolError):
        judge(before, after, **changed)
