"""Treatment and advantages of one group from its own numbers: the default, which remembers nothing.

Not for comparing policies (`shared_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from node.weight.advantage.medians import pivot
from node.weight.advantage.numbers import has_signal
from node.weight.advantage.registry import ADVANTAGES
from node.weight.groups import Kind, TrainingGroup
from node.weight.settings import Treatment, WeightSettings

__all__ = ["ByGroup", "by_group"]


class ByGroup:
    """Every group by its own statistics: own and followers' groups as OWN, others as OWN or COMPAT."""

    def __init__(self, settings: WeightSettings) -> None:
        self._settings = settings

    def treat(self, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        return [by_group(group, self._treatment(group), self._settings) for group in groups]

    def _treatment(self, group: TrainingGroup) -> Treatment:
        """A token-level objective needs log-probabilities of each token, which other tokenizers lack."""
        by_token = self._settings.force is Treatment.OWN and group.same_tokenizer
        return Treatment.COMPAT if group.kind is Kind.FOREIGN and not by_token else Treatment.OWN


def by_group(group: TrainingGroup, treatment: Treatment, settings: WeightSettings) -> TrainingGroup:
    """`group` with advantages from its own rewards, all zero where those are alike; without the rollout that
    the estimator leaves out, if it does and another one is left."""
    estimator, rewards = ADVANTAGES[settings.advantage], group.rewards
    advantages = estimator(rewards) if has_signal(rewards) else (0.0,) * len(rewards)
    whole = replace(group, treatment=treatment, advantages=advantages)
    if not estimator.drops_pivot or len(rewards) < 2:
        return whole
    place = pivot(rewards) if has_signal(rewards) else 0
    return replace(
        whole,
        rollouts=group.rollouts[:place] + group.rollouts[place + 1 :],
        rewards=rewards[:place] + rewards[place + 1 :],
        advantages=advantages[:place] + advantages[place + 1 :],
        left_out=place,
    )
