"""Everything that gives the trainer's weights another version, one at a time, and brings it to the engine.

    batch ---step---> old log-probabilities -> supervisor -> trainer --+
    rewards -probe--> the supervisor takes a decline back -------------+--> engine
    merge ----------> judged on held-out prompts, adopted or not ------+

`open_stepper` composes what surrounds a step as the configuration asks. A step that was bad comes back rolled
back, and the engine gets the good weights. Not for what is trained on (`node/weight`) nor for checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from node.compute import Lane
from node.config import NodeConfig
from node.runtime import Runtime
from node.train.ewma import Ewma
from node.train.objectives import Need
from node.train.old_policy import OldPolicy, Steps
from node.train.snapshots import Snapshots
from node.train.stability import RollBack
from node.train.step import StepReport, Trainer
from node.train.supervisor import KL_ROWS, Supervisor
from node.weight.batch import TrainingBatch

__all__ = ["EngineSync", "Merges", "Stepper", "open_stepper"]


class EngineSync(Protocol):
    """What a stepper asks of whoever keeps the engine at the trainer's weights (`weights/engine_sync.py`)."""

    @property
    def not_sharing(self) -> str:
        """Why this node must not share, "" if it may."""
        ...

    def alone(self) -> AbstractAsyncContextManager[None]:
        """The device without the engine, where they take turns."""
        ...

    async def update(self, policy_version: int) -> None:
        """Give the engine the trainer's weights as this version. Raises EngineError."""
        ...

    async def replace(self, change: Callable[[], None] | None, *, anchor: bool) -> None:
        """The same for weights that no step led to. Raises EngineError."""
        ...


class Merges(Protocol):
    """Merges that are ready to be judged (`weights/merge/adopt.py`)."""

    async def next(self) -> bool:
        """Whether the trainer has adopted one."""
        ...


class Stepper:
    """Steps `trainer` and keeps the engine beside it. `merges` may be set later, before the first step."""

    def __init__(
        self,
        runtime: Runtime,
        trainer: Trainer,
        engine: EngineSync,
        steps: Steps | None = None,
        supervisor: Supervisor | None = None,
        merges: Merges | None = None,
    ) -> None:
        """`steps` is the trainer, or what surrounds it; `supervisor` judges probes."""
        self.merges = merges
        self.merged_version = 0
        """Version of the last merge that was adopted in this run."""
        self._runtime = runtime
        self._trainer = trainer
        self._engine = engine
        self._steps: Steps = steps or trainer
        self._supervisor = supervisor

    @property
    def policy_version(self) -> int:
        """Version of the trainer's weights."""
        return self._trainer.policy_version

    @property
    def probes(self) -> bool:
        """Whether a decline on held-out prompts would be taken back."""
        return self._supervisor is not None

    @property
    def sharing(self) -> bool:
        """Whether this node may share rollouts and weights."""
        return not self._engine.not_sharing

    async def step(self, batch: TrainingBatch) -> StepReport:
        """Train on `batch` once, alone on the device. Raises what `Trainer.step` raises."""
        async with self._engine.alone():
            return await self._runtime.run(Lane.TRAIN, self._steps.step, batch)

    async def hand_over(self) -> None:
        """Bring the weights that a step has made to the engine. Raises EngineError."""
        await self._engine.update(self._trainer.policy_version)

    async def probe(self, rewards: Sequence[float]) -> RollBack | None:
        """What was undone because the engine, with the trainer's weights, answered held-out prompts with
        these rewards, worse than earlier ones. The engine has the earlier weights then."""
        if self._supervisor is None:
            return None
        undone = await self._runtime.run(Lane.TRAIN, self._supervisor.probe, rewards)
        if undone is not None:
            await self._engine.replace(None, anchor=False)
        return undone

    async def merge(self) -> bool:
        """Whether a merge was ready and was adopted."""
        if self.merges is None or not await self.merges.next():
            return False
        self.merged_version = self._trainer.policy_version
        return True


def open_stepper(runtime: Runtime, config: NodeConfig, trainer: Trainer, engine: EngineSync) -> Stepper:
    """The trainer with what the configuration puts around it. Copies of weights are made here. Raises
    ConfigError when no snapshot of them fits."""
    supervisor = _supervisor(config, trainer)
    steps: Steps = supervisor or trainer
    needs = trainer.settings.needs & {Need.SNAPSHOT, Need.EWMA}
    if needs:
        train = config.train
        steps = OldPolicy(
            trainer,
            steps,
            snapshots=Snapshots(versions=train.snapshots, max_bytes=train.snapshot_bytes or sys.maxsize)
            if Need.SNAPSHOT in needs
            else None,
            ewma=Ewma(trainer.learning(), beta=train.ewma_beta, device="cpu") if Need.EWMA in needs else None,
        )
    return Stepper(runtime, trainer, engine, steps, supervisor)


def _supervisor(config: NodeConfig, trainer: Trainer) -> Supervisor | None:
    supervise = config.supervise
    if supervise.enabled is not True:  # "auto" is for the memory plan to decide
        return None
    # Taking turns, a look at the rollouts after a step would bring the weights to the device once more.
    kl_rows = 0 if config.policy.sharing == "sequential" else KL_ROWS
    return Supervisor(trainer, supervise, kl_rows=kl_rows)
