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
from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import Tensor

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
from node.train.checkpoint import prune, save_checkpoint, take_weights
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
from node.weights.engine_sync import EngineBroadcast
from node.weights.merge.adopt import MergeAdoption
from node.weights.merge.merger import Merger
from node.weights.merge.resolve import MergeRule, Strategy
from node.weights.publish.owner import OwnerBroadcast
from node.weights.sharing import WeightsSharing
from protocol.messages import Digest, Lineage, PeerId, PromptRef, SignedLink

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
        self._broadcast_gauge = StageGauge("broadcast", self._runtime.clock, "a new version")
        self._engine = EngineBroadcast(
            learner.trainer,
            parts.engine,
            parts.policy,
            prompts=lambda: [prompt.text for prompt in self._held_out.prompts()],
            tolerance=config.rollout.parity_tolerance,
            probe_every=config.train.checkpoint_every,
            sequential=config.policy.sharing == "sequential",
            compute=self._runtime.compute,
            gauge=self._broadcast_gauge,
            notice=self._runtime.notice,
            proven=self._offer,
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
            self._broadcast_gauge,
            *([StageGauge("merge", self._runtime.clock, "the next round")] if config.merge.enabled else []),
        )
        self._held_out = HeldOut(
            parts.engine,
            parts.policy,
            self._universe,
            self._own_scorer.reward,
            per_task=config.evaluate.prompts_per_task,
            max_new_tokens=membership.charter.max_new_tokens,
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
        self._sharing: WeightsSharing | None = None
        self._owner: OwnerBroadcast | None = None
        self._merger: Merger | None = None
        if self._network is not None:
            self._collector = self._collect(self._network)
            self._sharing = self._share_weights(self._network)
            self._owner = self._own(self._network, self._sharing)

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

    def _own(self, network: Network, sharing: WeightsSharing) -> OwnerBroadcast:
        parts = self._parts
        return OwnerBroadcast(
            self._membership.identity,
            self._membership.swarm_id,
            self._lineage,
            parts.policy,
            self._learner.settings.adapter,
            sharing,
            anchor_every=self.config.broadcast.anchor_every,
            compute=self._runtime.compute,
            clock=self._runtime.clock,
            bus=self._runtime.bus,
            gauge=self._gauges["broadcast"],
            notice=self._runtime.notice,
            followers=lambda: len(network.members_of(self._lineage)),
        )

    def _merging(self, network: Network, sharing: WeightsSharing, owner: OwnerBroadcast) -> Merger:
        merge, base_model = self.config.merge, self._lineage.base_model
        return Merger(
            self._membership.identity,
            self._membership.swarm_id,
            self._lineage,
            *owner.base,
            network.transport,
            sharing.exchange,
            rule=MergeRule(
                strategy=Strategy(merge.strategy),
                window_ms=self._membership.charter.window_ms,
                max_age_windows=merge.max_age_windows,
                norm_limit=merge.norm_limit,
                trim=merge.trim,
                clip_radius=merge.clip_radius,
                clip_rounds=merge.clip_rounds,
                min_contributions=merge.min_contributions,
            ),
            every_windows=merge.every_windows,
            settle_s=merge.settle_s,
            fetch_timeout_s=self.config.broadcast.fetch_timeout_s,
            scratch=self._home.merge,
            contribute=lambda: self._contribute(owner),
            partners=lambda: network.trainers_of(base_model),
            admitted=self._may_merge,
            window=self._membership.window,
            failed=self._peers.refused,
            notice=self._runtime.notice,
            compute=self._runtime.compute,
            clock=self._runtime.clock,
            gauge=self._gauges["merge"],
        )

    def _adoption(self, merger: Merger) -> MergeAdoption:
        merge = self.config.merge
        return MergeAdoption(
            self._learner.trainer,
            self._parts.engine,
            self._engine,
            take=merger.take,
            rewards=lambda: self._held_out.rewards(merge.probe_prompts),
            confidence=merge.confidence,
            tolerance=merge.tolerance,
            compute=self._runtime.compute,
            clock=self._runtime.clock,
            bus=self._runtime.bus,
            notice=self._runtime.notice,
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
            broadcast=self._engine.broadcast,
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
        if self._owner is not None:
            stages["publish"] = self._owner.run()
        if self._merger is not None:
            stages["merge"] = self._merger.run()
        return stages

    # --- life ---------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        if self._saved_version:
            self._runtime.notice(
                NoticeLevel.INFO, f"goes on from the checkpoint of version {self._saved_version}"
            )
        if self._network is not None and self._sharing is not None and self._owner is not None:
            await self._continue_chain(self._owner)
            if self.config.merge.enabled:
                self._merger = self._merging(self._network, self._sharing, self._owner)

    async def _continue_chain(self, owner: OwnerBroadcast) -> None:
        """Where the published chain and this run part, go on so that the chain never goes back: with its
        newer weights where this run made it, else with the run's own weights as its next version."""
        trainer, mark = self._learner.trainer, self._run_dir.published
        left = await owner.open()
        if left is not None and left[0] >= trainer.policy_version:
            version, weights = left
            if weights is None or not mark.exists():
                if weights is not None:
                    text = f"another run published up to v{version}: this one begins at v{version + 1}"
                    self._runtime.notice(NoticeLevel.INFO, text)
                version, weights = version + 1, trainer.state_dict()
            elif version > trainer.policy_version:
                saved = f"the checkpoint of v{trainer.policy_version}" if trainer.policy_version else "new"
                text = f"goes on from v{version}, which was published; moments of the optimiser: {saved}"
                self._runtime.notice(NoticeLevel.INFO, text)
            if version > trainer.policy_version:
                await self._runtime.run(
                    Lane.TRAIN, take_weights, trainer, self._parts.engine, weights, version
                )
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        if owner.published < trainer.policy_version:
            owner.offer(trainer.policy_version, trainer.state_dict())

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

    def _offer(self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool = False) -> None:
        if self._owner is not None:
            self._owner.offer(policy_version, state, anchor=anchor)

    async def _contribute(self, owner: OwnerBroadcast) -> SignedLink | None:
        """For the next merge; once the engine has failed for good nothing, nor does what was given count."""
        if self._merger is not None and self._engine.not_sharing:
            self._merger.withdraw()
            return None
        return await owner.contribute()

    def _may_merge(self, author: PeerId) -> bool:
        """Whether an author's weights count in a merge here."""
        return self._peers.has_earned_trust(author)

    def _providers(self, root: Digest) -> Sequence[PeerId]:
        return self._merger.providers(root) if self._merger is not None else ()

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
        if self._owner is not None:
            self._runtime.emit(self._owner.seen())

    def _health_now(self) -> Health:
        return msgspec.structs.replace(
            super()._health_now(),
            bodies_fetched=self._collector.bodies_fetched if self._collector is not None else 0,
            checks=self._verifier.counts(),
            not_sharing=self._engine.not_sharing,
        )
