"""The train stage: own groups and drawn peers' groups -> weights and treatments -> one optimiser step -> new
version.

One loop. It waits for I own groups, then for up to J of the pool's (with a deadline, and only while peers are
active, so a node without peers trains alone), turns them into training groups, steps on a worker thread, and
hands the new weights to the engine. Evaluations on held-out prompts happen here, before, during and after.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from node.clock import Clock
from node.compute import Compute
from node.events import EventBus, Notice, StepDone
from node.rollout.policy import Policy
from node.rollout.worker import OwnGroup
from node.share.peers import PeerBook
from node.share.pool import PooledGroup, ReplayPool
from node.supervise import StageGauge
from node.train.batch import TrainingBatch, collate
from node.train.groups import (
    OWN_SOURCE,
    TrainingDataError,
    TrainingGroup,
    external_group,
    own_group,
    training_rollouts,
)
from node.train.settings import TrainSettings, Treatment
from node.train.step import StepReport, Trainer
from node.weight.advantage import CapabilityTracker, has_signal
from node.weight.answered import AnsweredPrompts
from node.weight.staleness import StalenessLimits, judge_foreign
from node.weight.trust import TrustBook
from protocol.messages import FinishReason, RolloutGroup

__all__ = ["StagePlan", "TrainStage"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How much a step takes and how long it waits."""

    steps: int
    local_groups: int
    external_groups: int
    external_wait_s: float
    evaluate_every: int
    checkpoint_every: int


class TrainStage:
    """Trains until `plan.steps` versions are made; then evaluates and sets `finished`."""

    def __init__(
        self,
        trainer: Trainer,
        policy: Policy,
        settings: TrainSettings,
        plan: StagePlan,
        *,
        own: asyncio.Queue[OwnGroup],
        pool: ReplayPool,
        pooled: asyncio.Event,
        peers: PeerBook,
        trust: TrustBook,
        answered: AnsweredPrompts,
        limits: StalenessLimits,
        window: Callable[[], float],
        peers_active: Callable[[], bool],
        drawn: Callable[[], None],
        broadcast: Callable[[int], Awaitable[None]],
        evaluate: Callable[[str], Awaitable[None]],
        save: Callable[[], Awaitable[None]],
        compute: Compute,
        clock: Clock,
        bus: EventBus,
        gauge: StageGauge,
        weight_gauge: StageGauge,
        finished: asyncio.Event,
    ) -> None:
        self._trainer = trainer
        self._policy = policy
        self._settings = settings
        self._plan = plan
        self._own = own
        self._pool = pool
        self._pooled = pooled
        self._peers = peers
        self._trust = trust
        self._answered = answered
        self._capability = CapabilityTracker()
        self._limits = limits
        self._window = window
        self._peers_active = peers_active
        self._drawn = drawn
        self._broadcast = broadcast
        self._evaluate = evaluate
        self._save = save
        self._compute = compute
        self._clock = clock
        self._bus = bus
        self._gauge = gauge
        self._weight_gauge = weight_gauge
        self._finished = finished

    async def run(self) -> None:
        """All steps of this run."""
        await self._evaluate("before")
        for step in range(1, self._plan.steps + 1):
            await self._step()
            if step < self._plan.steps and step % self._plan.evaluate_every == 0:
                await self._evaluate("during")
            if step % self._plan.checkpoint_every == 0 or step == self._plan.steps:
                await self._save()
        await self._evaluate("after")
        self._finished.set()

    async def _step(self) -> None:
        began_s = self._clock.monotonic_s()
        with self._gauge.waiting("own groups"):
            own = [await self._own.get() for _ in range(self._plan.local_groups)]
        external = await self._external()
        waited_s = self._clock.monotonic_s() - began_s
        groups = [self._own_group(each) for each in own]
        for pooled in external:
            group = self._external_group(pooled)
            if group is not None and any(group.advantages):
                groups.append(group)
        batch = self._collate(groups)
        report = await self._compute.run("train", self._trainer.step, batch)
        if not report.skipped:
            await self._broadcast(report.policy_version)
        else:
            text = "a step was not finite and left the weights untouched"
            self._bus.emit(Notice(at=self._clock.now_ms(), level="warning", text=text))
        self._bus.emit(self._event(_finite(report), batch, own, waited_s))

    async def _external(self) -> list[PooledGroup]:
        """Up to J groups of the pool, waiting a little for peers that are there."""
        wanted = self._plan.external_groups
        if not wanted:
            return []
        deadline_s = self._clock.monotonic_s() + self._plan.external_wait_s
        while True:
            self._pool.discard(self._unfit)
            left_s = deadline_s - self._clock.monotonic_s()
            if len(self._pool) >= wanted or left_s <= 0 or not self._peers_active():
                break
            self._pooled.clear()
            with self._weight_gauge.waiting("peers' groups"):
                try:
                    async with asyncio.timeout(left_s):
                        await self._pooled.wait()
                except TimeoutError:
                    continue
        drawn = self._pool.draw(wanted)
        self._drawn()
        return drawn

    def _unfit(self, pooled: PooledGroup) -> bool:
        """Gates: too old, too far behind its lineage, or its author is in quarantine."""
        group = pooled.group
        return self._trust.quarantined(group.author, self._window()) or not self._freshness(group)[2]

    def _freshness(self, group: RolloutGroup) -> tuple[int, int, bool]:
        newest = max(self._peers.newest_version(group.author), group.policy_version)
        found = judge_foreign(
            group.policy_version, newest, group.prompt.window, int(self._window()), self._limits
        )
        return found.lag, found.age_windows, found.fresh

    def _own_group(self, own: OwnGroup) -> TrainingGroup:
        group = own.group
        self._answered.add(group.prompt.index, OWN_SOURCE, own.rewards)
        self._capability.observe(OWN_SOURCE, fmean(own.rewards))
        name = f"own {group.prompt.window}/{group.prompt.slot}"
        return own_group(
            name,
            self._policy.encode_prompt(group.question),
            training_rollouts(name, group.rollouts, self._policy, same_tokenizer=True),
            own.rewards,
            self._settings.treatment,
            temperature=group.sampling.temperature,
            lag=max(0, self._trainer.policy_version - group.policy_version),
            age_windows=max(0.0, int(self._window()) - group.prompt.window),
        )

    def _external_group(self, pooled: PooledGroup) -> TrainingGroup | None:
        """A drawn group with its weight and treatment; None when its numbers may not reach the optimiser."""
        group, author = pooled.group, pooled.group.author
        if pooled.uses == 0:
            self._capability.observe(author, fmean(pooled.rewards))
        agents = self._answered.of(group.prompt.index)
        own_rewards = agents.pop(OWN_SOURCE, None)
        agents.pop(author, None)
        lag, age_windows, _ = self._freshness(group)
        same_tokenizer = group.lineage.tokenizer == self._policy.tokenizer_digest
        try:
            return external_group(
                author,
                pooled.digest[:12],
                self._policy.encode_prompt(group.question),
                training_rollouts(
                    pooled.digest[:12], group.rollouts, self._policy, same_tokenizer=same_tokenizer
                ),
                pooled.rewards,
                self._settings.treatment,
                own_rewards=own_rewards,
                other_rewards=agents,
                capability=self._capability,
                trust=self._trust.trust(author, self._window()),
                temperature=group.sampling.temperature,
                lag=lag,
                age_windows=age_windows,
                uses=pooled.uses,
            )
        except TrainingDataError as error:
            self._peers.rejected(author, error.reason)
            return None

    def _collate(self, groups: list[TrainingGroup]) -> TrainingBatch:
        """The batch; external groups that may not reach the optimiser are left out and counted."""
        while True:
            try:
                return collate(groups, self._settings, self._policy)
            except TrainingDataError as error:
                bad = next(group for group in groups if group.group == error.group)
                if bad.source == OWN_SOURCE:
                    raise
                self._peers.rejected(bad.source, error.reason)
                groups = [group for group in groups if group is not bad]

    def _event(
        self, report: StepReport, batch: TrainingBatch, own: Sequence[OwnGroup], waited_s: float
    ) -> StepDone:
        external = [group for group in batch.groups if group.source != OWN_SOURCE]
        rollouts = [rollout for each in own for rollout in each.group.rollouts]
        return StepDone(
            at=self._clock.now_ms(),
            policy_version=report.policy_version,
            loss=report.loss,
            reward=fmean(reward for each in own for reward in each.rewards),
            reward_external=fmean(fmean(group.rewards) for group in external) if external else 0.0,
            entropy=report.entropy,
            kl_start=report.kl_start,
            length_mean=fmean(len(rollout.token_ids) // 4 for rollout in rollouts),
            finished_share=fmean(rollout.finish is FinishReason.STOP for rollout in rollouts),
            zero_variance_share=fmean(not has_signal(each.rewards) for each in own),
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            skipped=report.skipped,
            groups_local=len(own),
            groups_external=len(external),
            hacpo_groups=sum(group.treatment is Treatment.HACPO for group in external),
            graft_groups=sum(group.treatment is Treatment.GRAFT for group in external),
            prompts_shared=sum(group.prompt_shared for group in external),
            staleness=fmean(group.lag for group in batch.groups),
            age_windows=fmean(group.age_windows for group in external) if external else 0.0,
            sources=report.sources,
            pool=len(self._pool),
            generate_s=sum(each.generate_s for each in own),
            train_s=report.train_s,
            wait_s=waited_s,
        )


def _finite(report: StepReport) -> StepReport:
    """JSON has no NaN: what a skipped step could not measure is shown as 0, `skipped` tells why."""

    def finite(value: object) -> object:
        return 0.0 if isinstance(value, float) and not math.isfinite(value) else value

    sources = tuple(
        msgspec.structs.replace(
            source, **{key: finite(value) for key, value in msgspec.structs.asdict(source).items()}
        )
        for source in report.sources
    )
    values = {key: finite(value) for key, value in vars(report).items()}
    return replace(report, **{**values, "sources": sources})
