"""How old a group is, and whether that is too old: gates only, never a discount.

For: lag of own groups in versions of the own policy, lag of foreign groups against the newest version their
lineage has announced, age in windows. The importance ratio corrects what is kept; a decay on top would
discount staleness twice. Numbers of a peer only ever move the verdict on that peer's own lineage, and a
version above the newest known counts as lag 0. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Freshness", "StalenessLimits", "judge_foreign", "judge_own"]


@dataclass(frozen=True)
class StalenessLimits:
    """Gates; `max_age_windows` and `max_policy_lag` come from the charter's rules, or stricter from the
    config."""

    max_staleness: int = 8
    """Own groups: versions behind the own policy."""
    max_policy_lag: int = 64
    """Foreign groups: versions behind the newest announcement of their lineage."""
    max_age_windows: int = 3
    """All groups: windows since the prompt's window."""


@dataclass(frozen=True)
class Freshness:
    """Verdict on one group: `reason` is "" exactly if it may be used."""

    lag: int
    age_windows: int
    reason: str

    @property
    def fresh(self) -> bool:
        return not self.reason


def judge_own(
    policy_version: int, current_version: int, window: int, now_window: int, limits: StalenessLimits
) -> Freshness:
    """Gate of a group of the own lineage."""
    lag = max(current_version - policy_version, 0)
    return _judge(lag, limits.max_staleness, window, now_window, limits)


def judge_foreign(
    policy_version: int, newest_version: int, window: int, now_window: int, limits: StalenessLimits
) -> Freshness:
    """Gate of a group of another lineage; `newest_version` is the newest its *owner* announced."""
    lag = max(newest_version - policy_version, 0)
    return _judge(lag, limits.max_policy_lag, window, now_window, limits)


def _judge(lag: int, max_lag: int, window: int, now_window: int, limits: StalenessLimits) -> Freshness:
    age_windows = max(now_window - window, 0)
    if age_windows > limits.max_age_windows:
        return Freshness(lag, age_windows, "age")
    if lag > max_lag:
        return Freshness(lag, age_windows, "lag")
    return Freshness(lag, age_windows, "")
