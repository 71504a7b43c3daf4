"""Advantages across unlike policies that answered the same prompt: `capability_aware`, `CapabilityTracker`.

For: re-scored rewards by agent, in; advantages as one learner uses them, by agent, out. Not for: groups of
one agent alone, where capability cancels out; nor for trust, which weighs a rollout elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from cachetools import FIFOCache

from node.weight.advantage.numbers import STD_EPSILON, checked, clamp, has_signal, mean_std

__all__ = ["CapabilityTracker", "capability_aware"]

OMEGA_MIN, OMEGA_MAX = 1 / 3, 3.0
MAX_CAPABILITY_ADVANTAGE = 10.0
"""mu_k is no mean of the pooled rewards, so nothing else bounds (r - mu_k) / std when the rewards hardly
differ."""
_SMALL = 1e-6


def capability_aware(
    rewards: Mapping[str, Sequence[float]], capability: Mapping[str, float], learner: str
) -> dict[str, tuple[float, ...]]:
    """Advantages of all agents' rollouts on one prompt, as `learner` uses them.

    omega(k, j) = P_k / P_j, clamped to [1/3, 3]; mu_k = 1/(nG) sum_j sum_i omega(k, j) r_(j,i); A_(k),i =
    (r_(k,i) - mu_k) / (std of all nG rewards + 1e-6). The learner k uses A_(k) for its own rollouts and
    omega(j, k) A_(j) for those of agent j: its sender's advantage, more for stronger senders.

    Source: HACPO, arXiv 2603.02604. Evidence: EXACT; ours are the clamp of omega, the epsilon, the unbiased
    std, means over unequal group sizes, zeros where all nG rewards are alike, and the bound of +-10. Inputs:
    re-scored rewards by agent, P by agent (`CapabilityTracker.value`). Agents without rewards have no
    advantages. A reward or a P that is no finite number: ValueError.
    """
    pooled = [reward for group in rewards.values() for reward in group]
    checked(pooled)
    checked(tuple(capability.values()), "capability")
    if not has_signal(pooled):
        return {agent: (0.0,) * len(group) for agent, group in rewards.items()}
    _, std = mean_std(pooled)
    advantages: dict[str, tuple[float, ...]] = {}
    for agent, group in rewards.items():
        expected = sum(
            _omega(capability[agent], capability[other]) * reward
            for other, others in rewards.items()
            for reward in others
        ) / len(pooled)
        factor = 1.0 if agent == learner else _omega(capability[agent], capability[learner])
        advantages[agent] = tuple(
            clamp(factor * (reward - expected) / (std + STD_EPSILON), MAX_CAPABILITY_ADVANTAGE)
            for reward in group
        )
    return advantages


class CapabilityTracker:
    """P of each agent: mean reward, always scored here, of its last `groups` mixed groups.

    HACPO averages over the last K = 5 steps; `groups` is five steps' worth of own groups. Ours: groups are
    counted, for a peer's do not come by our steps, and only mixed ones, for everybody, because of peers none
    else arrive: own groups that all failed, or all succeeded, would make P_j / P_k a ratio of unlike things.
    An agent never observed has the mean over the others, so that its omega is near one. Bounded: the
    `max_agents` agents observed last are kept.
    """

    def __init__(self, groups: int, max_agents: int = 4096) -> None:
        self._groups = groups
        self._seen: FIFOCache[str, deque[float]] = FIFOCache(max_agents)

    def observe(self, agent: str, rewards: Sequence[float]) -> None:
        """Take in one group of `agent`, if its rewards differ."""
        if not has_signal(rewards):
            return
        history = self._seen.get(agent) or deque(maxlen=self._groups)
        history.append(fmean(rewards))
        self._seen[agent] = history  # observed last, forgotten last

    def value(self, agent: str) -> float:
        """P of `agent`."""
        history = self._seen.get(agent)
        if history:
            return fmean(history)
        return fmean(fmean(other) for other in self._seen.values()) if self._seen else 0.0


def _omega(numerator: float, denominator: float) -> float:
    ratio = (max(numerator, 0.0) + _SMALL) / (max(denominator, 0.0) + _SMALL)
    return min(max(ratio, OMEGA_MIN), OMEGA_MAX)
