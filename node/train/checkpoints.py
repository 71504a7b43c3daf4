"""When a trainer is saved: a checkpoint of each version once, older ones removed; and what a kill must not
take (`recent.py`) after every step; of a policy whose state is large (EACH_STEP_BYTES), as often as that
costs RECENT_SHARE of the time.

Not for what a checkpoint holds (`checkpoint.py`).
"""

from __future__ import annotations

import math

from node.compute import Lane
from node.config import NodeConfig
from node.durable import LeftOut
from node.events import NoticeLevel
from node.runtime import Runtime
from node.state.paths import Home
from node.train.checkpoint import checkpoints_of, prune, read_state, save_checkpoint
from node.train.recent import MAX_BYTES, save_recent, state_bytes
from node.train.step import Trainer
from protocol.errors import OurFault

__all__ = ["Checkpoints"]

EACH_STEP_BYTES = 64 * 2**20
"""State that is written in milliseconds, however short the steps are."""
RECENT_SHARE = 0.1
KEPT = 2
"""Newest checkpoints that are kept; older ones are removed."""


class Checkpoints:
    """Saves `trainer` under the home of `config`."""

    def __init__(self, runtime: Runtime, config: NodeConfig, trainer: Trainer) -> None:
        self._runtime = runtime
        self._trainer = trainer
        run_dir = Home(config.home).run(config.run)
        self._folder = run_dir.checkpoints
        kept = checkpoints_of(self._folder, trainer.policy.base_model)
        self.saved_version = read_state(kept[0]).policy_version if kept else 0
        """Version of the newest checkpoint; 0 before the first."""
        size = state_bytes(trainer)
        self._recent = run_dir.recent if size <= MAX_BYTES else None
        self._recent_share = 1.0 if size <= EACH_STEP_BYTES else RECENT_SHARE
        self._next_recent_s = -math.inf
        self._saving = LeftOut(runtime, "checkpoints")
        self._keeping = LeftOut(runtime, "the last step")
        self._not_saved = ""

    async def start(self) -> None:
        """Say where this run goes on."""
        if version := self._trainer.policy_version:
            where = "the checkpoint of" if version == self.saved_version else "the last step, which made"
            text = f"goes on from {where} version {version}"
            self._runtime.notice(NoticeLevel.INFO, text)

    async def save(self) -> None:
        """A checkpoint of a version that has none. A full disk costs that, not the run."""
        self._not_saved = ""
        try:
            await self._runtime.run(Lane.TRAIN, self._write)
        except OSError as error:
            self._not_saved = f"version {self._trainer.policy_version} was not saved: {error}"
            self._saving.failed(self._not_saved)
        else:
            self._saving.worked()

    async def save_last(self) -> None:
        """As `save`, when the run ends. Raises OurFault where that was not possible: the command says so."""
        await self.save()
        if self._not_saved:
            raise OurFault(
                f"{self._not_saved}; a run of the same name goes on from version {self.saved_version}"
            )

    async def keep_recent(self) -> None:
        """A step is done: keep what it has led to."""
        began_s = self._runtime.monotonic_s()
        if self._recent is None or began_s < self._next_recent_s:
            return
        try:
            await self._runtime.run(Lane.DISK, save_recent, self._trainer, self._recent)
        except OSError as error:
            self._keeping.failed(f"a kill would now cost more than a step: {error}")
        else:
            self._keeping.worked()
        took_s = self._runtime.monotonic_s() - began_s
        self._next_recent_s = began_s + took_s / self._recent_share

    def _write(self) -> None:
        trainer = self._trainer
        if trainer.policy_version != self.saved_version:
            save_checkpoint(trainer, self._folder / f"v{trainer.policy_version}")
            prune(self._folder, trainer.policy.base_model, KEPT)
            self.saved_version = trainer.policy_version
