"""The rollout stage: admission -> prompts -> engine -> environment -> training and peers.

Two loops. One keeps rollouts under way on a `Generation`, the other scores each group as it is complete and
hands it on, so that a full queue or a slow sandbox does not hold up generation. What a group is made of is
`generate.py`'s; this file decides when. Not for choosing what is trained on, nor for peers' groups.

With `max_in_flight`, long rollouts do not hold up short ones (CoPRIS, APRIL): groups start while fewer than
`max_in_flight` rollouts are under way and admission has room, come out as they are complete, and the rest
goes on over weight updates with its tokens and log-probabilities. A group starts whole, so there may be up to
its size less one more than that. Without it generation is synchronous: a batch of at most one step's groups
is run to its end and handed on before the next begins. Prompts of a window that has not begun are not waited
for while anything is under way. When the tokens of a step are spent (C3PO++), nothing is sampled until that
step has ended, unless there is no complete group that it could take: then generation goes on to the first.

A group belongs to the window that its slot was drawn in, however long it takes. One that peers would refuse
for its age when it is complete is not announced, but counted and told once; this node trains on it all the
same, as admission bounds its lag by `max_staleness` from its completion on. Groups complete in no order: a
peer that hears of a slot before an earlier one takes the earlier one for skipped until its announcement
comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from node.compute import Lane
from node.events import GroupJudged, NoticeLevel, inert
from node.rollout.admission import Admission
from node.rollout.engine.base import Generation, GenerationRequest
from node.rollout.generate import Generator, NoGroupError
from node.rollout.prompts import AssignedPrompt, PromptFeed
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.supervise import StageGauge, run_endless
from protocol.messages import Rollout

__all__ = ["RolloutStage"]

LOOK_TOKENS = 32
"""Tokens of each rollout between two looks for room, while fewer are under way than may be."""
MAX_TOLD = 8
"""Notices about own groups that were dropped or not shared, in one run."""

_Begun = tuple[AssignedPrompt, GenerationRequest]
_Complete = tuple[AssignedPrompt, list[Rollout], float]
"""A group that is not scored yet, and the seconds of generation that it took."""


class RolloutStage:
    """This node's own groups: into `out` for training, and to peers by `publish(group, body)`. `awake` is set
    while the engine may generate; None: always."""

    def __init__(
        self,
        runtime: Runtime,
        feed: PromptFeed,
        admission: Admission,
        out: asyncio.Queue[Accepted],
        publish: Callable[[Accepted, bytes], Awaitable[None]],
        *,
        max_in_flight: int = 0,
        awake: asyncio.Event | None = None,
    ) -> None:
        self._runtime = runtime
        self._feed = feed
        self._admission = admission
        self._out = out
        self._publish = publish
        self._max_in_flight = max_in_flight
        self._awake = awake
        self.gauge = StageGauge("rollout", runtime.clock, "an owner", out.maxsize, out.qsize)
        self.in_flight = 0
        """Rollouts under way."""
        self.sampled = 0
        """Tokens sampled so far."""
        self.unshared = 0
        """Own groups that were too old for peers when they were complete."""
        self._running: dict[int, AssignedPrompt] = {}
        """By the ticket of the generation."""
        self._drawing: asyncio.Task[AssignedPrompt] | None = None
        self._spent_s = 0.0
        """Seconds of generation since the last group was complete."""
        self._told: set[tuple[str, str]] = set()

    async def run(self, generator: Generator) -> None:
        """Generate with this until cancelled; what is under way then is dropped. May be run again, with
        another generator."""
        complete: asyncio.Queue[_Complete] = asyncio.Queue()  # bounded by admission
        try:
            await run_endless(
                generate=self._generate(generator, complete), finish=self._finish(generator, complete)
            )
        finally:
            self.in_flight, self._spent_s = 0, 0.0
            self._running.clear()
            self._admission.drop_running()

    # --- generation ----------------------------------------------------------------------------------------

    async def _generate(self, generator: Generator, complete: asyncio.Queue[_Complete]) -> None:
        generation = generator.engine.open()
        sampled_before = self.sampled
        try:
            while True:
                if self._admission.tokens_left() == 0:
                    with self.gauge.waiting("scoring and the network"):
                        await complete.join()
                    if self._admission.complete:
                        with self.gauge.waiting("the next version"):
                            await self._admission.hold()
                for each in await self._turn(generator, generation, sampled_before):
                    complete.put_nowait(each)
                if not self._max_in_flight:
                    await complete.join()
        finally:
            generation.close()
            if self._drawing is not None:
                self._drawing.cancel()
                self._drawing = None

    async def _turn(
        self, generator: Generator, generation: Generation, sampled_before: int
    ) -> list[_Complete]:
        """Start what there is room for, then generate until a group is complete or it is time to look."""
        begun = await self._refill(generator)
        if self._awake is not None:
            with self.gauge.waiting("the engine"):
                await self._awake.wait()
        began_s = self._runtime.monotonic_s()
        with self.gauge.working():
            tickets, done = await self._runtime.run(
                Lane.GENERATE, self._advance, generator, generation, begun, self._tokens()
            )
        self._spent_s += self._runtime.monotonic_s() - began_s
        self._running.update(zip(tickets, [assigned for assigned, _ in begun], strict=True))
        sampled = sampled_before + generation.sampled
        self._admission.sampled(sampled - self.sampled)
        self.sampled, self.in_flight = sampled, generation.in_flight
        if not done:
            return []
        each_s, self._spent_s = self._spent_s / len(done), 0.0
        return [(self._running.pop(ticket), rollouts, each_s) for ticket, rollouts in done]

    def _advance(
        self, generator: Generator, generation: Generation, begun: Sequence[_Begun], tokens: int | None
    ) -> tuple[list[int], list[tuple[int, list[Rollout]]]]:
        """Tickets of what begins, and what is complete. Blocking."""
        tickets = generation.start([generator.drafted(*each) for each in begun])
        done: list[tuple[int, list[Rollout]]] = []
        more = True
        while more:  # asked before the last wait, which takes what was complete already
            more = not self._max_in_flight and generation.in_flight > 0
            done += generation.wait(tokens=tokens)
        return tickets, done

    def _tokens(self) -> int | None:
        """How much to sample before the next look."""
        left = self._admission.tokens_left()
        limits = [left] if left else []
        if self.in_flight < self._max_in_flight:
            limits.append(LOOK_TOKENS * self.in_flight)
        return min(limits, default=None)

    async def _refill(self, generator: Generator) -> list[_Begun]:
        """New groups, at least one when nothing is under way."""
        begun: list[_Begun] = []
        most = self._max_in_flight or self._admission.groups_per_step * generator.group_size
        while self.in_flight < most:
            if not self._admission.room():
                if self.in_flight:
                    break
                with self.gauge.waiting("the trainer" if generator.own_lineage else "the next version"):
                    await self._admission.wait()
            assigned = await self._draw(patient=not self.in_flight)
            if assigned is None:
                break
            try:
                request = generator.request(assigned)
            except NoGroupError as error:
                self._tell(assigned, f"dropped: {error}")
                continue
            self._admission.started(1)
            self.in_flight += request.n
            begun.append((assigned, request))
        return begun

    async def _draw(self, *, patient: bool) -> AssignedPrompt | None:
        """The next prompt; None when it belongs to a window to come and `patient` is false."""
        drawing = self._drawing = self._drawing or asyncio.create_task(self._feed.next(self.gauge))
        if patient:
            with self.gauge.waiting("the next window"):
                await asyncio.wait({drawing})
        else:
            await asyncio.sleep(0)  # a prompt of this window is there at once
        if not drawing.done():
            return None
        self._drawing = None
        return drawing.result()

    # --- complete groups -----------------------------------------------------------------------------------

    async def _finish(self, generator: Generator, complete: asyncio.Queue[_Complete]) -> None:
        """Score and hand on: what is complete at once is scored together."""
        while True:
            groups = [await complete.get()]
            while not complete.empty():
                groups.append(complete.get_nowait())
            at_ms = self._runtime.now_ms()
            with self.gauge.working():
                made = await self._runtime.run(Lane.SCORE, generator.complete, groups, at_ms)
            for fault in generator.take_faults():
                self._runtime.notice(NoticeLevel.WARNING, fault)
            for (assigned, _, _), group in zip(groups, made, strict=True):
                if isinstance(group, NoGroupError):
                    self._tell(assigned, f"dropped: {group}")
                    self._admission.finished(accepted=0, dropped=1)
                else:
                    await self._hand_on(generator, assigned, *group)
                complete.task_done()

    async def _hand_on(
        self, generator: Generator, assigned: AssignedPrompt, accepted: Accepted, body: bytes
    ) -> None:
        self._runtime.emit(_judged(accepted, at=self._runtime.now_ms()))
        with self.gauge.waiting("room in queue"):
            await self._out.put(accepted)
        self._admission.finished(accepted=1)
        if generator.too_old(assigned.ref):
            self.unshared += 1
            self._tell(assigned, "not shared: it took longer than peers accept")
        else:
            with self.gauge.waiting("the network"):
                await self._publish(accepted, body)

    def _tell(self, assigned: AssignedPrompt, what: str) -> None:
        """Once per task and reason, until MAX_TOLD."""
        task = assigned.prompt.environment
        if (task, what) not in self._told and len(self._told) < MAX_TOLD:
            self._told.add((task, what))
            self._runtime.notice(NoticeLevel.WARNING, f"an own group on {task} was {what}")


def _judged(accepted: Accepted, *, at: int) -> GroupJudged:
    """The event of an own group."""
    group = accepted.group
    return GroupJudged(
        at=at,
        author=group.author,
        own=True,
        accepted=True,
        reason="",
        group=accepted.digest[:12],
        environment=group.environment,
        window=group.prompt.window,
        slot=group.prompt.slot,
        policy_version=group.policy_version,
        question=inert(group.question),
        completions=tuple(inert(rollout.text, 500) for rollout in group.rollouts),
        rewards=accepted.rewards,
        checks=(),
    )
