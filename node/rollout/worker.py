"""The rollout stage: admission -> prompts -> engine -> environment -> own queue and publisher.

One loop. Each turn takes as many slots as admission allows (at most one step's worth), generates their groups
in one batch, scores them, and hands them on. `make_group` is the stage's work as a plain function. Not for
choosing what is trained on, nor for peers' groups.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from node.clock import Clock
from node.compute import Compute
from node.events import EventBus, GroupJudged, Notice, inert
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.environment import Completion
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt, PromptFeed
from node.rollout.scoring import OwnScorer
from node.sandbox.scorer import ScoreFailure
from node.supervise import StageGauge
from protocol.codec import digest, encode
from protocol.errors import LocalProtocolError
from protocol.messages import Digest, FinishReason, Lineage, PeerId, Rollout, RolloutGroup, Sampling

__all__ = ["OwnGroup", "RolloutWorker", "completions_of", "make_group", "request_seed"]

MAX_TOLD = 8
"""Notices about dropped own groups in one run."""


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """A scored group of this node. worker -> train."""

    group: RolloutGroup
    rewards: tuple[float, ...]
    generate_s: float
    """Its share of the batch's generation time."""


def request_seed(node_seed: int, author: PeerId, prompt: AssignedPrompt, policy_version: int) -> int:
    """63-bit seed of one group's sampling: differs by node, slot and version. With the peer id in it, two
    nodes with equal weights do not draw equal completions, which would be called a copy."""
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
    versions = [int.from_bytes(r.versions[-4:], "little") for r in rollouts if r.versions]
    return RolloutGroup(
        author=author,
        lineage=lineage,
        policy_version=max(versions, default=engine.policy_version),
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
    """Generates and scores this node's groups."""

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
        self._told: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Generate until cancelled."""
        while True:
            with self._gauge.waiting("the trainer"):
                room = await self._admission.wait()
            with self._gauge.waiting("the next window"):
                assigned = [await self._feed.next() for _ in range(min(room, self._groups_per_batch))]
            self._admission.started(len(assigned))
            with self._gauge.working():
                made = await self.generate(assigned)
            for own in made:
                if own is None:
                    self._admission.finished(accepted=0, dropped=1)
                    continue
                with self._gauge.waiting("room in queue"):
                    await self._out.put(own)
                self._admission.finished(accepted=1)
                with self._gauge.waiting("the network"):
                    await self._publish(own.group)

    async def generate(self, assigned: Sequence[AssignedPrompt]) -> list[OwnGroup | None]:
        """Generate and score one batch; None where the prompt does not fit the policy or scoring failed."""
        version = self._engine.policy_version
        requests = [
            GenerationRequest(
                prompt_ids=tuple(self._policy.encode_prompt(a.prompt.text)),
                n=self._group_size,
                seed=request_seed(self._seed, self._author, a, version),
                sampling=self._sampling,
            )
            for a in assigned
        ]
        fitting = [place for place, request in enumerate(requests) if self._fits(request, assigned[place])]
        began_s = self._clock.monotonic_s()
        batches = await self._compute.run(
            "generate", self._engine.generate, [requests[place] for place in fitting]
        )
        each_s = (self._clock.monotonic_s() - began_s) / len(assigned)
        made: list[OwnGroup | None] = [None] * len(assigned)
        for place, rollouts in zip(fitting, batches, strict=True):
            made[place] = await self._score(assigned[place], rollouts, each_s)
        return made

    def _fits(self, request: GenerationRequest, assigned: AssignedPrompt) -> bool:
        """Whether prompt and answer have room; one long prompt of a task must not end the node."""
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        if tokens <= self._policy.max_positions:
            return True
        self._tell_dropped(
            assigned,
            f"prompt and answer may take {tokens} of the policy's {self._policy.max_positions} tokens",
        )
        return False

    def _tell_dropped(self, assigned: AssignedPrompt, why: str) -> None:
        """Once per task and reason, until MAX_TOLD."""
        name = assigned.prompt.environment
        kind = (name, why)
        if kind not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(kind)
            text = f"an own group on {name} was dropped: {why}"
            self._bus.emit(Notice(at=self._clock.now_ms(), level="warning", text=text))

    async def _score(
        self, assigned: AssignedPrompt, rollouts: Sequence[Rollout], generate_s: float
    ) -> OwnGroup | None:
        rewards = await self._compute.run(
            "score", self._scorer.rewards, assigned.prompt, completions_of(rollouts)
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
