"""All estimators with what a reader of `swarm objectives list` wants to know: source, evidence, needs.

For: `weight.advantage` of the config, which may name whatever needs one group's rewards only (`ADVANTAGES`),
and for the list of all (`ALL_ADVANTAGES`). Not for: choosing options; the config takes the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from node.weight.advantage.means import dr_grpo, grpo, max_rl, rloo
from node.weight.advantage.medians import gapo, mad, mc_grpo

__all__ = ["ADVANTAGES", "ALL_ADVANTAGES", "Advantage", "Evidence", "GroupAdvantage"]

Evidence = Literal["EXACT", "CORE", "RECONSTRUCTED", "UNVERIFIED"]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """One published estimator. `needs`: inputs beyond one group's rewards, "" if none."""

    name: str
    summary: str
    source: str
    evidence: Evidence
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Advantage):
    """One that turns a group's rewards into as many advantages; called like the function."""

    estimate: Callable[[Sequence[float]], tuple[float, ...]]
    drops_pivot: bool = False
    """One more rollout is drawn, and that at `pivot(rewards)` leaves the group with its advantage of 0."""

    def __call__(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return self.estimate(rewards)


_OF_ONE_GROUP = (
    GroupAdvantage(
        name="dr_grpo",
        summary="r - mean",
        source="arXiv 2503.20783",
        evidence="EXACT",
        estimate=dr_grpo,
    ),
    GroupAdvantage(
        name="gapo",
        summary="(r - median of the densest half) / std",
        source="arXiv 2510.21830, TsingZ0/verl-GAPO",
        evidence="CORE",
        estimate=gapo,
    ),
    GroupAdvantage(
        name="grpo",
        summary="(r - mean) / std",
        source="arXiv 2402.03300, verl",
        evidence="EXACT",
        estimate=grpo,
    ),
    GroupAdvantage(
        name="mad",
        summary="(r - median) / (1.4826 MAD), by std where more than half tie",
        source="arXiv 2510.21830",
        evidence="CORE",
        estimate=mad,
    ),
    GroupAdvantage(
        name="max_rl",
        summary="(r - mean) / mean",
        source="arXiv 2602.02710, prime-rl",
        evidence="EXACT",
        estimate=max_rl,
    ),
    GroupAdvantage(
        name="mc_grpo",
        summary="(r - median) / std; the median rollout of an odd group drops out",
        source="arXiv 2601.22582, lotusroot-kim/MC-GRPO",
        evidence="CORE",
        needs="one more rollout a group, an odd number",
        estimate=mc_grpo,
        drops_pivot=True,
    ),
    GroupAdvantage(
        name="rloo",
        summary="r - mean of the others",
        source="arXiv 2402.14740",
        evidence="EXACT",
        estimate=rloo,
    ),
)

ADVANTAGES: Mapping[str, GroupAdvantage] = {each.name: each for each in _OF_ONE_GROUP}
"""What the config may name for advantages inside one group."""

ALL_ADVANTAGES: tuple[Advantage, ...] = (
    *_OF_ONE_GROUP,
    Advantage(
        name="capability_aware",
        summary="pooled over agents, each mean and weight scaled by the ratio of capabilities (HACPO)",
        source="arXiv 2603.02604, zzx-peter/hacrl",
        evidence="EXACT",
        needs="other agents' rewards on the same prompt, capability of each",
    ),
)
"""Every estimator, those of one group first."""
