"""Advantages from group statistics: how much better than expected each rollout of one prompt was.

For: turning re-scored rewards (plain floats) into the numbers that multiply the policy gradient: inside one
group (`ADVANTAGES`), over a batch with several rewards (`gdpo`), across unlike policies that answered the
same prompt (`capability_aware`, fed by a `CapabilityTracker`), by the rarity of a right answer
(`uniqueness_aware`), or with the baseline of least variance (`minimum_variance`). Not for: claimed rewards,
which are never used; nor for trust, staleness or ratios, which weigh a rollout elsewhere. A group whose
rewards are all alike teaches nothing: all zeros. One file per family; `registry` lists all of them with
source and evidence.
"""

from node.weight.advantage.capability import CapabilityTracker, capability_aware
from node.weight.advantage.means import dr_grpo, grpo, max_rl, rloo
from node.weight.advantage.medians import gapo, mad, mc_grpo, pivot
from node.weight.advantage.minimum_variance import minimum_variance, minimum_variance_baseline
from node.weight.advantage.numbers import has_signal
from node.weight.advantage.registry import ADVANTAGES, ALL_ADVANTAGES, Advantage, GroupAdvantage
from node.weight.advantage.several_rewards import gdpo
from node.weight.advantage.uniqueness import uniqueness_aware

__all__ = [
    "ADVANTAGES",
    "ALL_ADVANTAGES",
    "Advantage",
    "CapabilityTracker",
    "GroupAdvantage",
    "capability_aware",
    "dr_grpo",
    "gapo",
    "gdpo",
    "grpo",
    "has_signal",
    "mad",
    "max_rl",
    "mc_grpo",
    "minimum_variance",
    "minimum_variance_baseline",
    "pivot",
    "rloo",
    "uniqueness_aware",
]
