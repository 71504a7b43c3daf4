"""A merge meets this node's training: it is judged between two steps, and adopted or not.

    Merger.take --> rewards with the own weights, v --> engine with the merged ones, v + 1 --> rewards again
                                                                                                     |
       adopted: the trainer becomes v + 1, with the merged weights and an optimiser as new  <-- judge (gate)
       else:    the trainer becomes v + 2, as it is; the engine gets its weights back

No version number ever means two policies, also for the rollouts that the engine goes on generating during the
probe: v + 1 are the merged weights, published or not. Either way the trainer's weights reach the engine as
after a step, and are probed (`EngineSync.replace`). Training stands still meanwhile: this is a stage's
call, not a loop. Not for making merges (`merger.py`) nor for the statistics (`node/train/gate.py`).
"""

from __future__ import annotations

import functools
import math

from torch import Tensor

from node.compute import Lane
from node.config import MergeConfig
from node.events import MergeJudged, NoticeLevel
from node.rollout.engine.base import EngineError
from node.runtime import Runtime
from node.train.evaluate import HeldOut
from node.train.gate import GateResult, judge
from node.train.step import Trainer
from node.weights.chain.bf16 import to_tensors
from node.weights.engine_sync import EngineSync
from node.weights.merge.merger import Merger

__all__ = ["MergeAdoption"]


class MergeAdoption:
    """Judges what `merger` has made by the rewards of held-out prompts, the same at every call, and brings it
    to `trainer` and, by `sync`, to the engine."""

    def __init__(
        self,
        runtime: Runtime,
        trainer: Trainer,
        sync: EngineSync,
        merger: Merger,
        held_out: HeldOut,
        settings: MergeConfig,
    ) -> None:
        self._runtime = runtime
        self._trainer = trainer
        self._sync = sync
        self._merger = merger
        self._held_out = held_out
        self._settings = settings

    async def next(self) -> bool:
        """Whether a merge was ready and the trainer has adopted it. Not while a step runs. Raises EngineError
        when the engine cannot go on."""
        merge = self._merger.take() if not self._sync.not_sharing else None
        if merge is None:
            return False
        began_s = self._runtime.monotonic_s()
        version = self._trainer.policy_version
        weights = to_tensors(merge.bits)
        result = await self._probe(weights, version + 1)
        if result.adopted:
            change = functools.partial(self._trainer.adopt, weights, version + 1)
        else:
            change = functools.partial(self._keep, version + 2)
        await self._sync.replace(change, anchor=result.adopted)
        if result.prompts:
            self._runtime.notice(NoticeLevel.INFO, f"a merge of {len(merge.used)} trainers was {result.why}")
        self._runtime.emit(
            MergeJudged(
                at=self._runtime.now_ms(),
                policy_version=self._trainer.policy_version,
                adopted=result.adopted,
                prompts=result.prompts,
                gain=result.gain,
                lower_bound=result.lower_bound if math.isfinite(result.lower_bound) else 0.0,
                contributions=merge.contributions,
                authors=tuple(used.author for used in merge.used),
                why=result.why,
                judge_s=self._runtime.monotonic_s() - began_s,
            )
        )
        return result.adopted

    def _keep(self, policy_version: int) -> None:
        self._trainer.policy_version = policy_version

    async def _probe(self, weights: dict[str, Tensor], policy_version: int) -> GateResult:
        """Leaves the engine with `weights`, or with nobody knows what when it failed."""
        prompts = self._settings.probe_prompts
        try:
            before = await self._runtime.run(Lane.EVALUATE, self._held_out.rewards, prompts)
            await self._runtime.run(Lane.TRAIN, self._sync.engine.update, weights, policy_version)
            after = await self._runtime.run(Lane.EVALUATE, self._held_out.rewards, prompts)
        except EngineError as error:
            self._runtime.notice(
                NoticeLevel.WARNING, f"a merge was not adopted, the engine failed when it was judged: {error}"
            )
            return GateResult(False, 0, 0.0, -math.inf, f"not adopted: {error}")
        return judge(before, after, confidence=self._settings.confidence, tolerance=self._settings.tolerance)
