"""Gates on lag and age."""

from __future__ import annotations

import pytest

from node.weight.staleness import Staleness, judge_staleness
from protocol.messages import VerificationRules

RULES = VerificationRules(max_policy_lag=4, max_age_windows=3)


@pytest.mark.parametrize(("version", "reason"), [(10, ""), (6, ""), (5, "lag"), (11, ""), (2**63 - 1, "")])
def test_lag_counts_against_the_groups_own_lineage(version: int, reason: str) -> None:
    found = judge_staleness(version, version, 10, window=5, now_window=5, rules=RULES)
    assert found == Staleness(max(10 - version, 0), 0, reason)
    assert found.fresh is (reason == "")


def test_the_oldest_token_decides_and_the_newest_is_told() -> None:
    """Version 10 is the newest, and 4 behind it are allowed."""
    assert judge_staleness(9, 6, 10, window=5, now_window=5, rules=RULES) == Staleness(1, 0, "")
    assert judge_staleness(9, 5, 10, window=5, now_window=5, rules=RULES) == Staleness(1, 0, "lag")


@pytest.mark.parametrize(("window", "age", "reason"), [(5, 0, ""), (2, 3, ""), (1, 4, "age"), (9, 0, "")])
def test_age(window: int, age: int, reason: str) -> None:
    found = judge_staleness(10, 10, 10, window=window, now_window=5, rules=RULES)
    assert (found.age_windows, found.reason) == (age, reason)
