"""Own groups on their way from generation to a step: the queue, and what admission is told.

    rollout --queue--> take --> step --> done (admission gives the room back)

Not for peers' groups, which wait in the replay pool (`node/share/pool.py`).
"""

from __future__ import annotations

import asyncio

from node.rollout.admission import Admission
from node.share.accepted import Accepted

__all__ = ["OwnGroups"]


class OwnGroups:
    """Scored own groups in the order of their completion; each is used in one step."""

    def __init__(self, queue: asyncio.Queue[Accepted], admission: Admission) -> None:
        self._queue = queue
        self._admission = admission

    async def take(self, count: int) -> list[Accepted]:
        """The next `count` groups; those that are there, but at least one, while generation holds because the
        step's tokens are spent."""
        taken = [await self._queue.get()]
        while len(taken) < count:
            if self._queue.empty() and self._admission.held.is_set():
                break
            getting = asyncio.create_task(self._queue.get())
            holding = asyncio.create_task(self._admission.held.wait())
            try:
                await asyncio.wait({getting, holding}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                getting.cancel()  # a group that is there stays in the queue
            if getting.done() and not getting.cancelled():
                taken.append(getting.result())
        return taken

    def done(self, count: int) -> None:
        """A step that took `count` groups has ended, whether it made a version or not."""
        self._admission.used(count)
