"""One trainer, wired. Its stages in the order of the flow; this file only connects them.

                prompts(window, peer)                                announcements of peers
                        |                                                      |
    ROLLOUT  admission -> engine -> score           SHARE.collect  offers -> choose by need -> fetch
             waits: trainer (staleness bound),                     waits: announcements, need, verify queue
             next version (token budget), next                                 | fetched (bounded queue)
             window, engine (asleep), own queue                                |
                        |                                          VERIFY      cheap -> dear, hard / soft
                        |                                                      waits: fetched bodies
          +-------------+-------------+                                        | accepted only
          | own (bounded queue)       |                            SHARE.pool  bounded in groups, uses, age
          |                           v                                        |
          |                   SHARE.publish  announce every slot,              |
          |                                  serve mixed groups                |
          v                                                                    v
    WEIGHT   own lag            trust x treatment (graft | hacpo | compat)     draw: peer first, then group
             waits: peers' groups, at most `external_wait_s` and only while peers are active
                        |
    TRAIN    batch (old log-probabilities) -> L_own + sum lambda_src L_src -> step -> policy_version + 1
                     ^                                                         |
                     +-- weights as before, as a version of their own <-- bad? +   (`train/supervisor.py`)
             waits: own groups (unblocked by ROLLOUT); with one device for both the engine sleeps meanwhile
                        |
    BROADCAST  new weights -> engine, in place -> probe (D7); the end of a step unblocks ROLLOUT's admission
                        |
               the newest proven version -> delta on the chain -> chunks to followers (`node/follower.py`)
               waits: a new version; beside the training, which never waits for it
                        |
    MERGE      every few windows, if enabled: anchors of trainers of this base model -> one set of weights,
               taken between two steps, judged on held-out prompts, adopted or not (`weights/merge/adopt.py`)
               waits: the next round, partners' sets, their blobs

Backpressure: ROLLOUT runs at most `max_staleness` versions ahead of TRAIN (`admission.py`; a step gives its
groups' room back, whether it made a version or not); everything else is a bounded queue, pool or book. An
author whose bodies do not come rests, so that stalling peers do not stop SHARE.collect. Losing the network is
never fatal: SHARE waits, the rest goes on. An engine that fails its probe for good ends sharing in both
directions (`weights/engine_sync.py`), not the run. A stage that raises ends the node with that error: peers'
errors were caught and counted at their boundary.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence

import msgspec

from node.compute import Lane
from node.core import NodeCore, Stages
from node.events import Evaluated, Health, NoticeLevel
from node.membership import Membership
from node.network import Network
from node.open.parts import Parts
from node.open.stores import Stores
from node.peers.trust import Hardness, Standing
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.share.collect import Collector, Fetched
from node.share.gossip import Heard
from node.share.pool import ReplayPool
from node.supervise import StageGauge, resident_bytes
from node.train.batch import TrainingBatch
from node.train.checkpoint import prune, save_checkpoint
from node.train.evaluate import HeldOut
from node.train.ewma import Ewma
from node.train.groups import OWN_SOURCE
from node.train.objectives import Need
from node.train.old_policy import OldPolicy
from node.train.snapshots import Snapshots
from node.train.stability import RollBack
from node.train.stage import StagePlan, TrainStage
from node.train.step import StepReport
from node.train.supervisor import Supervisor
from node.transport.base import Transport
from node.verify.lineage import OwnLineage
from node.verify.pipeline import Verifier
from node.verify.stage import VerifyStage
from node.weight.answered import AnsweredPrompts
from node.weights.chain.base import BaseWeights, base_bits
from node.weights.engine_sync import EngineSync, SyncSettings
from node.weights.merge.adopt import MergeAdoption
from node.weights.merge.merger import Merger
from node.weights.publish import Publisher
from node.weights.sharing import WeightsSharing
from protocol.messages import Lineage, PromptRef

__all__ = ["Node"]

STOCK_STEPS = 2
"""Unused groups kept in the pool, in steps' worth of external groups: enough to choose, little to grow
stale."""
SETTLE_MS = 3000
"""After its first connection a node hears the past by reconciliation, in no order: of a copy and its original
either may come first. What is heard until then is evidence for the copy check, and not fetched."""


class Node(NodeCore):
    """All stages of one trainer. `run` returns when the steps are done (or `stop` was called) and all is
    closed."""

    def __init__(
        self,
        parts: Parts,
        runtime: Runtime,
        membership: Membership,
        stores: Stores,
        transport: Transport | None,
        rss_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        if parts.learner is None:
            raise ValueError("a trainer needs a learner among its parts")
        self._learner = learner = parts.learner
        self._lineage = Lineage(
            owner=membership.peer_id,
            base_model=parts.policy.base_model,
            tokenizer=parts.policy.tokenizer_digest,
        )
        super().__init__(parts, runtime, membership, stores, transport, rss_bytes)
        config = self.config
        self.finished = asyncio.Event()
        """Set once all steps are done and evaluated."""
        self._saved_version = learner.trainer.policy_version
        self._answered = AnsweredPrompts()
        self._pool = ReplayPool(config.share.pool_groups, config.share.max_uses, self._runtime.rng)
        self._pooled = asyncio.Event()
        self._fetched: asyncio.Queue[Fetched] = asyncio.Queue(config.verify.queue)
        self._held_out = HeldOut(
            parts.engine,
            parts.policy,
            self._universe,
            self._own_scorer.reward,
            per_task=config.evaluate.prompts_per_task,
            max_new_tokens=membership.charter.max_new_tokens,
        )
        self._base = BaseWeights(
            self._runtime, functools.partial(base_bits, parts.policy, learner.settings.adapter)
        )
        self._sharing: WeightsSharing | None = None
        self._publisher: Publisher | None = None
        self._merger: Merger | None = None
        if self._network is not None:
            self._sharing = self._share_weights(self._network)
            self._publisher = Publisher(
                self._runtime, self._membership, self._lineage, learner.trainer, self._base, self._sharing
            )
        self._engine = EngineSync(
            self._runtime,
            learner.trainer,
            parts.engine,
            self._held_out,
            self._publisher,
            SyncSettings(
                tolerance=config.rollout.parity_tolerance,
                probe_every=config.train.checkpoint_every,
                sequential=config.policy.sharing == "sequential",
            ),
        )
        self._rollout = self._open_rollout(self._engine.awake)
        self._gauge(
            self._rollout.gauge,
            StageGauge(
                "verify", self._runtime.clock, "fetched bodies", self._fetched.maxsize, self._fetched.qsize
            ),
            StageGauge("share", self._runtime.clock, "offers", self._pool.capacity, lambda: len(self._pool)),
            StageGauge("weight", self._runtime.clock, "a step"),
            StageGauge("train", self._runtime.clock, "own groups"),
            self._engine.gauge,
            *([StageGauge("merge", self._runtime.clock, "the next round")] if config.merge.enabled else []),
        )
        self._verifier = Verifier(
            self._membership.charter,
            self._membership.swarm_id,
            self._peers,
            clock=self._runtime.clock,
            compute=self._runtime.compute,
            item_at=self._universe.item,
            scorer=parts.sandbox,
            decoders=learner.decoders,
            policy=parts.policy,
            engine=parts.engine,
            own=OwnLineage(self._lineage, lambda: learner.trainer.policy_version),
            enabled=config.verify.enabled,
        )
        self._collector: Collector | None = None
        if self._network is not None:
            self._collector = self._collect(self._network)

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    # --- wiring -------------------------------------------------------------------------------------------

    def _collect(self, network: Network) -> Collector:
        share = self.config.share
        return Collector(
            network.transport,
            network.gossip,
            queue=self._fetched,
            gauge=self._gauges["share"],
            parallel=share.fetch_parallel,
            timeout_s=share.fetch_timeout_s,
            clock=self._runtime.clock,
            wanted=self._wanted,
            waiting_of=self._pool.unused,
            answered=self._is_answered,
            worth_keeping=self._worth_keeping,
            still_fresh=lambda heard: self._verifier.is_fresh(heard.sender, heard.announcement),
            failed=self._peers.refused,
        )

    def _adoption(self, merger: Merger) -> MergeAdoption:
        return MergeAdoption(
            self._runtime, self._learner.trainer, self._engine, merger, self._held_out, self.config.merge
        )

    def _supervise(self) -> Supervisor | None:
        supervise = self.config.supervise
        if supervise.enabled is not True:  # "auto" is for the memory plan to decide
            return None
        if self.config.policy.sharing == "sequential":
            supervise = supervise.model_copy(update={"kl_rows": 0})
        return Supervisor(self._learner.trainer, supervise)

    def _step(self, supervisor: Supervisor | None) -> Callable[[TrainingBatch], StepReport]:
        """A step of the trainer, with what surrounds it."""
        trainer, train, needs = self._learner.trainer, self.config.train, self._learner.settings.needs
        step = supervisor.step if supervisor is not None else trainer.step
        if not needs & {Need.SNAPSHOT, Need.EWMA}:
            return step
        snapshots = ewma = None
        if Need.SNAPSHOT in needs:
            snapshots = Snapshots(versions=train.snapshots, max_bytes=train.snapshot_bytes or sys.maxsize)
        if Need.EWMA in needs:
            ewma = Ewma(trainer.learning(), beta=train.ewma_beta, device="cpu")
        return OldPolicy(trainer, step, snapshots=snapshots, ewma=ewma).step

    def _verify(self) -> VerifyStage:
        return VerifyStage(
            self._verifier,
            queue=self._fetched,
            pool=self._pool,
            peers=self._peers,
            answered=self._answered,
            clock=self._runtime.clock,
            bus=self._runtime.bus,
            gauge=self._gauges["verify"],
            pooled=self._pooled,
        )

    def _train(self) -> TrainStage:
        parts, train, supervisor = self._parts, self.config.train, self._supervise()
        return TrainStage(
            self._learner.trainer,
            parts.policy,
            self._learner.settings,
            StagePlan(
                steps=train.steps,
                local_groups=train.local_groups,
                external_groups=train.external_groups,
                external_wait_s=train.external_wait_s,
                evaluate_every=self.config.evaluate.every,
                checkpoint_every=train.checkpoint_every,
                probe_every=self.config.supervise.probe_every,
            ),
            own=self._made,
            pool=self._pool,
            pooled=self._pooled,
            peers=self._peers,
            answered=self._answered,
            rules=self._membership.charter.rules,
            lineage=self._lineage,
            window=self._membership.window,
            peers_active=self._peers_active,
            drawn=self._nudge,
            used=self._admission.used,
            held=self._admission.held,
            alone=self._engine.alone,
            step=self._step(supervisor),
            merge=self._adoption(self._merger).next if self._merger is not None else None,
            probe=functools.partial(self._probe, supervisor) if supervisor is not None else None,
            broadcast=self._engine.update,
            evaluate=self._evaluate,
            save=self._save,
            compute=self._runtime.compute,
            clock=self._runtime.clock,
            bus=self._runtime.bus,
            gauge=self._gauges["train"],
            weight_gauge=self._gauges["weight"],
            finished=self.finished,
        )

    def _stages(self) -> Stages:
        stages = {
            "rollout": self._rollout.run(self._generator(self._lineage)),
            "train": self._train().run(),
            "end": self._end_when_finished(),
        }
        if self._collector is not None:
            stages |= {"verify": self._verify().run(), "collect": self._collector.run()}
        if self._publisher is not None:
            stages["publish"] = self._publisher.run()
        if self._merger is not None:
            stages["merge"] = self._merger.run()
        return stages

    # --- life ---------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        if self._saved_version:
            self._runtime.notice(
                NoticeLevel.INFO, f"goes on from the checkpoint of version {self._saved_version}"
            )
        if self._publisher is not None and self._sharing is not None:
            await self._publisher.resume(self._parts.engine, self._run_dir.published)
            if self.config.merge.enabled:
                self._merger = Merger(
                    self._runtime,
                    self._membership,
                    await self._base.get(),
                    self._publisher,
                    self._engine,
                    self._sharing,
                    self.config.merge,
                )
                self._gauges["merge"] = self._merger.gauge

    async def _end(self) -> None:
        await self._save()

    def _close(self) -> None:
        if self._sharing is not None:
            self._sharing.close()

    async def _end_when_finished(self) -> None:
        await self.finished.wait()
        if not self.config.linger:
            self._stop.set()

    def _steps(self) -> int:
        return self._learner.trainer.steps

    # --- what stages call ---------------------------------------------------------------------------------

    async def _publish(self, own: Accepted, body: bytes) -> None:
        if self._network is not None and self._collector is not None and not self._engine.not_sharing:
            self._verifier.observe_own(own)
            await self._network.publisher.publish(own, body)
            self._collector.nudge()

    async def _evaluate(self, moment: str) -> None:
        report = await self._runtime.run(Lane.EVALUATE, self._held_out.evaluate)
        self._runtime.emit(
            Evaluated(
                at=self._runtime.now_ms(),
                policy_version=report.policy_version,
                moment=moment,
                prompts=report.prompts,
                sampled=report.sampled,
                greedy=report.greedy,
                sampled_tasks=report.sampled_tasks,
                greedy_tasks=report.greedy_tasks,
                evaluate_s=report.evaluate_s,
            )
        )

    async def _probe(self, supervisor: Supervisor) -> RollBack | None:
        """What was undone because the engine's weights, the trainer's, answer held-out prompts worse than
        earlier ones did. The engine has the earlier ones then."""
        rewards = await self._runtime.run(
            Lane.EVALUATE, self._held_out.rewards, self.config.supervise.probe_prompts
        )
        undone = await self._runtime.run(Lane.TRAIN, supervisor.probe, rewards)
        if undone is not None:
            await self._engine.replace(None, anchor=False)
        return undone

    async def _save(self) -> None:
        """Checkpoint, of a version that has none, and trust to disk. A full disk costs that, not the run."""
        standings = self._peers.standings()
        try:
            await self._runtime.run(Lane.TRAIN, self._write, standings)
        except OSError as error:
            version = self._learner.trainer.policy_version
            self._runtime.notice(
                NoticeLevel.WARNING, f"version {version} was not saved: {error}; make room on the disk"
            )

    def _write(self, standings: Sequence[Standing]) -> None:
        trainer, folder = self._learner.trainer, self._run_dir.checkpoints
        if trainer.policy_version != self._saved_version:
            save_checkpoint(trainer, folder / f"v{trainer.policy_version}")
            prune(folder, trainer.policy.base_model, self.config.train.keep_checkpoints)
            self._saved_version = trainer.policy_version
        self._keep(standings)

    def _wanted(self) -> int:
        """Groups the pool has need of."""
        if self._engine.not_sharing:
            return 0
        return STOCK_STEPS * self.config.train.external_groups - self._pool.unused()

    def _is_answered(self, prompt: PromptRef) -> bool:
        return OWN_SOURCE in self._answered.of(prompt.index)

    def _worth_keeping(self, heard: Heard) -> bool:
        """Counts an announcement; False when what it says already refuses it, or its author is in
        quarantine."""
        if self._network is not None:
            self._network.presence.seek(heard.sender)
        verdict = self._verifier.observe(heard.sender, heard.announcement, heard.arrived_at)
        if verdict.reason:
            self._peers.rejected(heard.sender, verdict.reason)
            if verdict.blames_author:
                self._peers.judged(heard.sender, Hardness.HARD)
            return False
        self._peers.announced(heard.sender, heard.announcement)
        return self._settled() and not self._peers.quarantined(heard.sender)

    def _settled(self) -> bool:
        connected_at = self._network.presence.first_connected_at if self._network is not None else None
        return connected_at is not None and self._runtime.now_ms() - connected_at >= SETTLE_MS

    def _nudge(self) -> None:
        if self._collector is not None:
            self._collector.nudge()

    def _peers_active(self) -> bool:
        """Whether it makes sense to wait for peers' groups; those in quarantine have none that we want."""
        return not self._engine.not_sharing and bool(self._peers.active())

    # --- events -------------------------------------------------------------------------------------------

    def _emit_weights(self) -> None:
        if self._publisher is not None:
            self._runtime.emit(self._publisher.seen())

    def _health_now(self) -> Health:
        return msgspec.structs.replace(
            super()._health_now(),
            bodies_fetched=self._collector.bodies_fetched if self._collector is not None else 0,
            checks=self._verifier.counts(),
            not_sharing=self._engine.not_sharing,
        )
