"""Scoring of this node's own completions: in process where the text is only compared, else in the sandbox.

A scorer that evaluates the answer is dangerous whoever wrote the answer (a policy trained on strangers' texts
writes what they wrote), so those environments go to the sandbox. For the others a fork per group would cost
more than the generation of a tiny policy. Peers' completions never come here: `node/verify/reward.py` always
uses the sandbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from node.environment.guard import guarded_score
from node.environment.tasks import Completion, Environment, Prompt
from node.sandbox.scorer import ScoredGroup, ScoreFailure, Scorer
from node.transport.limits import FirstTimes
from protocol.messages import FinishReason, Rollout

__all__ = ["OwnScorer", "completions_of"]


def completions_of(rollouts: Sequence[Rollout]) -> list[Completion]:
    """What the environment scores of `rollouts`."""
    return [Completion(text=r.text, finished=r.finish is FinishReason.STOP) for r in rollouts]


class OwnScorer:
    """Rewards of own completions. Blocking and thread-safe."""

    def __init__(self, environments: Mapping[str, Environment], sandbox: Scorer) -> None:
        self._environments = environments
        self._sandbox = sandbox
        self._first_times = FirstTimes()
        self._faults: deque[str] = deque(maxlen=64)

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[float, ...] | ScoreFailure:
        """One reward per completion, or why there are none."""
        environment = self._environments[prompt.environment]
        if not environment.evaluates_answers:
            return tuple(self._scored(environment, prompt, completion) for completion in completions)
        result = self._sandbox.score(prompt.environment, prompt.seed, prompt.index, completions)
        return tuple(score.reward for score in result.scores) if isinstance(result, ScoredGroup) else result

    def _scored(self, environment: Environment, prompt: Prompt, completion: Completion) -> float:
        score, fault = guarded_score(environment, prompt, completion)
        if fault and self._first_times.is_new((environment.name, fault)):
            self._faults.append(f"{environment.name} cannot score an answer: {fault}; it counts as wrong")
        return score.reward

    def take_faults(self) -> list[str]:
        """What tasks did that they must not, each kind once; empty the second time."""
        return [self._faults.popleft() for _ in range(len(self._faults))]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of one completion; 0.0 where it could not be scored (held-out evaluation)."""
        result = self.rewards(prompt, [completion])
        return 0.0 if isinstance(result, ScoreFailure) else result[0]
