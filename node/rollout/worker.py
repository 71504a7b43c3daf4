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
from protocol.messages import FinishReason, Lineage, PeerId, Rollout, RolloutGroup, Sampling

__all__ = ["OwnGroup", "RolloutWorker", "completions_of", "make_group", "request_seed"]


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

    async def run(self) -> None:
        """Generate until cancelled."""
        while True:
            with self._gauge.waiting("the trainer (staleness bound)"):
                room = await self._admission.wait()
            with self._gauge.waiting("the next window"):
                assigned = [await self._feed.next() for _ in range(min(room, self._groups_per_batch))]
            self._admission.started(len(assigned))
            for own in await self.generate(assigned):
                if own is None:
                    self._admission.finished(accepted=0, dropped=1)
                    continue
                with self._gauge.waiting("room in the own queue"):
                    await self._out.put(own)
                self._admission.finished(accepted=1)
                await self._publish(own.group)

    async def generate(self, assigned: Sequence[AssignedPrompt]) -> list[OwnGroup | None]:
        """Generate and score one batch; None where scoring failed."""
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
        began_s = self._clock.monotonic_s()
        batches = await self._compute.run("generate", self._engine.generate, requests)
        each_s = (self._clock.monotonic_s() - began_s) / len(assigned)
        return [await self._score(a, rollouts, each_s) for a, rollouts in zip(assigned, batches, strict=True)]

    async def _score(
        self, assigned: AssignedPrompt, rollouts: Sequence[Rollout], generate_s: float
    ) -> OwnGroup | None:
        rewards = await self._compute.run(
            "score", self._scorer.rewards, assigned.prompt, completions_of(rollouts)
        )
        if isinstance(rewards, ScoreFailure):
            name = assigned.prompt.environment
            text = f"an own group on {name} could not be scored ({rewards.reason}); dropped"
            self._bus.emit(Notice(at=self._clock.now_ms(), level="warning", text=text))
            return None
        group = make_group(
            self._author, self._lineage, self._engine, assigned, self._sampling, rollouts, rewards
        )
        self._bus.emit(judged(group, rewards, at=self._clock.now_ms()))
        return OwnGroup(group=group, rewards=rewards, generate_s=generate_s)


def judged(group: RolloutGroup, rewards: Sequence[float], *, at: int) -> GroupJudged:
    """The event of an own group."""
    return GroupJudged(
        at=at,
        author=group.author,
        own=True,
        accepted=True,
        reason="",
        group=digest(encode(group))[:12],
        environment=group.environment,
        window=group.prompt.window,
        slot=group.prompt.slot,
        policy_version=group.policy_version,
        question=inert(group.question),
        completions=tuple(inert(rollout.text, 500) for rollout in group.rollouts),
        rewards=tuple(rewards),
        checks=(),
    )
