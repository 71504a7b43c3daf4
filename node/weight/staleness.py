"""How old a group is and how far behind its lineage, and whether that is too much: gates only, never a
discount.

One rule for what is fetched, what is verified and what is trained on: lag in versions behind the newest one
that the group's lineage announced, age in windows, limits from the charter. A group is as old as its oldest
token: one that is too old is none the better for the company of new ones. The importance ratio corrects what
is kept; a decay on top would discount staleness twice. Numbers of a peer only ever move the verdict on
that peer's own lineage, and a version above the newest known has lag 0. Own groups need no gate: admission
bounds their lag. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import VerificationRules

__all__ = ["Staleness", "judge_staleness"]


@dataclass(frozen=True)
class Staleness:
    """Verdict on one group: `reason` is "" exactly if it may be used, else "age" or "lag"."""

    lag: int
    age_windows: int
    reason: str

    @property
    def fresh(self) -> bool:
        return not self.reason


def judge_staleness(
    policy_version: int,
    oldest_version: int,
    newest_version: int,
    window: int,
    now_window: int,
    rules: VerificationRules,
) -> Staleness:
    """Gate of a group whose newest token is of `policy_version` and whose oldest of `oldest_version`;
    `newest_version` is the newest that the *owner* of its lineage announced. The oldest token decides; the
    lag that is told is that of the newest."""
    lag = max(newest_version - policy_version, 0)
    age_windows = max(now_window - window, 0)
    reason = ""
    if age_windows > rules.max_age_windows:
        reason = "age"
    elif newest_version - oldest_version > rules.max_policy_lag:
        reason = "lag"
    return Staleness(lag, age_windows, reason)
