"""Advantages from group statistics: how much better than expected each rollout of one prompt was.

For: turning re-scored rewards (plain floats) into the numbers that multiply the policy gradient: inside one
group (`grpo`, `rloo`, `dr_grpo`) or, where several nodes answered the same prompt, across unlike policies
(`capability_aware`, fed by a `CapabilityTracker`). Not for: claimed rewards, which are never used; nor for
trust, staleness or ratios, which weigh a rollout elsewhere. A group whose rewards are all alike teaches
nothing: all zeros.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

__all__ = [
    "ADVANTAGES",
    "CapabilityTracker",
    "capability_aware",
    "dr_grpo",
    "grpo",
    "has_signal",
    "rloo",
]

STD_EPSILON = 1e-6
OMEGA_MIN, OMEGA_MAX = 1 / 3, 3.0
MAX_CAPABILITY_ADVANTAGE = 10.0
"""mu_k is no mean of the pooled rewards, so nothing else bounds (r - mu_k) / std when the rewards hardly
differ."""
_SMALL = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ, so that a policy gradient exists."""
    return len(rewards) > 0 and max(rewards) - min(rewards) > STD_EPSILON


def grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r - mean) / (std + 1e-6), unbiased std; a group of one has mean 0 and std 1.

    Source: GRPO, arXiv 2402.03300; the unbiased std as in verl. Evidence: EXACT.
    """
    mean, std = _mean_std(rewards)
    return tuple((reward - mean) / (std + STD_EPSILON) for reward in rewards)


def rloo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean); a group of one has no baseline: 0.

    Source: RLOO, arXiv 2402.14740. Evidence: EXACT.
    """
    count = len(rewards)
    if count == 1:
        return (0.0,)
    mean = fmean(rewards)
    return tuple(count / (count - 1) * (reward - mean) for reward in rewards)


def dr_grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = r - mean, without the division by std that favours very easy and very hard prompts.

    Source: Dr.GRPO, arXiv 2503.20783. Evidence: EXACT.
    """
    mean = fmean(rewards)
    return tuple(reward - mean for reward in rewards)


ADVANTAGES: Mapping[str, Callable[[Sequence[float]], tuple[float, ...]]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "rloo": rloo,
}
"""What the config may name for advantages inside one group."""


def capability_aware(
    rewards: Mapping[str, Sequence[float]], capability: Mapping[str, float], learner: str
) -> dict[str, tuple[float, ...]]:
    """Advantages of all agents' rollouts on one prompt, as `learner` uses them.

    omega(k, j) = P_k / P_j, clamped to [1/3, 3]; mu_k = 1/(nG) sum_j sum_i omega(k, j) r_(j,i); A_(k),i =
    (r_(k,i) - mu_k) / (std of all nG rewards + 1e-6). The learner k uses A_(k) for its own rollouts and
    omega(j, k) A_(j) for those of agent j: its sender's advantage, more for stronger senders.

    Source: HACPO, arXiv 2603.02604. Evidence: EXACT; ours are the clamp of omega, the epsilon, the unbiased
    std, means over unequal group sizes, zeros where all nG rewards are alike, and the bound of +-10. Inputs:
    re-scored rewards by agent, P by agent (`CapabilityTracker.value`).
    """
    pooled = [reward for group in rewards.values() for reward in group]
    if not has_signal(pooled):
        return {agent: (0.0,) * len(group) for agent, group in rewards.items()}
    _, std = _mean_std(pooled)
    advantages: dict[str, tuple[float, ...]] = {}
    for agent, group in rewards.items():
        expected = sum(
            _omega(capability[agent], capability[other]) * reward
            for other, others in rewards.items()
            for reward in others
        ) / len(pooled)
        factor = 1.0 if agent == learner else _omega(capability[agent], capability[learner])
        advantages[agent] = tuple(
            _clamp(factor * (reward - expected) / (std + STD_EPSILON), MAX_CAPABILITY_ADVANTAGE)
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
        self._max_agents = max_agents
        self._seen: dict[str, deque[float]] = {}

    def observe(self, agent: str, rewards: Sequence[float]) -> None:
        """Take in one group of `agent`, if its rewards differ."""
        if not has_signal(rewards):
            return
        history = self._seen.pop(agent, None) or deque(maxlen=self._groups)
        history.append(fmean(rewards))
        self._seen[agent] = history
        if len(self._seen) > self._max_agents:
            del self._seen[next(iter(self._seen))]

    def value(self, agent: str) -> float:
        """P of `agent`."""
        history = self._seen.get(agent)
        if history:
            return fmean(history)
        return fmean(fmean(other) for other in self._seen.values()) if self._seen else 0.0


def _clamp(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _omega(numerator: float, denominator: float) -> float:
    ratio = (max(numerator, 0.0) + _SMALL) / (max(denominator, 0.0) + _SMALL)
    return min(max(ratio, OMEGA_MIN), OMEGA_MAX)


def _mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    if len(rewards) == 1:
        return 0.0, 1.0
    mean = fmean(rewards)
    return mean, math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
