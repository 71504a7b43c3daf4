"""How far generation may run ahead of training: AReaL's admission rule (algorithms B1, EXACT).

A group may start while `accepted + running < (policy_version + max_staleness + 1) * groups_per_step`. Groups
that were dropped, or used up by a step that made no version, count no more, else generation stalls; after a
resume `accepted` is `policy_version * groups_per_step`. With `max_staleness = 0` generation and training take
turns.
"""

from __future__ import annotations

import asyncio

__all__ = ["Admission"]


class Admission:
    """Counts groups and says how many more may start. One event loop owns it."""

    def __init__(self, max_staleness: int, groups_per_step: int, policy_version: int = 0) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._policy_version = policy_version
        self._accepted = policy_version * groups_per_step
        self._running = 0
        self._changed = asyncio.Event()

    def room(self) -> int:
        """Groups that may start now."""
        limit = (self._policy_version + self._max_staleness + 1) * self._groups_per_step
        return max(0, limit - self._accepted - self._running)

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
        """Of the running groups, `accepted` go to training and `dropped` do not."""
        self._running -= accepted + dropped
        self._accepted += accepted
        self._changed.set()

    def discarded(self, groups: int) -> None:
        """Of the accepted groups, `groups` were used up without making a version (a skipped step)."""
        self._accepted -= groups
        self._changed.set()

    def stepped(self, policy_version: int) -> None:
        """The trainer made `policy_version`."""
        self._policy_version = policy_version
        self._changed.set()
