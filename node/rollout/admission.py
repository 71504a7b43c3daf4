"""How far generation may run ahead of training: in groups by AReaL's rule (algorithms B1, EXACT), in tokens
by a budget for each step (C3PO++).

A group may start while fewer than `(max_staleness + 1) * groups_per_step` are outstanding: running, or
complete and not used by a step that has ended. AReaL counts from the start of a run: with N groups admitted
so far and B to a step, the next may start when N < (version + eta + 1) * B. Where each version was made of B
groups, N - version * B are outstanding, so both rules are the same; where a step took fewer, AReaL's would
let more and more groups wait. Groups are used in the order of their completion and a step takes B of them, or
all there are; so from its completion on, a group waits for at most `max_staleness` versions. With
`max_staleness = 0` generation and training take turns.

Once `token_budget` tokens were sampled since the last step, generation `holds` until the next one has ended,
and that step takes the groups that are complete.
"""

from __future__ import annotations

import asyncio

__all__ = ["Admission"]


class Admission:
    """Counts groups and tokens, and says how many more there may be. One event loop owns it."""

    def __init__(self, max_staleness: int, groups_per_step: int, token_budget: int = 0) -> None:
        self.groups_per_step = groups_per_step
        self._limit = (max_staleness + 1) * groups_per_step
        self._running = 0
        self.complete = 0
        """Groups that the next steps have, those that a running step uses included."""
        self._token_budget = token_budget
        self._tokens = 0
        self._changed = asyncio.Event()
        self.held = asyncio.Event()
        """Set while generation holds: no more groups will be complete before the next step."""

    def room(self) -> int:
        """Groups that may start now."""
        return max(0, self._limit - self._running - self.complete)

    async def wait(self) -> int:
        """Wait until at least one group may start; how many may."""
        while not self.room():
            self._changed.clear()
            await self._changed.wait()
        return self.room()

    def started(self, groups: int) -> None:
        """`groups` began to generate."""
        self._running += groups

    def finished(self, *, accepted: int, dropped: int = 0) -> None:
        """So many of the running groups are complete: `accepted` go to training, `dropped` do not."""
        self._running -= accepted + dropped
        self.complete += accepted
        self._changed.set()

    def drop_running(self) -> None:
        """Generation has ended: none of the running groups will be complete."""
        self.finished(accepted=0, dropped=self._running)

    def sampled(self, tokens: int) -> None:
        """So many tokens more."""
        self._tokens += tokens

    def tokens_left(self) -> int | None:
        """What may be sampled before the next step has ended; None without a budget."""
        return max(0, self._token_budget - self._tokens) if self._token_budget else None

    async def hold(self) -> None:
        """Wait for the end of the next step, which is told that no more groups will come."""
        self.held.set()
        while not self.tokens_left():
            self._changed.clear()
            await self._changed.wait()

    def used(self, groups: int) -> None:
        """A step has ended that used `groups` complete ones, whether it made a version or not."""
        self.complete -= groups
        self._tokens = 0
        self.held.clear()
        self._changed.set()
