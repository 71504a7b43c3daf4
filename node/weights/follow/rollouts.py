"""A follower's own rollouts: generated with one owner's weights after the other's, published, not trained on.

Each version gets room for as many groups as admission allows, and no more: a follower does not hear what its
owner trains on, but what it made for one version is used up or too old once the next ones are there. Not for
which owner is followed (`follower.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.rollout.admission import Admission
from node.rollout.generate import Generator
from node.rollout.stage import RolloutStage
from node.share.accepted import Accepted
from protocol.messages import Lineage

__all__ = ["FollowerRollouts"]


class FollowerRollouts:
    """Runs `stage` for whichever lineage is followed; `generator` makes what generates for it."""

    def __init__(
        self,
        stage: RolloutStage,
        admission: Admission,
        made: asyncio.Queue[Accepted],
        generator: Callable[[Lineage], Generator],
    ) -> None:
        self._stage = stage
        self._admission = admission
        self._made = made
        self._generator = generator

    async def run(self) -> None:
        """Let go of own groups until cancelled: they are published as they are made, and nobody trains on
        them here."""
        while True:
            await self._made.get()

    async def generate(self, lineage: Lineage, ready: asyncio.Event) -> None:
        """Generate for this lineage until cancelled, once `ready` is set: the engine has its weights then."""
        with self._stage.gauge.waiting("the first version"):
            await ready.wait()
        await self._stage.run(self._generator(lineage))

    def version_reached(self) -> None:
        """The engine has a new version: there is room for more groups."""
        self._admission.used(self._admission.complete)
