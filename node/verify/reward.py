"""What the completions are worth here: scored again, in the sandbox, on the derived prompt.

Claimed rewards are compared and then forgotten. Scoring is exact and deterministic on every machine, so a
claim that differs by more than rounding is a lie (`false_reward`), however small. A scorer's failure is
`scorer_<reason>`; it blames the author only where the answers, not this machine, broke the scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from node.environment.host import HostFailure, TaskHost
from node.environment.records import Prompt
from node.rollout.scoring import answers_of
from node.verify.base import ACCEPT, Item, Verdict, reject, same_values

__all__ = ["Reward"]

ROUNDING = 1e-6


class Reward:
    """Re-execution of the rewards. Hard. Its verdict carries this node's own rewards."""

    name = "reward"

    def __init__(self, item_at: Callable[[int], Prompt], host: TaskHost) -> None:
        self._item_at = item_at
        self._host = host

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        prompt = self._item_at(item.group.prompt.index)
        (outcome,) = self._host.score([answers_of(prompt, item.group.rollouts)], strangers=True)
        if isinstance(outcome, HostFailure):
            return reject(f"scorer_{outcome.reason}", blames_author=outcome.reason.is_authors_fault)
        rewards = outcome.rewards
        if not same_values(rewards, item.announcement.rewards, ROUNDING):
            return replace(reject("false_reward"), rewards=rewards)
        return replace(ACCEPT, rewards=rewards)
