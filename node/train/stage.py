"""The train stage: own groups and drawn peers' groups -> weights and treatments -> one optimiser step -> new
version.

One loop. It waits for I own groups (for fewer, at least one, once generation holds because its tokens are
spent), then for up to J of the pool's (with a deadline, and only while peers are active, so a node without
peers trains alone), has them made into a batch (`prepare.py`), steps, and hands the new weights to the
engine; all of that work runs beside the loop, which alone touches books and pool. A step may come back rolled
back (`supervisor.py`): then it does not count, and the weights that the engine gets are the good ones.
Evaluations on held-out prompts happen here, before, during and after. Between two steps a merge may change
the weights (`weights/merge/adopt.py`), and so may a probe of what they have become.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import EventBus, Notice, NoticeLevel, RolledBack, StepDone
from node.peers.book import PeerBook
from node.rollout.policy import Policy
from node.share.accepted import Accepted
from node.share.pool import PooledGroup, ReplayPool
from node.supervise import StageGauge
from node.train.batch import TrainingBatch
from node.train.groups import OWN_SOURCE, Kind
from node.train.prepare import ExternalDraft, LogprobRows, OwnDraft, Prepared, first_logprobs, prepare
from node.train.settings import TrainSettings, Treatment
from node.train.stability import RollBack
from node.train.step import StepReport, Trainer
from node.weight.advantage import CapabilityTracker, has_signal
from node.weight.answered import AnsweredPrompts
from node.weight.staleness import Staleness, judge_staleness
from protocol.messages import Digest, FinishReason, Lineage, RolloutGroup, VerificationRules

__all__ = ["StagePlan", "TrainStage"]

CAPABILITY_STEPS = 5
"""K of HACPO: a capability is the mean over this many steps."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How much a step takes and how long it waits."""

    steps: int
    local_groups: int
    external_groups: int
    external_wait_s: float
    evaluate_every: int
    checkpoint_every: int
    probe_every: int = 0
    """Steps between probes; 0: none."""


class TrainStage:
    """Trains until `plan.steps` versions are made; then evaluates and sets `finished`."""

    def __init__(
        self,
        trainer: Trainer,
        policy: Policy,
        settings: TrainSettings,
        plan: StagePlan,
        *,
        own: asyncio.Queue[Accepted],
        pool: ReplayPool,
        pooled: asyncio.Event,
        peers: PeerBook,
        answered: AnsweredPrompts,
        rules: VerificationRules,
        lineage: Lineage,
        window: Callable[[], float],
        peers_active: Callable[[], bool],
        drawn: Callable[[], None],
        used: Callable[[int], None],
        held: asyncio.Event,
        broadcast: Callable[[int], Awaitable[None]],
        evaluate: Callable[[str], Awaitable[None]],
        save: Callable[[], Awaitable[None]],
        compute: Compute,
        clock: Clock,
        bus: EventBus,
        gauge: StageGauge,
        weight_gauge: StageGauge,
        finished: asyncio.Event,
        alone: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        step: Callable[[TrainingBatch], StepReport] | None = None,
        merge: Callable[[], Awaitable[bool]] | None = None,
        probe: Callable[[], Awaitable[RollBack | None]] | None = None,
    ) -> None:
        """`used(n)`: a step that took n own groups has ended. `held` is set while no more own groups will
        come before that. A step has the device to itself inside `alone`. `step` is the trainer's, or what
        surrounds it. `merge()`, between two steps, says whether it has given the trainer merged weights;
        `probe()` what it has found bad, and undone, in the engine too."""
        self._trainer = trainer
        self._train = step or trainer.step
        self._policy = policy
        self._settings = settings
        self._plan = plan
        self._own = own
        self._pool = pool
        self._pooled = pooled
        self._peers = peers
        self._answered = answered
        self._capability = CapabilityTracker(CAPABILITY_STEPS * plan.local_groups)
        self._ingestion: dict[Digest, LogprobRows] = {}
        self._rules = rules
        self._lineage = lineage
        self._window = window
        self._peers_active = peers_active
        self._drawn = drawn
        self._used = used
        self._held = held
        self._broadcast = broadcast
        self._evaluate = evaluate
        self._save = save
        self._compute = compute
        self._clock = clock
        self._bus = bus
        self._gauge = gauge
        self._weight_gauge = weight_gauge
        self._finished = finished
        self._alone = alone
        self._merge = merge
        self._probe = probe
        self._merged_version = 0
        """Of the last merge that was adopted in this run."""

    async def run(self) -> None:
        """All steps of this run."""
        await self._measure("before")
        await self._look_back(0)
        for step in range(1, self._plan.steps + 1):
            await self._step()
            await self._take_merge()
            await self._look_back(step)
            if step < self._plan.steps and step % self._plan.evaluate_every == 0:
                await self._measure("during")
            if step % self._plan.checkpoint_every == 0 or step == self._plan.steps:
                with self._gauge.working():
                    await self._save()
        await self._measure("after")
        self._finished.set()

    async def _measure(self, moment: str) -> None:
        with self._gauge.working():
            await self._evaluate(moment)

    async def _step(self) -> None:
        began_s = self._clock.monotonic_s()
        with self._gauge.waiting("own groups"):
            own = await self._own_groups()
        external = await self._external()
        waited_s = self._clock.monotonic_s() - began_s
        prepared = await self._prepare(own, external)
        version = self._trainer.policy_version
        async with self._alone():
            with self._gauge.working():
                report = await self._compute.run(Lane.TRAIN, self._train, prepared.batch)
        if not report.skipped:
            if report.rolled_back is None:
                self._remember(prepared, report)
            with self._gauge.waiting("broadcast"):
                await self._broadcast(self._trainer.policy_version)
        else:
            text = "a step was not finite and left the weights untouched"
            self._bus.emit(Notice(at=self._clock.now_ms(), level=NoticeLevel.WARNING, text=text))
        self._used(len(own))
        self._bus.emit(_finite(self._event(report, prepared.batch, own, version, waited_s)))
        if report.rolled_back is not None:
            await self._tell(report.rolled_back)

    async def _look_back(self, step: int) -> None:
        """Probe the weights when it is time to. What was undone may be in a checkpoint, so the good ones are
        saved at once."""
        every = self._plan.probe_every
        if self._probe is None or not every or step % every:
            return
        with self._gauge.working():
            undone = await self._probe()
            if undone is not None:
                await self._save()
        if undone is not None:
            await self._tell(undone)

    async def _tell(self, undone: RollBack) -> None:
        """Raises UnstableError, with the good weights saved, when it was one roll-back too many in a row."""
        self._bus.emit(Notice(at=self._clock.now_ms(), level=NoticeLevel.WARNING, text=undone.text))
        event = RolledBack(
            at=self._clock.now_ms(),
            sign=undone.alarm.sign.value,
            value=undone.alarm.value,
            limit=undone.alarm.limit,
            bad_version=undone.bad_version,
            good_version=undone.good_version,
            policy_version=undone.policy_version,
            total=undone.total,
            why=undone.text,
        )
        self._bus.emit(_finite(event))
        if undone.error is not None:
            with self._gauge.working():
                await self._save()
            raise undone.error

    async def _take_merge(self) -> None:
        """An adopted one is saved at once: the moments of an older checkpoint do not fit its weights."""
        if self._merge is None:
            return
        with self._gauge.working():
            if await self._merge():
                self._merged_version = self._trainer.policy_version
                await self._save()

    async def _own_groups(self) -> list[Accepted]:
        """One step's worth; what there is, but at least one, while generation holds."""
        own = [await self._own.get()]
        while len(own) < self._plan.local_groups:
            if self._own.empty() and self._held.is_set():
                break
            getting, holding = asyncio.create_task(self._own.get()), asyncio.create_task(self._held.wait())
            try:
                await asyncio.wait({getting, holding}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                getting.cancel()  # a group that is there stays in the queue
            if getting.done() and not getting.cancelled():
                own.append(getting.result())
        return own

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
            with self._gauge.waiting("peers' groups"), self._weight_gauge.waiting("peers' groups"):
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
        return self._peers.quarantined(group.author) or not self._staleness(group).fresh

    def _staleness(self, group: RolloutGroup) -> Staleness:
        """Of a follower's group against the version trained here; of another lineage's against the newest
        that its author announced."""
        if group.lineage == self._lineage:
            newest = self._trainer.policy_version
        else:
            heard = self._peers.newest_version(group.author, group.lineage)
            newest = heard if heard is not None else group.policy_version
        window = int(self._window())
        return judge_staleness(group.policy_version, newest, group.prompt.window, window, self._rules)

    async def _prepare(self, own: Sequence[Accepted], external: Sequence[PooledGroup]) -> Prepared:
        """The batch of a step. What is looked up is looked up on the loop; the rest is done beside it."""
        with self._gauge.waiting("weights"), self._weight_gauge.working():
            drafts = [self._own_draft(each) for each in own]
            drawn = [self._external_draft(pooled) for pooled in external]
            prepared = await self._compute.run(
                Lane.WEIGHT, prepare, drafts, drawn, self._settings, self._policy
            )
        for author, reason in prepared.refused:
            self._peers.rejected(author, reason)
        return prepared

    def _own_draft(self, own: Accepted) -> OwnDraft:
        group = own.group
        self._answered.add(group.prompt.index, OWN_SOURCE, own.rewards)
        self._capability.observe(OWN_SOURCE, own.rewards)
        return OwnDraft(
            own,
            lag=max(0, self._trainer.policy_version - group.policy_version),
            age_windows=max(0.0, int(self._window()) - group.prompt.window),
        )

    def _external_draft(self, pooled: PooledGroup) -> ExternalDraft:
        group, author = pooled.group, pooled.group.author
        if pooled.uses == 0:
            self._capability.observe(author, pooled.rewards)
        agents = self._answered.of(group.prompt.index)
        own_rewards = agents.pop(OWN_SOURCE, None)
        agents.pop(author, None)
        staleness = self._staleness(group)
        return ExternalDraft(
            pooled,
            own_rewards=own_rewards,
            other_rewards=agents,
            capability={agent: self._capability.value(agent) for agent in (OWN_SOURCE, author, *agents)},
            trust=self._peers.trust(author),
            lag=staleness.lag,
            age_windows=staleness.age_windows,
            own_lineage=group.lineage == self._lineage,
            ingestion=self._ingestion.get(pooled.digest, ()),
        )

    def _remember(self, prepared: Prepared, report: StepReport) -> None:
        """Keep log pi of groups on first use for as long as the pool may give them again."""
        known = self._ingestion | first_logprobs(prepared, report.logprobs_BT.numpy())
        self._ingestion = {digest: rows for digest, rows in known.items() if digest in self._pool}

    def _event(
        self,
        report: StepReport,
        batch: TrainingBatch,
        own: Sequence[Accepted],
        version: int,
        waited_s: float,
    ) -> StepDone:
        external = [group for group in batch.groups if group.source != OWN_SOURCE]
        followers = [group for group in batch.groups if group.kind is Kind.FOLLOWER]
        own_lineage = [group for group in batch.groups if group.kind is not Kind.FOREIGN]
        rollouts = [rollout for each in own for rollout in each.group.rollouts]
        versions = [_versions(each.group) for each in own]
        return StepDone(
            at=self._clock.now_ms(),
            policy_version=report.policy_version,
            loss=report.loss,
            reward=fmean(reward for each in own for reward in each.rewards),
            reward_external=fmean(fmean(group.rewards) for group in external) if external else 0.0,
            entropy=report.entropy,
            kl_start=report.kl_start,
            length_mean=fmean(len(rollout.answer.token_ids) // 4 for rollout in rollouts),
            finished_share=fmean(rollout.finish is FinishReason.STOP for rollout in rollouts),
            zero_variance_share=fmean(not has_signal(each.rewards) for each in own),
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            skipped=report.skipped,
            rolled_back=report.rolled_back is not None,
            nonfinite=report.nonfinite,
            ess=report.ess,
            kl_step=report.kl_step,
            groups_local=len(own),
            groups_external=len(external),
            hacpo_groups=sum(group.treatment is Treatment.HACPO for group in external),
            graft_groups=sum(group.treatment is Treatment.GRAFT for group in external),
            prompts_shared=sum(group.prompt_shared for group in external),
            staleness=fmean(group.lag for group in batch.groups),
            age_windows=fmean(group.age_windows for group in external) if external else 0.0,
            off_policy_share=float((np.concatenate(versions) < version).mean()),
            partial_groups=sum(int(each.min() < each.max()) for each in versions),
            groups_followers=len(followers),
            staleness_followers=fmean(group.lag for group in followers) if followers else 0.0,
            groups_across_merge=sum(version - group.lag < self._merged_version for group in own_lineage),
            sources=report.sources,
            kinds=report.kinds,
            gaps=report.gaps,
            pool=len(self._pool),
            generate_s=sum(each.generate_s for each in own),
            train_s=report.train_s,
            wait_s=waited_s,
        )


def _versions(group: RolloutGroup) -> NDArray[np.uint32]:
    """Of every token of the group."""
    return np.frombuffer(b"".join(rollout.answer.versions for rollout in group.rollouts), dtype="<u4")


def _finite(value: Any) -> Any:
    """JSON has no NaN: what a step could not measure is shown as 0, `skipped` or `rolled_back` tells why."""
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if isinstance(value, tuple):
        return tuple(map(_finite, value))
    if isinstance(value, msgspec.Struct):
        fields = {name: _finite(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value
