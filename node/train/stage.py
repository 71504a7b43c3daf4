"""The train stage: a batch -> one optimiser step -> new version, and what belongs between two steps.

    draw --batch--> step --report--> StepDone
                     then, when it is time: merge, probe, evaluation, checkpoint

One loop. `WeightStage.draw` gives the batch, `Stepper` makes the step and brings the new weights to the
engine; all of that work runs beside the loop. A step may come back rolled back (`supervisor.py`): then its
log-probabilities are forgotten. What was adopted or undone between steps is saved at once, because the
moments of an older checkpoint do not fit its weights.
"""

from __future__ import annotations

import asyncio

from node.config import NodeConfig
from node.events import NoticeLevel, RolledBack
from node.runtime import Runtime
from node.supervise import StageGauge
from node.train.checkpoints import Checkpoints
from node.train.evaluate import Evaluator
from node.train.report import finite, step_done
from node.train.stability import RollBack
from node.train.stepper import Stepper
from node.weight.stage import WeightStage

__all__ = ["TrainStage"]


class TrainStage:
    """Trains until the configured steps are made; then evaluates and sets `finished`."""

    def __init__(
        self,
        runtime: Runtime,
        config: NodeConfig,
        weight: WeightStage,
        stepper: Stepper,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
    ) -> None:
        self.finished = asyncio.Event()
        """Set once all steps are done and evaluated."""
        self.gauge = StageGauge("train", runtime.clock, "a batch")
        self._runtime = runtime
        self._config = config
        self._weight = weight
        self._stepper = stepper
        self._evaluator = evaluator
        self._checkpoints = checkpoints

    async def run(self) -> None:
        """All steps of this run. Raises UnstableError, with the good weights saved, after one roll-back too
        many in a row, and EngineError."""
        train, evaluate = self._config.train, self._config.evaluate
        await self._evaluate("before")
        await self._probe(0)
        for step in range(1, train.steps + 1):
            await self._step()
            await self._merge()
            await self._probe(step)
            await self._checkpoints.keep_recent()
            if step < train.steps and step % evaluate.every == 0:
                await self._evaluate("during")
            if step % train.checkpoint_every == 0 or step == train.steps:
                await self._save()
        await self._evaluate("after")
        self.finished.set()

    async def _step(self) -> None:
        began_s = self._runtime.monotonic_s()
        version = self._stepper.policy_version
        with self.gauge.waiting("a batch"):
            batch = await self._weight.draw(version, wait=self._stepper.sharing)
        waited_s = self._runtime.monotonic_s() - began_s
        with self.gauge.working():
            report = await self._stepper.step(batch)
        if not report.skipped:
            with self.gauge.waiting("broadcast"):
                await self._stepper.hand_over()
        else:
            text = "a step was not finite and left the weights untouched"
            self._runtime.notice(NoticeLevel.WARNING, text)
        undone = report.rolled_back
        self._weight.stepped(batch, report.logprobs_BT if not report.skipped and undone is None else None)
        event = step_done(
            report,
            batch,
            version,
            at=self._runtime.now_ms(),
            merged_version=self._stepper.merged_version,
            pool=self._weight.pool_size,
            wait_s=waited_s,
        )
        self._runtime.emit(event)
        if undone is not None:
            await self._tell(undone)

    async def _merge(self) -> None:
        with self.gauge.working():
            adopted = await self._stepper.merge()
        if adopted:
            await self._save()

    async def _probe(self, step: int) -> None:
        """Look whether the weights have become worse, when it is time to."""
        supervise = self._config.supervise
        if not self._stepper.probes or not supervise.probe_every or step % supervise.probe_every:
            return
        with self.gauge.working():
            rewards = await self._evaluator.rewards(supervise.probe_prompts)
            undone = await self._stepper.probe(rewards)
        if undone is not None:
            await self._save()
            await self._tell(undone)

    async def _tell(self, undone: RollBack) -> None:
        """Say what was rolled back; save and raise where it was one roll-back too many in a row."""
        self._runtime.notice(NoticeLevel.WARNING, undone.text)
        event = RolledBack(
            at=self._runtime.now_ms(),
            sign=undone.alarm.sign.value,
            value=undone.alarm.value,
            limit=undone.alarm.limit,
            bad_version=undone.bad_version,
            good_version=undone.good_version,
            policy_version=undone.policy_version,
            total=undone.total,
            why=undone.text,
        )
        self._runtime.emit(finite(event))
        if undone.error is not None:
            await self._save()
            raise undone.error

    async def _evaluate(self, moment: str) -> None:
        with self.gauge.working():
            await self._evaluator.evaluate(moment)

    async def _save(self) -> None:
        with self.gauge.working():
            await self._checkpoints.save()
