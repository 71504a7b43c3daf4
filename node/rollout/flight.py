"""Rollouts in flight: groups start as there is room and come out as they complete (partial rollouts).

For: the rollout stage in its asynchronous form. A fixed number of rollouts is kept under way on one
`Generation`, over weight updates, so that long ones do not hold up short ones (CoPRIS, APRIL). New groups
start while fewer than `max_in_flight` rollouts are under way and admission has room. A group starts whole, so
there may be up to its size less one more than that. Prompts of a window that has not begun are not waited for
while anything is under way. When the tokens of a step are spent (C3PO++), nothing is sampled until that step
has ended, unless there is no complete group that it could take: then generation goes on until there is one.
What is under way is kept with its tokens and log-probabilities, and goes on under the next version. Not for
scoring or handing on: `worker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.clock import Clock
from node.compute import Compute, Lane
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine, Generation, GenerationRequest
from node.rollout.prompts import AssignedPrompt, PromptFeed
from node.supervise import StageGauge
from protocol.messages import Rollout

__all__ = ["Finished", "Flight"]

LOOK_TOKENS = 32
"""Tokens of each rollout between two looks for room, while fewer are under way than may be."""


@dataclass(frozen=True, slots=True)
class Finished:
    """flight -> worker. A complete group that is not scored yet."""

    assigned: AssignedPrompt
    rollouts: list[Rollout]
    generate_s: float
    """Its share of the time since the last group came out."""


@dataclass(frozen=True, slots=True)
class _Begun:
    assigned: AssignedPrompt
    request: GenerationRequest


class Flight:
    """Keeps rollouts under way. `request` makes a group's request, None for a prompt that cannot be answered;
    `drafted` adds what an earlier group left for it, and blocks; `awake` waits while the engine sleeps."""

    def __init__(
        self,
        engine: Engine,
        feed: PromptFeed,
        admission: Admission,
        *,
        max_in_flight: int,
        request: Callable[[AssignedPrompt], GenerationRequest | None],
        drafted: Callable[[AssignedPrompt, GenerationRequest], GenerationRequest],
        awake: Callable[[], Awaitable[object]],
        compute: Compute,
        clock: Clock,
        gauge: StageGauge,
        waits_for: str,
    ) -> None:
        self._engine = engine
        self._feed = feed
        self._admission = admission
        self._max_in_flight = max_in_flight
        self._request = request
        self._drafted = drafted
        self._awake = awake
        self._compute = compute
        self._clock = clock
        self._gauge = gauge
        self._waits_for = waits_for
        self._running: dict[int, AssignedPrompt] = {}
        """By ticket."""
        self._drawing: asyncio.Task[AssignedPrompt] | None = None
        self._spent_s = 0.0
        self.in_flight = 0
        """Rollouts under way."""
        self.sampled = 0
        """Tokens so far."""

    async def run(self, complete: asyncio.Queue[Finished]) -> None:
        """Generate until cancelled; complete groups go into `complete`, which admission bounds."""
        generation = self._engine.open()
        try:
            while True:
                if self._admission.tokens_left() == 0:
                    with self._gauge.waiting("scoring and the network"):
                        await complete.join()
                    if self._admission.complete:
                        with self._gauge.waiting("the next version"):
                            await self._admission.hold()
                for finished in await self._turn(generation):
                    complete.put_nowait(finished)
        finally:
            generation.close()
            if self._drawing is not None:
                self._drawing.cancel()

    async def _turn(self, generation: Generation) -> list[Finished]:
        """Start what there is room for, then generate until a group is complete or it is time to look."""
        begun = await self._refill()
        with self._gauge.waiting("the engine"):
            await self._awake()
        began_s = self._clock.monotonic_s()
        with self._gauge.working():
            done = await self._compute.run(Lane.GENERATE, self._advance, generation, begun, self._tokens())
        self._spent_s += self._clock.monotonic_s() - began_s
        self._admission.sampled(generation.sampled - self.sampled)
        self.sampled, self.in_flight = generation.sampled, generation.in_flight
        if not done:
            return []
        each_s, self._spent_s = self._spent_s / len(done), 0.0
        return [Finished(self._running.pop(ticket), rollouts, each_s) for ticket, rollouts in done]

    def _advance(
        self, generation: Generation, begun: Sequence[_Begun], tokens: int | None
    ) -> list[tuple[int, list[Rollout]]]:
        """Blocking."""
        requests = [self._drafted(each.assigned, each.request) for each in begun]
        for ticket, each in zip(generation.start(requests), begun, strict=True):
            self._running[ticket] = each.assigned
        return generation.wait(tokens=tokens)

    def _tokens(self) -> int | None:
        """How much to sample before the next look."""
        left = self._admission.tokens_left()
        limits = [left] if left else []
        if self.in_flight < self._max_in_flight:
            limits.append(LOOK_TOKENS * self.in_flight)
        return min(limits, default=None)

    async def _refill(self) -> list[_Begun]:
        """New groups, at least one when nothing is under way."""
        begun: list[_Begun] = []
        while self.in_flight < self._max_in_flight:
            if not self._admission.room():
                if self.in_flight:
                    break
                with self._gauge.waiting(self._waits_for):
                    await self._admission.wait()
            assigned = await self._draw(patient=not self.in_flight)
            if assigned is None:
                break
            request = self._request(assigned)
            if request is not None:
                self._admission.started(1)
                self.in_flight += request.n
                begun.append(_Begun(assigned, request))
        return begun

    async def _draw(self, *, patient: bool) -> AssignedPrompt | None:
        """The next prompt; None when it belongs to a window to come and `patient` is false."""
        drawing = self._drawing = self._drawing or asyncio.create_task(self._feed.next())
        if patient:
            with self._gauge.waiting("the next window"):
                await asyncio.wait({drawing})
        else:
            await asyncio.sleep(0)  # a prompt of this window is there at once
        if not drawing.done():
            return None
        self._drawing = None
        return drawing.result()
