"""Gates on lag and age."""

from __future__ import annotations

import pytest

from node.weight.staleness import Freshness, StalenessLimits, judge_foreign, judge_own

LIMITS = StalenessLimits(max_staleness=2, max_policy_lag=4, max_age_windows=3)


@pytest.mark.parametrize(("version", "reason"), [(10, ""), (8, ""), (7, "lag"), (11, "")])
def test_own(version: int, reason: str) -> None:
    verdict = judge_own(version, 10, window=5, now_window=5, limits=LIMITS)
    assert verdict == Freshness(max(10 - version, 0), 0, reason)
    assert verdict.fresh is (reason == "")


@pytest.mark.parametrize(("version", "reason"), [(10, ""), (6, ""), (5, "lag"), (2**63 - 1, "")])
def test_foreign_lag_counts_against_its_own_lineage(version: int, reason: str) -> None:
    assert judge_foreign(version, 10, window=5, now_window=5, limits=LIMITS).reason == reason


@pytest.mark.parametrize(("window", "age", "reason"), [(5, 0, ""), (2, 3, ""), (1, 4, "age"), (9, 0, "")])
def test_age(window: int, age: int, reason: str) -> None:
    for judge in (judge_own, judge_foreign):
        verdict = judge(10, 10, window=window, now_window=5, limits=LIMITS)
        assert (verdict.age_windows, verdict.reason) == (age, reason)
