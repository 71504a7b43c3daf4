"""Scoring of this node's own completions, by the task host, like everybody's.

A policy that was trained on strangers' texts writes what they wrote, so its answers are no safer than theirs.
Peers' groups are scored by `node/verify/reward.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from node.environment.host import Answers, HostFailure, ScoredGroup, TaskHost
from node.environment.records import Completion, Prompt
from node.transport.limits import FirstTimes
from protocol.messages import FinishReason, Rollout

__all__ = ["OwnScorer", "answers_of"]


def answers_of(prompt: Prompt, rollouts: Sequence[Rollout]) -> Answers:
    """What the environment scores of `rollouts`."""
    completions = (Completion(text=r.text, finished=r.finish is FinishReason.STOP) for r in rollouts)
    return Answers(prompt.environment, prompt.seed, tuple(completions))


class OwnScorer:
    """Rewards of own completions. Blocking and thread-safe."""

    def __init__(self, host: TaskHost) -> None:
        self._host = host
        self._first_times = FirstTimes()
        self._faults: deque[str] = deque(maxlen=64)

    def score(self, groups: Sequence[Answers]) -> Sequence[ScoredGroup | HostFailure]:
        """The scores of each group, or why it has none."""
        made = self._host.score(groups)
        for group, each in zip(groups, made, strict=True):
            if isinstance(each, ScoredGroup) and each.fault:
                self._note(f"{group.environment} cannot score an answer: {each.fault}; it counts as wrong")
        return made

    def rewards(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[tuple[float, ...]]:
        """The rewards of some completions of each prompt, zeros where it has none (held-out evaluation)."""
        groups = [
            Answers(prompt.environment, prompt.seed, tuple(each))
            for prompt, each in zip(prompts, completions, strict=True)
        ]
        rewards = []
        for group, each in zip(groups, self.score(groups), strict=True):
            if isinstance(each, HostFailure):
                said = f"{each.reason}: {each.detail}"
                self._note(f"{group.environment} gave no score of an answer ({said}); it counts as wrong")
                rewards.append((0.0,) * len(group.completions))
            else:
                rewards.append(each.rewards)
        return rewards

    def _note(self, fault: str) -> None:
        if self._first_times.is_new(fault):
            self._faults.append(fault)

    def take_faults(self) -> list[str]:
        """What tasks did that they must not, each kind once; empty the second time."""
        return [self._faults.popleft() for _ in range(len(self._faults))]
