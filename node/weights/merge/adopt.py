"""A merge meets this node's training: it is judged between two steps, and adopted or not.

    Merger.take --> rewards with the own weights, v --> engine with the merged ones, v + 1 --> rewards again
                                                                                                     |
       adopted: the trainer becomes v + 1, with the merged weights and an optimiser as new  <-- judge (gate)
       else:    the trainer becomes v + 2, as it is; the engine gets its weights back

No version number ever means two policies, also for the rollouts that the engine goes on generating during the
probe: v + 1 are the merged weights, published or not. Either way the trainer's weights reach the engine as
after a step, and are probed (`EngineBroadcast.replace`). Training stands still meanwhile: this is a stage's
call, not a loop. Not for making merges (`merger.py`) nor for the statistics (`merge_gate.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import EventBus, MergeJudged, NoticeLevel
from node.rollout.engine.base import Engine, EngineError
from node.train.step import Trainer
from node.weights.chain.bf16 import to_tensors
from node.weights.engine_sync import EngineBroadcast
from node.weights.merge.gate import Judgement, judge
from node.weights.merge.merger import Merge

__all__ = ["MergeAdoption"]


class MergeAdoption:
    """Judges what `take()` gives by `rewards()`, those of the same held-out prompts at every call, which may
    block. `notice(level, text)` tells the operator."""

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        broadcast: EngineBroadcast,
        *,
        take: Callable[[], Merge | None],
        rewards: Callable[[], Sequence[float]],
        confidence: float,
        tolerance: float,
        compute: Compute,
        clock: Clock,
        bus: EventBus,
        notice: Callable[[NoticeLevel, str], None],
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._broadcast = broadcast
        self._take = take
        self._rewards = rewards
        self._confidence = confidence
        self._tolerance = tolerance
        self._compute = compute
        self._clock = clock
        self._bus = bus
        self._notice = notice

    async def next(self) -> bool:
        """Whether a merge was ready and the trainer has adopted it. Not while a step runs. Raises EngineError
        when the engine cannot go on."""
        merge = self._take() if not self._broadcast.not_sharing else None
        if merge is None:
            return False
        began_s = self._clock.monotonic_s()
        version = self._trainer.policy_version
        weights = to_tensors(merge.bits)
        judgement = await self._probe(weights, version + 1)
        if judgement.adopted:
            change = functools.partial(self._trainer.adopt, weights, version + 1)
        else:
            change = functools.partial(self._keep, version + 2)
        await self._broadcast.replace(change, anchor=judgement.adopted)
        if judgement.prompts:
            self._notice(NoticeLevel.INFO, f"a merge of {len(merge.used)} trainers was {judgement.why}")
        self._bus.emit(
            MergeJudged(
                at=self._clock.now_ms(),
                policy_version=self._trainer.policy_version,
                adopted=judgement.adopted,
                prompts=judgement.prompts,
                gain=judgement.gain,
                lower_bound=judgement.lower_bound if math.isfinite(judgement.lower_bound) else 0.0,
                contributions=merge.contributions,
                authors=tuple(used.author for used in merge.used),
                why=judgement.why,
                judge_s=self._clock.monotonic_s() - began_s,
            )
        )
        return judgement.adopted

    def _keep(self, policy_version: int) -> None:
        self._trainer.policy_version = policy_version

    async def _probe(self, weights: dict[str, Tensor], policy_version: int) -> Judgement:
        """Leaves the engine with `weights`, or with nobody knows what when it failed."""
        try:
            before = await self._compute.run(Lane.EVALUATE, self._rewards)
            await self._compute.run(Lane.TRAIN, self._engine.update, weights, policy_version)
            after = await self._compute.run(Lane.EVALUATE, self._rewards)
        except EngineError as error:
            self._notice(
                NoticeLevel.WARNING, f"a merge was not adopted, the engine failed when it was judged: {error}"
            )
            return Judgement(False, 0, 0.0, -math.inf, f"not adopted: {error}")
        return judge(before, after, confidence=self._confidence, tolerance=self._tolerance)
