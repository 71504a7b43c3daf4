"""HACPO and GRAFT: treatments that compare what unlike policies answered to one prompt.

For each step: remember everybody's rewards on its prompts, then decide. HACPO (arXiv 2603.02604, EXACT) gives
all rollouts on a shared prompt, the own ones too, capability-aware advantages over the rewards of all
policies (`capability_aware` has the formula). GRAFT (arXiv 2609.37868, RECONSTRUCTED) opens its gate where
all own rollouts failed and the peer's rewards differ. In our lab neither helps (docs/objectives.md), so this
is built only where `weight.external` asks for it (`open_treatments`).

Policies are told apart by source: this node, and each author of foreign groups. Followers' groups come from
this node's own policy and are treated like own ones without a comparison. All rewards were computed here.
Memory is bounded: `MAX_PROMPTS` prompts that were touched last, `MAX_SOURCES` sources of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cachetools import FIFOCache, LRUCache

from node.weight.advantage.capability import CapabilityTracker, capability_aware
from node.weight.advantage.numbers import MAX_MAGNITUDE, has_signal
from node.weight.by_group import by_group
from node.weight.groups import OWN_SOURCE, Kind, TrainingGroup
from node.weight.settings import Treatment, WeightSettings

__all__ = ["SharedPrompts", "choose_treatment"]

MAX_PROMPTS = 4096
MAX_SOURCES = 64
CAPABILITY_STEPS = 5
"""K of HACPO: a capability is the mean reward over this many steps."""

Rewards = Mapping[str, Sequence[float]]
"""By source, of one prompt."""


class SharedPrompts:
    """Remembers the newest rewards of each source on each prompt, and each source's capability."""

    def __init__(self, settings: WeightSettings) -> None:
        self._settings = settings
        self._capability = CapabilityTracker(CAPABILITY_STEPS * settings.local_groups)
        self._answers: LRUCache[int, FIFOCache[str, tuple[float, ...]]] = LRUCache(MAX_PROMPTS)

    def treat(self, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        for group in groups:
            self._remember(group)
        return [self._treated(group) for group in groups]

    def _remember(self, group: TrainingGroup) -> None:
        if group.kind is Kind.FOLLOWER or not _are_numbers(group.rewards):
            return
        self._answers.setdefault(group.prompt, FIFOCache(MAX_SOURCES))[group.source] = group.rewards
        if group.uses == 0:
            self._capability.observe(group.source, group.rewards)

    def _treated(self, group: TrainingGroup) -> TrainingGroup:
        answers: dict[str, Sequence[float]] = dict(self._answers.get(group.prompt, {}))
        if group.kind is Kind.FOREIGN:
            treatment = choose_treatment(
                group.rewards,
                answers.get(OWN_SOURCE),
                self._settings,
                same_tokenizer=group.same_tokenizer,
            )
            joint = treatment is Treatment.HACPO
        else:
            treatment = Treatment.OWN
            joint = group.kind is Kind.OWN and self._is_compared(group, answers)
        if not joint or not _are_numbers(group.rewards):
            return by_group(group, treatment, self._settings)
        answers[group.source] = group.rewards
        capability = {source: self._capability.value(source) for source in answers}
        advantages = capability_aware(answers, capability, OWN_SOURCE)[group.source]
        return replace(group, treatment=treatment, advantages=advantages)

    def _is_compared(self, own: TrainingGroup, answers: Rewards) -> bool:
        """Whether another policy's answers to the prompt of this own group are treated by HACPO."""
        return any(
            choose_treatment(theirs, own.rewards, self._settings, same_tokenizer=True) is Treatment.HACPO
            for source, theirs in answers.items()
            if source != OWN_SOURCE
        )


def _are_numbers(rewards: Sequence[float]) -> bool:
    """Whether statistics can be made of them; `check_group` refuses others afterwards."""
    return all(abs(reward) <= MAX_MAGNITUDE for reward in rewards)


def choose_treatment(
    peer_rewards: Sequence[float],
    own_rewards: Sequence[float] | None,
    settings: WeightSettings,
    *,
    same_tokenizer: bool,
) -> Treatment:
    """Of a foreign group: GRAFT where its gate opens, else HACPO where this node has answered the prompt too
    (`own_rewards`), COMPAT where it has not.

    A forced treatment falls back to COMPAT where it needs an own group and there is none, or
    log-probabilities of each token and the text was tokenised again.
    """
    if settings.force is not None:
        possible = {Treatment.HACPO: own_rewards is not None, Treatment.OWN: same_tokenizer}
        return settings.force if possible.get(settings.force, True) else Treatment.COMPAT
    if own_rewards is None:
        return Treatment.COMPAT
    if max(own_rewards) <= settings.failure_reward and has_signal(peer_rewards):
        return Treatment.GRAFT
    return Treatment.HACPO
