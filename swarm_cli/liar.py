"""The liar of `swarm demo --with-liar`: honest groups turned into lies that only verification can tell.

Each lie is well-formed, announced under the liar's own name and in one of its own slots, and carries rewards
that differ, so that it is fetched and, believed, would be trained on. Pure functions: groups in, announcement
and body out. Every kind has one reason for which it must be refused, provided that the caller announces each
slot at most once (`announcement.prompt.slot`); a second answer would be refused as equivocation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from node.share.publish import announce
from protocol.codec import digest, encode
from protocol.messages import (
    Announcement,
    BlobRef,
    Charter,
    Digest,
    Lineage,
    PromptRef,
    Rollout,
    RolloutGroup,
)
from protocol.prompts import slots

__all__ = ["Liar", "Lie"]

_EASY_QUESTION = "Say yes."


class Lie(StrEnum):
    """What is false about a group. `reason` is the word with which verification refuses it."""

    FALSE_REWARD = "false_reward"
    """Its own completions, the failed ones claimed as right and the right ones as failed."""
    COPY = "copy"
    """Another author's completions, announced as its own."""
    EASY_QUESTION = "easy_question"
    """The right slot, but a question of its own choice."""
    WRONG_INDEX = "wrong_index"
    """A prompt it likes, answered in a slot that stands for another one."""

    @property
    def reason(self) -> str:
        """Why it must be refused."""
        return {Lie.FALSE_REWARD: "false_reward", Lie.COPY: "copied"}.get(self, "tampered_prompt")


@dataclass(frozen=True, slots=True)
class Liar:
    """Lies in one swarm, under one lineage."""

    charter: Charter
    swarm_id: Digest
    lineage: Lineage

    def lie(self, kind: Lie, group: RolloutGroup) -> tuple[Announcement, bytes] | None:
        """`group` turned into a lie, or None where it does not lend itself to this kind.

        `group` is another author's for COPY, else the liar's own, unsent one.
        """
        false = {
            Lie.FALSE_REWARD: self._false_reward,
            Lie.COPY: self._copy,
            Lie.EASY_QUESTION: self._easy_question,
            Lie.WRONG_INDEX: self._wrong_index,
        }[kind](group)
        if false is None or len({rollout.reward for rollout in false.rollouts}) == 1:
            return None
        body = encode(false)
        return announce(false, BlobRef(digest=digest(body), size=len(body))), body

    def _false_reward(self, group: RolloutGroup) -> RolloutGroup:
        """Mixed rewards are turned upside down; where all are alike, every second one is."""
        rewards = [rollout.reward for rollout in group.rollouts]
        low, high = min(rewards), max(rewards)
        if low < high:
            claimed = [low + high - reward for reward in rewards]
        else:
            other = 1.0 if low == 0.0 else 0.0
            claimed = [other if place % 2 else reward for place, reward in enumerate(rewards)]
        rollouts = tuple(
            msgspec.structs.replace(rollout, reward=reward)
            for rollout, reward in zip(group.rollouts, claimed, strict=True)
        )
        return msgspec.structs.replace(group, rollouts=rollouts)

    def _copy(self, group: RolloutGroup) -> RolloutGroup | None:
        """Under the liar's slot for the same prompt, so that only the copy is wrong about it. None when the
        prompt is not one of the liar's in that window."""
        window, index = group.prompt.window, group.prompt.index
        mine = slots(self.swarm_id, self.charter, window, self.lineage.owner)
        if group.author == self.lineage.owner or index not in mine:
            return None
        return msgspec.structs.replace(
            group,
            author=self.lineage.owner,
            # The token ids are in the author's tokenizer, and the charter allows anybody to use that.
            lineage=msgspec.structs.replace(self.lineage, tokenizer=group.lineage.tokenizer),
            prompt=PromptRef(window=window, slot=mine.index(index), index=index),
            # The author's version would make the liar's own groups look old.
            policy_version=0,
            mean_version=0.0,
            oldest_version=0,
            rollouts=tuple(map(_at_version_0, group.rollouts)),
        )

    def _easy_question(self, group: RolloutGroup) -> RolloutGroup:
        return msgspec.structs.replace(group, question=_EASY_QUESTION)

    def _wrong_index(self, group: RolloutGroup) -> RolloutGroup:
        """The same prompt again, in the slot after its own."""
        prompt = group.prompt
        slot = (prompt.slot + 1) % self.charter.slots_per_window
        return msgspec.structs.replace(group, prompt=msgspec.structs.replace(prompt, slot=slot))


def _at_version_0(rollout: Rollout) -> Rollout:
    """As if the untrained policy had drawn it."""
    answer = msgspec.structs.replace(rollout.answer, versions=bytes(len(rollout.answer.versions)))
    return msgspec.structs.replace(rollout, segments=(answer,))
