"""New weights into the engine, the proof that it computes with them (D7), and who has the device.

For: the last stage of a step. `broadcast` copies the trainer's weights into the running engine and probes it:
log-probabilities of fixed tokens, the engine's against the trainer's. vLLM, which patches packed weights in
another process, is probed at every version; the embedded engine, which copies tensors, as often as there are
checkpoints (the probe takes 7 ms, a step of the demo 90). A failed probe loads everything anew and is told.
When that does not help, the engine computes with weights that nobody meant, and `not_sharing` says so: the
node shares nothing in either direction any more, and trains on alone, because its rollouts carry the
log-probabilities of what really sampled them, which is what importance weights need. An engine whose numbers
are not finite is of no use, and ends the node.

`alone` gives a step the device: the engine sleeps meanwhile where both do not fit. `replace` gives the engine
what the trainer got in another way than by a step, and always probes it. Not for deltas to peers: `proven`
hands on the copy of the weights that they are made of (`owner.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from node.compute import Compute, Lane
from node.events import NoticeLevel
from node.rollout.engine.base import Engine, EngineError
from node.rollout.engine.parity import PROBE_PROMPTS, ParityError, ParityProbe, make_probe, parity
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.train.step import Trainer

__all__ = ["EngineBroadcast", "Proven"]


class Proven(Protocol):
    """Takes weights that the engine computes with, to be published; must not block."""

    def __call__(self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool) -> None:
        """`anchor`: they have little in common with the version before, so no delta is worth its bytes."""
        ...


def _unpublished(policy_version: int, state: Mapping[str, Tensor], *, anchor: bool) -> None:
    """For a node without followers."""


class EngineBroadcast:
    """Keeps the engine at the trainer's weights. `prompts` gives real ones for the probe, and may block;
    `probe_every` versions an engine is probed that does not ask for more; `notice(level, text)` tells the
    operator; `proven` gets what the engine computes with."""

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        policy: Policy,
        *,
        prompts: Callable[[], Sequence[str]],
        tolerance: float,
        probe_every: int,
        sequential: bool,
        compute: Compute,
        gauge: StageGauge,
        notice: Callable[[NoticeLevel, str], None],
        proven: Proven = _unpublished,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._policy = policy
        self._prompts = prompts
        self._tolerance = tolerance
        self._probe_every = 1 if engine.probe_each else probe_every
        self._sequential = sequential
        self._compute = compute
        self._gauge = gauge
        self._notice = notice
        self._proven = proven
        self._probe: ParityProbe | None = None
        self._taken: tuple[dict[str, Tensor], list[NDArray[np.float32]] | None] | None = None
        """What the next broadcast sends, where it had to be taken beforehand."""
        self.awake = asyncio.Event()
        """Set while the engine may generate."""
        self.awake.set()
        self.not_sharing = ""
        """Why this node must not share, once the engine has failed its probe for good."""

    async def broadcast(self, policy_version: int, *, anchor: bool = False) -> None:
        """The trainer's weights, as this version; published as an `anchor` only, or as usual. Raises
        EngineError when the engine cannot go on."""
        with self._gauge.working():
            try:
                reloaded, state = await self._compute.run(Lane.TRAIN, self._update, policy_version)
            except ParityError as error:
                self.not_sharing = str(error)
                self._notice(
                    NoticeLevel.ERROR, f"{error}, with all weights loaded anew; this node trains on alone"
                )
                return
        if reloaded:
            text = f"the engine failed its probe at version {policy_version} and passed it once loaded anew"
            self._notice(NoticeLevel.WARNING, text)
        if not self.not_sharing:
            self._proven(policy_version, state, anchor=anchor)

    async def replace(self, change: Callable[[], None] | None, *, anchor: bool) -> None:
        """Let `change` give the trainer another version, beside a step, and bring it here like one; None: it
        has it already. Raises EngineError when the engine cannot go on."""
        async with self._turn():
            if change is not None:
                await self._compute.run(Lane.TRAIN, change)
            self._taken = await self._compute.run(Lane.TRAIN, self._take, always=True)
        await self.broadcast(self._trainer.policy_version, anchor=anchor)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """The device without the engine, where they take turns."""
        async with self._turn():
            yield
            if self._sequential:
                # While the engine sleeps: both sets of weights may not fit side by side.
                self._taken = await self._compute.run(Lane.TRAIN, self._take)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if not self._sequential:
            yield
            return
        self.awake.clear()
        try:
            await self._compute.run(Lane.TRAIN, self._engine.sleep)
            yield
        finally:
            await self._compute.run(Lane.TRAIN, self._engine.wake)
            self.awake.set()

    def _update(self, policy_version: int) -> tuple[bool, dict[str, Tensor]]:
        """Whether everything had to be loaded anew, and the weights. Blocking. Raises ParityError for an
        engine that can at least go on."""
        (state, reference), self._taken = self._taken or self._take(), None
        if self._probe is None or reference is None:
            self._engine.update(state, policy_version)
            return False, state
        probe = self._probe
        try:
            _, reloaded = probe.update(self._engine, state, policy_version, reference)
        except ParityError as error:
            if math.isfinite(parity(self._engine, reference, probe.sequences)):
                raise
            raise EngineError(f"{error}, and not all is finite; load an earlier checkpoint") from error
        return reloaded, state

    def _take(self, *, always: bool = False) -> tuple[dict[str, Tensor], list[NDArray[np.float32]] | None]:
        """The trainer's weights, and its log-probabilities on the probe when this version is to be probed:
        `always`, or its turn has come. Blocking."""
        state = self._trainer.state_dict()
        if self.not_sharing or (not always and self._trainer.policy_version % self._probe_every):
            return state, None
        self._probe = self._probe or self._make_probe()
        return state, self._trainer.logprobs(self._probe.sequences)

    def _make_probe(self) -> ParityProbe:
        policy = self._policy
        prompts = [policy.encode_prompt(prompt) for prompt in self._prompts()[:PROBE_PROMPTS]]
        return make_probe(prompts, policy.vocab_size, self._engine.context, self._tolerance)
