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
from collections.abc import Callable

import msgspec

from node.core import NodeCore, Stages
from node.events import Health, NoticeLevel
from node.membership import Membership
from node.open.parts import Parts
from node.open.stores import Stores
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.share.collect import Collector
from node.share.pool import ReplayPool
from node.supervise import StageGauge, resident_bytes
from node.train.checkpoints import Checkpoints
from node.train.evaluate import Evaluator, HeldOut
from node.train.stage import TrainStage
from node.train.stepper import open_stepper
from node.transport.base import Transport
from node.verify.lineage import OwnPolicy
from node.verify.pipeline import Verifier
from node.verify.stage import VerifyStage
from node.weight.own import OwnGroups
from node.weight.stage import WeightStage
from node.weights.chain.base import BaseWeights, base_bits
from node.weights.engine_sync import EngineSync, SyncSettings
from node.weights.merge.adopt import MergeAdoption
from node.weights.merge.merger import Merger
from node.weights.publish import Publisher
from node.weights.sharing import WeightsSharing
from protocol.messages import Lineage

__all__ = ["Node"]


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
        self._pool = ReplayPool(config.share.pool_groups, config.share.max_uses, self._runtime.rng)
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
        self._weight = WeightStage(
            runtime,
            membership,
            learner.settings.weight,
            parts.policy,
            OwnGroups(self._made, self._admission),
            self._pool,
            self._peers,
        )
        self._stepper = open_stepper(runtime, config, learner.trainer, self._engine)
        self._checkpoints = Checkpoints(runtime, membership, config, learner.trainer, self._peers)
        self._training = TrainStage(
            runtime,
            config,
            self._weight,
            self._stepper,
            Evaluator(runtime, self._held_out),
            self._checkpoints,
        )
        self._gauge(
            self._rollout.gauge,
            StageGauge("verify", self._runtime.clock, "fetched bodies"),
            StageGauge("share", self._runtime.clock, "offers", self._pool.capacity, lambda: len(self._pool)),
            self._weight.gauge,
            self._training.gauge,
            self._engine.gauge,
            *([StageGauge("merge", self._runtime.clock, "the next round")] if config.merge.enabled else []),
        )
        self._verifier = Verifier(
            self._membership,
            self._peers,
            self._universe.item,
            parts.sandbox,
            learner.decoders,
            own=OwnPolicy(self._lineage, parts.policy, parts.engine),
            enabled=config.verify.enabled,
        )
        self._collector: Collector | None = None
        self._verify: VerifyStage | None = None
        if self._network is not None:
            self._collector = Collector(
                self._runtime,
                self._peers,
                self._network.gossip,
                self._pool,
                self._verifier,
                self._engine,
                config,
            )
            self._verify = VerifyStage(
                self._runtime, self._peers, self._collector.fetched, self._verifier, self._pool
            )
            self._gauges |= {"verify": self._verify.gauge, "share": self._collector.gauge}

    @property
    def finished(self) -> asyncio.Event:
        """Set once all steps are done and evaluated."""
        return self._training.finished

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    # --- wiring -------------------------------------------------------------------------------------------

    def _adoption(self, merger: Merger) -> MergeAdoption:
        return MergeAdoption(
            self._runtime, self._learner.trainer, self._engine, merger, self._held_out, self.config.merge
        )

    def _stages(self) -> Stages:
        stages = {
            "rollout": self._rollout.run(self._generator(self._lineage)),
            "train": self._training.run(),
            "end": self._end_when_finished(),
        }
        if self._collector is not None and self._verify is not None:
            stages |= {"verify": self._verify.run(), "collect": self._collector.run()}
        if self._publisher is not None:
            stages["publish"] = self._publisher.run()
        if self._merger is not None:
            stages["merge"] = self._merger.run()
        return stages

    # --- life ---------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        if self._checkpoints.saved_version:
            self._runtime.notice(
                NoticeLevel.INFO, f"goes on from the checkpoint of version {self._checkpoints.saved_version}"
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
                self._stepper.merges = self._adoption(self._merger)
                self._gauges["merge"] = self._merger.gauge

    async def _end(self) -> None:
        await self._checkpoints.save()

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
