"""Who answered which prompt lately, with which rewards: what capability-aware advantages and GRAFT's gate
look up.

Rewards here were all computed on this node. Bounded: the `max_prompts` universe indexes touched last, and of
each the `MAX_AGENTS` agents that answered last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["AnsweredPrompts"]

MAX_AGENTS = 64


class AnsweredPrompts:
    """Universe index -> agent -> rewards of its newest group on that prompt."""

    def __init__(self, max_prompts: int = 4096) -> None:
        self._max_prompts = max_prompts
        self._rewards: OrderedDict[int, dict[str, tuple[float, ...]]] = OrderedDict()

    def add(self, index: int, agent: str, rewards: Sequence[float]) -> None:
        """Remember the newest group of `agent` on the prompt `index`."""
        agents = self._rewards.setdefault(index, {})
        agents.pop(agent, None)
        agents[agent] = tuple(rewards)
        if len(agents) > MAX_AGENTS:
            del agents[next(iter(agents))]
        self._rewards.move_to_end(index)
        while len(self._rewards) > self._max_prompts:
            self._rewards.popitem(last=False)

    def of(self, index: int) -> dict[str, tuple[float, ...]]:
        """Rewards by agent on the prompt `index`, empty when nobody answered it."""
        return dict(self._rewards.get(index, {}))
