"""The rollout stage: admission -> prompts -> engine -> environment -> own queue and publisher.

Synchronous, with `max_in_flight` 0: one loop; each turn takes as many slots as admission allows (at most one
step's worth), generates their groups in one batch to its end, scores them, and hands them on. Else partial:
`flight.py` keeps rollouts under way, and a second loop scores and hands on each group as it completes, so
that a full queue or a slow sandbox does not hold up generation. `make_group` is the stage's work as a plain
function. Not for choosing what is trained on, nor for peers' groups.

A group belongs to the window that its slot was drawn in, however long it takes. One that peers would refuse
for its age when it is complete is not announced, but counted and told once; this node trains on it all the
same. No own group is too old for training: its `policy_version` is the newest of its tokens', from its
completion on admission bounds its lag by `max_staleness`, and older tokens carry the log-probabilities that
they were sampled with. Groups complete in no order: a peer that hears of a slot before an earlier one takes
the earlier one for skipped until its announcement comes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import EventBus, GroupJudged, Notice, NoticeLevel, inert
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.environment import Completion
from node.rollout.flight import Finished, Flight
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt, PromptFeed
from node.rollout.reuse import ReuseBook
from node.rollout.scoring import OwnScorer
from node.sandbox.scorer import ScoreFailure
from node.supervise import StageGauge
from protocol.codec import digest, encode
from protocol.errors import LocalProtocolError
from protocol.messages import (
    Digest,
    FinishReason,
    Lineage,
    PeerId,
    PromptRef,
    Rollout,
    RolloutGroup,
    Sampling,
)
from protocol.rollouts import parse_tokens, version_span

__all__ = ["OwnGroup", "RolloutWorker", "completions_of", "make_group", "request_seed"]

MAX_TOLD = 8
"""Notices about own groups that were dropped or not shared, in one run."""


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """A scored group of this node. worker -> train."""

    group: RolloutGroup
    rewards: tuple[float, ...]
    generate_s: float
    """Its share of the time that was spent on generation."""


def request_seed(node_seed: int, author: PeerId, prompt: AssignedPrompt, policy_version: int) -> int:
    """63-bit seed of one group's sampling: differs by node, slot and version. With the peer id in it, two
    nodes with equal weights do not draw equal completions, which would be called a copy. The transformers
    engine draws by it; vLLM draws by the seed of its process, and there it only tells groups apart."""
    text = f"{node_seed}/{author}/{prompt.ref.window}/{prompt.ref.slot}/{policy_version}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def completions_of(rollouts: Sequence[Rollout]) -> list[Completion]:
    """What the environment scores."""
    return [Completion(text=r.text, finished=r.finish is FinishReason.STOP) for r in rollouts]


def make_group(
    author: PeerId,
    lineage: Lineage,
    engine: Engine,
    assigned: AssignedPrompt,
    sampling: Sampling,
    rollouts: Sequence[Rollout],
    rewards: Sequence[float],
) -> RolloutGroup:
    """A complete group record of generated and scored rollouts."""
    span = version_span([parse_tokens(rollout) for rollout in rollouts])
    return RolloutGroup(
        author=author,
        lineage=lineage,
        policy_version=span.newest,
        mean_version=span.mean,
        oldest_version=span.oldest,
        environment=assigned.prompt.environment,
        prompt=assigned.ref,
        question=assigned.prompt.text,
        sampling=sampling,
        engine=engine.name,
        dtype=engine.dtype,
        rollouts=tuple(
            msgspec.structs.replace(rollout, reward=float(reward))
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ),
    )


class RolloutWorker:
    """Generates and scores this node's groups. `awake` is set while the engine may generate; `too_old` says
    of a slot that peers would refuse its group; `waits_for` names who makes room in `admission`."""

    def __init__(
        self,
        *,
        author: PeerId,
        lineage: Lineage,
        policy: Policy,
        engine: Engine,
        scorer: OwnScorer,
        feed: PromptFeed,
        admission: Admission,
        sampling: Sampling,
        group_size: int,
        groups_per_batch: int,
        seed: int,
        compute: Compute,
        clock: Clock,
        bus: EventBus,
        gauge: StageGauge,
        out: asyncio.Queue[OwnGroup],
        publish: Callable[[RolloutGroup], Awaitable[None]],
        max_body_bytes: int,
        max_in_flight: int = 0,
        reuse: ReuseBook | None = None,
        awake: asyncio.Event | None = None,
        too_old: Callable[[PromptRef], bool] = lambda prompt: False,
        waits_for: str = "the trainer",
    ) -> None:
        self._author = author
        self._lineage = lineage
        self._policy = policy
        self._engine = engine
        self._scorer = scorer
        self._feed = feed
        self._admission = admission
        self._sampling = sampling
        self._group_size = group_size
        self._groups_per_batch = groups_per_batch
        self._seed = seed
        self._compute = compute
        self._clock = clock
        self._bus = bus
        self._gauge = gauge
        self._out = out
        self._publish = publish
        self._max_body_bytes = max_body_bytes
        self._reuse = reuse
        self._awake = awake
        self._too_old = too_old
        self._waits_for = waits_for
        self._told: set[tuple[str, str]] = set()
        self._batch_rollouts = 0
        self._batch_tokens = 0
        self.unshared = 0
        """Own groups that were too old for peers when they were complete."""
        self._flight: Flight | None = None
        if max_in_flight:
            self._flight = Flight(
                engine,
                feed,
                admission,
                max_in_flight=max_in_flight,
                request=self._request,
                drafted=self._drafted,
                awake=self._until_awake,
                compute=compute,
                clock=clock,
                gauge=gauge,
                waits_for=waits_for,
            )

    @property
    def in_flight(self) -> int:
        """Rollouts under way."""
        return self._flight.in_flight if self._flight is not None else self._batch_rollouts

    @property
    def sampled(self) -> int:
        """Tokens sampled in this run."""
        return self._flight.sampled if self._flight is not None else self._batch_tokens

    async def run(self) -> None:
        """Generate until cancelled."""
        if self._flight is None:
            await self._run_batches()
            return
        complete: asyncio.Queue[Finished] = asyncio.Queue()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._flight.run(complete))
            loops.create_task(self._run_scoring(complete))

    async def _run_scoring(self, complete: asyncio.Queue[Finished]) -> None:
        while True:
            finished = await complete.get()
            await self._hand_on(await self._score(finished.assigned, finished.rollouts, finished.generate_s))
            complete.task_done()

    async def _run_batches(self) -> None:
        while True:
            with self._gauge.waiting(self._waits_for):
                room = await self._admission.wait()
            with self._gauge.waiting("the next window"):
                assigned = [await self._feed.next() for _ in range(min(room, self._groups_per_batch))]
            self._admission.started(len(assigned))
            with self._gauge.working():
                made = await self.generate(assigned)
            for own in made:
                await self._hand_on(own)

    async def _hand_on(self, own: OwnGroup | None) -> None:
        """A group that was running to training and to peers; None when it was dropped."""
        if own is None:
            self._admission.finished(accepted=0, dropped=1)
            return
        with self._gauge.waiting("room in queue"):
            await self._out.put(own)
        self._admission.finished(accepted=1)
        if self._too_old(own.group.prompt):
            self.unshared += 1
            self._tell(own.group.environment, "not shared: it took longer than peers accept")
            return
        with self._gauge.waiting("the network"):
            await self._publish(own.group)

    async def _until_awake(self) -> None:
        if self._awake is not None:
            await self._awake.wait()

    async def generate(self, assigned: Sequence[AssignedPrompt]) -> list[OwnGroup | None]:
        """Generate and score one batch; None where the prompt does not fit the policy or scoring failed."""
        requests = [self._request(each) for each in assigned]
        fitting = [
            (place, each, request)
            for place, (each, request) in enumerate(zip(assigned, requests, strict=True))
            if request is not None
        ]
        await self._until_awake()
        began_s = self._clock.monotonic_s()
        self._batch_rollouts = len(fitting) * self._group_size
        batches = await self._compute.run(
            Lane.GENERATE, self._generate, [(each, request) for _, each, request in fitting]
        )
        self._batch_rollouts = 0
        each_s = (self._clock.monotonic_s() - began_s) / len(assigned)
        made: list[OwnGroup | None] = [None] * len(assigned)
        for (place, each, _), rollouts in zip(fitting, batches, strict=True):
            made[place] = await self._score(each, rollouts, each_s)
        return made

    def _generate(self, batch: Sequence[tuple[AssignedPrompt, GenerationRequest]]) -> list[list[Rollout]]:
        """Blocking."""
        requests = [self._drafted(assigned, request) for assigned, request in batch]
        groups = self._engine.generate(requests)
        self._batch_tokens += sum(len(each.answer.token_ids) // 4 for rollouts in groups for each in rollouts)
        self._batch_tokens -= sum(len(prefix.token_ids) for each in requests for prefix in each.prefixes)
        return groups

    def _request(self, assigned: AssignedPrompt) -> GenerationRequest | None:
        """What the engine is asked for. None when prompt and answer have no room: one long prompt of a task
        must not end the node."""
        request = GenerationRequest(
            prompt_ids=tuple(self._policy.encode_prompt(assigned.prompt.text)),
            n=self._group_size,
            seed=request_seed(self._seed, self._author, assigned, self._engine.policy_version),
            sampling=self._sampling,
        )
        tokens, most = len(request.prompt_ids) + request.sampling.max_new_tokens, self._engine.context
        if tokens <= most:
            return request
        self._tell_dropped(assigned, f"prompt and answer may take {tokens} of the engine's {most} tokens")
        return None

    def _drafted(self, assigned: AssignedPrompt, request: GenerationRequest) -> GenerationRequest:
        """With what may be kept of the last group on this prompt. Blocking: the engine scores that."""
        if self._reuse is None:
            return request
        return replace(
            request,
            prefixes=self._reuse.prefixes(
                self._engine,
                assigned.ref.index,
                request.prompt_ids,
                request.n,
                request.seed,
                request.sampling.temperature,
            ),
        )

    def _tell_dropped(self, assigned: AssignedPrompt, why: str) -> None:
        self._tell(assigned.prompt.environment, f"dropped: {why}")

    def _tell(self, task: str, what: str) -> None:
        """Once per task and reason, until MAX_TOLD."""
        text = f"an own group on {task} was {what}"
        if (task, what) not in self._told and len(self._told) < MAX_TOLD:
            self._told.add((task, what))
            self._bus.emit(Notice(at=self._clock.now_ms(), level=NoticeLevel.WARNING, text=text))

    async def _score(
        self, assigned: AssignedPrompt, rollouts: Sequence[Rollout], generate_s: float
    ) -> OwnGroup | None:
        if self._reuse is not None:
            self._reuse.remember(assigned.ref.index, rollouts)
        rewards = await self._compute.run(
            Lane.SCORE, self._scorer.rewards, assigned.prompt, completions_of(rollouts)
        )
        if isinstance(rewards, ScoreFailure):
            self._tell_dropped(assigned, f"it could not be scored ({rewards.reason})")
            return None
        group = make_group(
            self._author, self._lineage, self._engine, assigned, self._sampling, rollouts, rewards
        )
        try:
            body = encode(group)
        except LocalProtocolError as error:
            self._tell_dropped(assigned, str(error))
            return None
        if len(body) > self._max_body_bytes:
            self._tell_dropped(assigned, f"its body is larger than the {self._max_body_bytes} bytes allowed")
            return None
        self._bus.emit(judged(group, digest(body), at=self._clock.now_ms()))
        return OwnGroup(group=group, rewards=rewards, generate_s=generate_s)


def judged(group: RolloutGroup, body: Digest, *, at: int) -> GroupJudged:
    """The event of an own group with this body."""
    return GroupJudged(
        at=at,
        author=group.author,
        own=True,
        accepted=True,
        reason="",
        group=body[:12],
        environment=group.environment,
        window=group.prompt.window,
        slot=group.prompt.slot,
        policy_version=group.policy_version,
        question=inert(group.question),
        completions=tuple(inert(rollout.text, 500) for rollout in group.rollouts),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        checks=(),
    )
