"""The engine is kept at the trainer's weights: new ones go in, a probe proves that it computes with them
(D7), and one of the two has the device.

The probe compares log-probabilities of fixed tokens, the engine's against the trainer's. vLLM, which patches
packed weights in another process, is probed at every version; the embedded engine, which copies tensors, as
often as there are checkpoints (the probe takes 7 ms, a step of the demo 90). A failed probe loads everything
anew. When that does not help, `not_sharing` says so: the node shares nothing any more, and trains on alone,
because its rollouts carry the log-probabilities of what really sampled them, which is what importance weights
need. An engine whose numbers are not finite ends the node. Not for deltas to peers (`publish.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from node.compute import Lane
from node.events import NoticeLevel
from node.rollout.engine.base import Engine, EngineError
from node.rollout.engine.parity import PROBE_PROMPTS, ParityError, ParityProbe, make_probe, parity
from node.runtime import Runtime
from node.supervise import StageGauge
from node.train.evaluate import HeldOut
from node.train.step import Trainer
from node.weights.chain.bf16 import rounded
from node.weights.publish import VersionPublisher

__all__ = ["EngineSync", "SyncSettings"]

_Taken = tuple[dict[str, Tensor], list[NDArray[np.float32]] | None]
"""Weights, and the trainer's log-probabilities on the probe where the engine is to be probed."""


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How the engine is kept at the trainer's weights."""

    tolerance: float
    """Nats by which its log-probabilities may differ from the trainer's on the probe."""
    probe_every: int
    """Versions between two probes of an engine that does not ask for one at each."""
    sequential: bool
    """Engine and trainer take turns on one device."""


class EngineSync:
    """Keeps `engine` at the weights of `trainer`, probed with prompts of `held_out`. What the engine computes
    with is offered to `publisher`, None for a node without a network."""

    def __init__(
        self,
        runtime: Runtime,
        trainer: Trainer,
        engine: Engine,
        held_out: HeldOut,
        publisher: VersionPublisher | None,
        settings: SyncSettings,
    ) -> None:
        self.engine = engine
        self.gauge = (
            publisher.gauge
            if publisher is not None
            else StageGauge("broadcast", runtime.clock, "a new version")
        )
        self.awake = asyncio.Event()
        """Set while the engine may generate."""
        self.awake.set()
        self.not_sharing = ""
        """Why this node must not share, once the engine has failed its probe for good."""
        self._runtime = runtime
        self._trainer = trainer
        self._held_out = held_out
        self._publisher = publisher
        self._settings = settings
        self._probe_every = 1 if engine.probe_each else settings.probe_every
        self._probe: ParityProbe | None = None
        self._taken: _Taken | None = None
        """What the next update sends, where it had to be taken beforehand."""

    async def update(self, policy_version: int, *, anchor: bool = False) -> None:
        """Give the engine the trainer's weights, as this version, and offer them to be published. Raises
        EngineError when the engine cannot go on."""
        with self.gauge.working():
            try:
                reloaded, state = await self._runtime.run(Lane.TRAIN, self._update, policy_version)
            except ParityError as error:
                self.not_sharing = str(error)
                self._runtime.notice(
                    NoticeLevel.ERROR, f"{error}, with all weights loaded anew; this node trains on alone"
                )
                return
        if reloaded:
            text = f"the engine failed its probe at version {policy_version} and passed it once loaded anew"
            self._runtime.notice(NoticeLevel.WARNING, text)
        if self._publisher is not None and not self.not_sharing:
            self._publisher.offer(policy_version, state, anchor=anchor)

    async def replace(self, change: Callable[[], None] | None, *, anchor: bool) -> None:
        """Let `change` give the trainer another version, beside a step, and bring it here like one; None: it
        has it already. Raises EngineError when the engine cannot go on."""
        async with self._turn():
            if change is not None:
                await self._runtime.run(Lane.TRAIN, change)
            self._taken = await self._runtime.run(Lane.TRAIN, self._take, always=True)
        await self.update(self._trainer.policy_version, anchor=anchor)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """The device without the engine, where they take turns."""
        async with self._turn():
            yield
            if self._settings.sequential:
                # While the engine sleeps: both sets of weights may not fit side by side.
                self._taken = await self._runtime.run(Lane.TRAIN, self._take)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if not self._settings.sequential:
            yield
            return
        self.awake.clear()
        try:
            await self._runtime.run(Lane.TRAIN, self.engine.sleep)
            yield
        finally:
            await self._runtime.run(Lane.TRAIN, self.engine.wake)
            self.awake.set()

    def _update(self, policy_version: int) -> tuple[bool, dict[str, Tensor]]:
        """Whether everything had to be loaded anew, and the weights. Blocking. Raises ParityError for an
        engine that can at least go on."""
        (state, reference), self._taken = self._taken or self._take(), None
        if self._probe is None or reference is None:
            self.engine.update(state, policy_version)
            return False, state
        probe = self._probe
        try:
            _, reloaded = probe.update(self.engine, state, policy_version, reference)
        except ParityError as error:
            if math.isfinite(parity(self.engine, reference, probe.sequences)):
                raise
            raise EngineError(f"{error}, and not all is finite; load an earlier checkpoint") from error
        return reloaded, state

    def _take(self, *, always: bool = False) -> _Taken:
        """The trainer's weights, and its log-probabilities on the probe when this version is to be probed:
        `always`, or its turn has come. Blocking."""
        state = self._trainer.state_dict()
        if self.engine.dtype == "bfloat16":
            state = rounded(state)  # once, for the engine and for what is published
        if self.not_sharing or (not always and self._trainer.policy_version % self._probe_every):
            return state, None
        self._probe = self._probe or self._make_probe()
        return state, self._trainer.logprobs(self._probe.sequences)

    def _make_probe(self) -> ParityProbe:
        policy = self._trainer.policy
        prompts = [
            policy.encode_prompt(prompt.text, prompt.environment)
            for prompt in self._held_out.prompts()[:PROBE_PROMPTS]
        ]
        return make_probe(prompts, policy.vocab_size, self.engine.context, self._settings.tolerance)
