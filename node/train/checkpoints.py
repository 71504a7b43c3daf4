"""When a trainer is saved: a checkpoint of each version once, older ones removed, and the trust in peers.

Not for what a checkpoint holds (`checkpoint.py`).
"""

from __future__ import annotations

from node.compute import Lane
from node.config import NodeConfig
from node.events import NoticeLevel
from node.peers.book import PeerBook
from node.runtime import Runtime
from node.state.paths import Home
from node.train.checkpoint import prune, save_checkpoint
from node.train.step import Trainer

__all__ = ["Checkpoints"]

KEPT = 2
"""Newest checkpoints that are kept; older ones are removed."""


class Checkpoints:
    """Saves `trainer` and the standings of `peers` under the home of `config`."""

    def __init__(self, runtime: Runtime, config: NodeConfig, trainer: Trainer, peers: PeerBook) -> None:
        self.saved_version = trainer.policy_version
        """Version of the newest checkpoint; 0 before the first."""
        self._runtime = runtime
        self._trainer = trainer
        self._peers = peers
        self._folder = Home(config.home).run(config.run).checkpoints
        self._trust_file = Home(config.home).trust

    async def start(self) -> None:
        """Say where this run goes on."""
        if self.saved_version:
            text = f"goes on from the checkpoint of version {self.saved_version}"
            self._runtime.notice(NoticeLevel.INFO, text)

    async def save(self) -> None:
        """A checkpoint of a version that has none, then trust, to disk. A full disk costs that, not the
        run."""
        try:
            await self._runtime.run(Lane.TRAIN, self._write)
        except OSError as error:
            text = f"version {self._trainer.policy_version} was not saved: {error}; make room on the disk"
            self._runtime.notice(NoticeLevel.WARNING, text)
        else:
            await self._peers.save(self._trust_file)

    def _write(self) -> None:
        trainer = self._trainer
        if trainer.policy_version != self.saved_version:
            save_checkpoint(trainer, self._folder / f"v{trainer.policy_version}")
            prune(self._folder, trainer.policy.base_model, KEPT)
            self.saved_version = trainer.policy_version
