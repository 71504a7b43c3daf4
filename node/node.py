"""One node, wired. Six stages in the order of the flow; this file only connects them.

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
    TRAIN    batch -> L_own + sum lambda_src L_src -> step -> policy_version + 1
             waits: own groups (unblocked by ROLLOUT); with one device for both the engine sleeps meanwhile
                        |
    BROADCAST  new weights -> engine, in place -> probe (D7); the end of a step unblocks ROLLOUT's admission

Backpressure: ROLLOUT runs at most `max_staleness` versions ahead of TRAIN (`admission.py`; a step gives its
groups' room back, whether it made a version or not); everything else is a bounded queue, pool or book. An
author whose bodies do not come rests, so that stalling peers do not stop SHARE.collect. Losing the network is
never fatal: SHARE waits, the rest goes on. An engine that fails its probe for good ends sharing in both
directions (`broadcast/engine.py`), not the run. A stage that raises ends the node with that error: peers'
errors were caught and counted at their boundary.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node.broadcast.engine import EngineBroadcast
from node.clock import Clock
from node.compute import Compute
from node.config import NodeConfig
from node.events import Evaluated, EventBus, Health, NodeStarted, NodeStopped, Notice, PeersSeen, StagesSeen
from node.paths import Home
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine
from node.rollout.environment import Environment
from node.rollout.policy import Policy
from node.rollout.prompts import PromptFeed, Universe, WindowLog
from node.rollout.reuse import ReuseBook
from node.rollout.scoring import OwnScorer
from node.rollout.worker import OwnGroup, RolloutWorker
from node.sandbox.scorer import Scorer
from node.sandbox.strength import describe
from node.share.collect import Collector, Fetched
from node.share.gossip import Gossip, GossipLimits, Heard
from node.share.peers import PeerBook
from node.share.pool import ReplayPool
from node.share.presence import Presence
from node.share.publish import Publisher
from node.state import ReplayGuard, SequenceSource
from node.supervise import LoopLag, StageGauge, run_stages
from node.train.checkpoint import prune, save_checkpoint
from node.train.evaluate import HeldOut
from node.train.groups import OWN_SOURCE
from node.train.settings import TrainSettings
from node.train.stage import StagePlan, TrainStage
from node.train.step import Trainer
from node.transport.base import Transport
from node.transport.limits import Refusals
from node.verify.pipeline import Verifier
from node.verify.schema import max_body_bytes
from node.verify.stage import VerifyStage
from node.verify.tokens import Decode
from node.weight.answered import AnsweredPrompts
from node.weight.trust import Hardness, Standing, TrustBook, TrustSettings, save_standings
from protocol.charter import swarm_id
from protocol.constants import PROTOCOL_VERSION
from protocol.identity import Identity
from protocol.messages import Charter, Digest, Lineage, PeerId, PeerRecord, PromptRef, RolloutGroup, Sampling
from protocol.prompts import window_of

__all__ = ["Node", "NodeParts"]

SNAPSHOT_S = 0.5
HEALTH_S = 1.0
STOCK_STEPS = 2
"""Unused groups kept in the pool, in steps' worth of external groups: enough to choose, little to grow
stale."""
ACTIVE_WINDOWS = 3
"""Peers silent for longer are not waited for."""
SETTLE_MS = 3000
"""After its first connection a node hears the past by reconciliation, in no order: of a copy and its original
either may come first. What is heard until then is evidence for the copy check, and not fetched."""


@dataclass(frozen=True)
class NodeParts:
    """What a node is made of; `node/main.py` makes real ones, the simulation seeded ones."""

    identity: Identity
    charter: Charter
    policy: Policy
    settings: TrainSettings
    trainer: Trainer
    engine: Engine
    environments: Mapping[str, Environment]
    sandbox: Scorer
    decoders: Mapping[Digest, Decode]
    transport: Transport | None
    """Started; the node closes it. None: train alone."""
    sequence: SequenceSource
    replay: ReplayGuard
    windows: WindowLog
    standings: Sequence[Standing]
    """What is remembered of peers' conduct."""
    clock: Clock
    compute: Compute
    bus: EventBus
    rss_bytes: Callable[[], int]
    """Resident memory of this process; a constant in simulations."""


class Node:
    """All stages of one node. `run` returns when the steps are done (or `stop` was called) and all is
    closed."""

    def __init__(self, config: NodeConfig, parts: NodeParts) -> None:
        self.config = config
        self._parts = parts
        self._charter = parts.charter
        self._swarm_id = swarm_id(parts.charter)
        self._peer_id = parts.identity.peer_id
        self._clock, self._bus, self._compute = parts.clock, parts.bus, parts.compute
        self._lineage = Lineage(
            owner=self._peer_id, base_model=parts.policy.base_model, tokenizer=parts.policy.tokenizer_digest
        )
        self._stop = asyncio.Event()
        self.finished = asyncio.Event()
        """Set once all steps are done and evaluated."""
        self._reason = "steps done"
        self._refused = Refusals()
        self._lag = LoopLag()
        self._home = Home(config.home)
        self._run_dir = self._home.run(config.run)
        self._first_version = self._saved_version = parts.trainer.policy_version

        rng = random.Random(config.seed)
        self._peers = PeerBook(self._lineage.tokenizer)
        self._trust = TrustBook(
            TrustSettings(
                newcomer=config.weight.newcomer_trust, quarantine_windows=config.weight.quarantine_windows
            ),
            parts.standings,
        )
        self._answered = AnsweredPrompts()
        self._pool = ReplayPool(config.share.pool_groups, config.share.max_uses, rng)
        self._pooled = asyncio.Event()
        self._own: asyncio.Queue[OwnGroup] = asyncio.Queue(2 * config.train.local_groups)
        self._fetched: asyncio.Queue[Fetched] = asyncio.Queue(config.verify.queue)
        self._admission = Admission(
            config.rollout.max_staleness, config.train.local_groups, config.rollout.token_budget
        )
        self._worker: RolloutWorker | None = None
        self._gauges = {
            gauge.stage: gauge
            for gauge in (
                StageGauge("rollout", self._clock, "the trainer", self._own.maxsize, self._own.qsize),
                StageGauge(
                    "verify", self._clock, "fetched bodies", self._fetched.maxsize, self._fetched.qsize
                ),
                StageGauge("share", self._clock, "offers", self._pool.capacity, lambda: len(self._pool)),
                StageGauge("weight", self._clock, "a step"),
                StageGauge("train", self._clock, "own groups"),
                StageGauge("broadcast", self._clock, "a new version"),
            )
        }
        self._universe = Universe(self._swarm_id, self._charter, parts.environments)
        self._own_scorer = OwnScorer(parts.environments, parts.sandbox)
        self._held_out = HeldOut(
            parts.engine,
            parts.policy,
            self._universe,
            self._own_scorer.reward,
            per_task=config.evaluate.prompts_per_task,
            max_new_tokens=parts.charter.max_new_tokens,
        )
        self._verifier = Verifier(
            self._charter,
            self._swarm_id,
            clock=self._clock,
            compute=self._compute,
            item_at=self._universe.item,
            scorer=parts.sandbox,
            decoders=parts.decoders,
            policy=parts.policy,
            engine=parts.engine,
            enabled=config.verify.enabled,
        )
        self._engine = EngineBroadcast(
            parts.trainer,
            parts.engine,
            parts.policy,
            prompts=lambda: [prompt.text for prompt in self._held_out.prompts()],
            tolerance=config.rollout.parity_tolerance,
            probe_every=config.train.checkpoint_every,
            sequential=config.policy.sharing == "sequential",
            compute=self._compute,
            gauge=self._gauges["broadcast"],
            notice=self._notice,
        )
        self._gossip: Gossip | None = None
        self._publisher: Publisher | None = None
        self._presence: Presence | None = None
        self._collector: Collector | None = None
        if parts.transport is not None:
            self._wire_network(parts.transport, rng)

    # --- wiring -------------------------------------------------------------------------------------------

    def _wire_network(self, transport: Transport, rng: random.Random) -> None:
        config, parts = self.config, self._parts
        self._gossip = Gossip(
            transport,
            parts.identity,
            self._charter,
            self._clock,
            parts.sequence.next,
            replay=parts.replay,
            limits=GossipLimits(reconcile_interval_s=config.network.reconcile_s),
            rng=rng,
        )
        self._publisher = Publisher(
            transport,
            self._gossip,
            keep_bodies=config.share.keep_bodies,
            ttl_ms=(self._charter.rules.max_age_windows + 1) * self._charter.window_ms,
        )
        self._presence = Presence(
            transport,
            parts.identity,
            self._charter,
            self._clock,
            record=self._record,
            next_sequence=parts.sequence.next,
            bootstraps=config.network.bootstraps,
            refused=self._refuse,
            notice=self._notice,
        )
        self._collector = Collector(
            transport,
            self._gossip,
            queue=self._fetched,
            gauge=self._gauges["share"],
            parallel=config.share.fetch_parallel,
            timeout_s=config.share.fetch_timeout_s,
            clock=self._clock,
            wanted=self._wanted,
            waiting_of=self._pool.unused,
            answered=self._is_answered,
            worth_keeping=self._worth_keeping,
            still_fresh=lambda heard: self._verifier.is_fresh(heard.sender, heard.announcement),
            failed=self._refuse,
        )

    def _rollout(self) -> RolloutWorker:
        parts, config = self._parts, self.config
        return RolloutWorker(
            author=self._peer_id,
            lineage=self._lineage,
            policy=parts.policy,
            engine=parts.engine,
            scorer=self._own_scorer,
            feed=PromptFeed(
                self._universe, self._charter, self._swarm_id, self._peer_id, self._clock, parts.windows
            ),
            admission=self._admission,
            sampling=Sampling(
                max_new_tokens=self._charter.max_new_tokens,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
            ),
            group_size=self._charter.group_size,
            groups_per_batch=config.train.local_groups,
            seed=config.seed,
            compute=self._compute,
            clock=self._clock,
            bus=self._bus,
            gauge=self._gauges["rollout"],
            out=self._own,
            publish=self._publish,
            max_body_bytes=max_body_bytes(self._charter),
            max_in_flight=config.rollout.max_in_flight,
            reuse=ReuseBook(config.rollout.reuse_lenience, top_p=config.rollout.top_p)
            if config.rollout.reuse_lenience
            else None,
            awake=self._engine.awake,
            too_old=self._too_old,
        )

    def _verify(self) -> VerifyStage:
        return VerifyStage(
            self._verifier,
            queue=self._fetched,
            pool=self._pool,
            trust=self._trust,
            peers=self._peers,
            answered=self._answered,
            window=self._window,
            clock=self._clock,
            bus=self._bus,
            gauge=self._gauges["verify"],
            pooled=self._pooled,
        )

    def _train(self) -> TrainStage:
        parts, train = self._parts, self.config.train
        return TrainStage(
            parts.trainer,
            parts.policy,
            parts.settings,
            StagePlan(
                steps=train.steps,
                local_groups=train.local_groups,
                external_groups=train.external_groups,
                external_wait_s=train.external_wait_s,
                evaluate_every=self.config.evaluate.every,
                checkpoint_every=train.checkpoint_every,
            ),
            own=self._own,
            pool=self._pool,
            pooled=self._pooled,
            peers=self._peers,
            trust=self._trust,
            answered=self._answered,
            rules=self._charter.rules,
            window=self._window,
            peers_active=self._peers_active,
            drawn=self._nudge,
            used=self._admission.used,
            held=self._admission.held,
            alone=self._engine.alone,
            broadcast=self._engine.broadcast,
            evaluate=self._evaluate,
            save=self._save,
            compute=self._compute,
            clock=self._clock,
            bus=self._bus,
            gauge=self._gauges["train"],
            weight_gauge=self._gauges["weight"],
            finished=self.finished,
        )

    # --- life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, work, stop. Raises what a stage raised."""
        began_s = self._clock.monotonic_s()
        transport = self._parts.transport
        self._bus.emit(self._started(transport))
        if self._first_version:
            self._notice("info", f"goes on from the checkpoint of version {self._first_version}")
        self._worker = self._rollout()
        stages = {
            "rollout": self._worker.run(),
            "train": self._train().run(),
            "end": self._end_when_finished(),
            "snapshots": self._snapshots(),
            "health": self._health(),
            "lag": self._lag.run(),
        }
        if self._gossip and self._presence and self._collector:
            stages |= {
                "verify": self._verify().run(),
                "gossip": self._gossip.run(),
                "presence": self._presence.run(),
                "collect": self._collector.run(),
            }
        try:
            await run_stages(stages, until=self._stop)
            await self._save()
        except BaseException as error:
            self._reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if transport is not None:
                await transport.close()
            wall_s = self._clock.monotonic_s() - began_s
            self._emit_peers()
            self._bus.emit(self._health_now())
            self._bus.emit(
                NodeStopped(
                    at=self._clock.now_ms(),
                    reason=self._reason,
                    steps=self._parts.trainer.policy_version - self._first_version,
                    wall_s=wall_s,
                )
            )

    def stop(self, reason: str) -> None:
        """End the run; `run` then closes everything and returns."""
        self._reason = reason
        self._stop.set()

    async def _end_when_finished(self) -> None:
        await self.finished.wait()
        if not self.config.linger:
            self._stop.set()

    # --- what stages call ---------------------------------------------------------------------------------

    async def _publish(self, group: RolloutGroup) -> None:
        if self._publisher is not None and self._collector is not None and not self._engine.not_sharing:
            self._verifier.observe_own(group)
            await self._publisher.publish(group)
            self._collector.nudge()

    def _too_old(self, prompt: PromptRef) -> bool:
        """Whether peers would refuse a group of this slot for its age."""
        return int(self._window()) - prompt.window > self._charter.rules.max_age_windows

    async def _evaluate(self, moment: str) -> None:
        report = await self._compute.run("evaluate", self._held_out.evaluate)
        self._bus.emit(
            Evaluated(
                at=self._clock.now_ms(),
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

    async def _save(self) -> None:
        """Checkpoint, of a version that has none, and trust to disk. A full disk costs that, not the run."""
        standings = self._trust.standings()
        try:
            await self._compute.run("train", self._write, standings)
        except OSError as error:
            version = self._parts.trainer.policy_version
            self._notice("warning", f"version {version} was not saved: {error}; make room on the disk")

    def _write(self, standings: Sequence[Standing]) -> None:
        trainer, folder = self._parts.trainer, self._run_dir.checkpoints
        if trainer.policy_version != self._saved_version:
            save_checkpoint(trainer, folder / f"v{trainer.policy_version}")
            prune(folder, trainer.policy.base_model, self.config.train.keep_checkpoints)
            self._saved_version = trainer.policy_version
        save_standings(self._home.state / "trust.json", self._swarm_id, standings)

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
        if self._presence is not None:
            self._presence.seek(heard.sender)
        verdict = self._verifier.observe(heard.sender, heard.announcement, heard.arrived_at)
        if verdict.reason:
            self._peers.rejected(heard.sender, verdict.reason)
            if verdict.blames_author:
                self._trust.record(heard.sender, Hardness.HARD, self._window())
            return False
        self._peers.announced(heard.sender, heard.announcement, self._clock.now_ms())
        return self._settled() and not self._trust.quarantined(heard.sender, self._window())

    def _settled(self) -> bool:
        connected_at = self._presence.first_connected_at if self._presence is not None else None
        return connected_at is not None and self._clock.now_ms() - connected_at >= SETTLE_MS

    def _nudge(self) -> None:
        if self._collector is not None:
            self._collector.nudge()

    def _peers_active(self) -> bool:
        """Whether it makes sense to wait for peers' groups; those in quarantine have none that we want."""
        window = self._window()
        return not self._engine.not_sharing and self._peers.active_since(
            self._clock.now_ms() - ACTIVE_WINDOWS * self._charter.window_ms,
            ignored=lambda peer_id: self._trust.quarantined(peer_id, window),
        )

    def _window(self) -> float:
        """Swarm time in windows, with the fraction of the current one."""
        now_ms = self._clock.now_ms()
        inside_ms = (now_ms - self._charter.created_at) % self._charter.window_ms
        return window_of(self._charter, now_ms) + inside_ms / self._charter.window_ms

    def _record(self) -> PeerRecord:
        transport = self._parts.transport
        return PeerRecord(
            name=self.config.name,
            protocol_version=PROTOCOL_VERSION,
            addresses=transport.addresses()[:16] if transport is not None else (),
            lineage=self._lineage,
        )

    def _refuse(self, peer_id: PeerId, reason: str) -> None:
        self._refused.add(peer_id, reason)
        self._peers.rejected(peer_id, reason)

    def _notice(self, level: str, text: str) -> None:
        self._bus.emit(Notice(at=self._clock.now_ms(), level=level, text=text))

    # --- events -------------------------------------------------------------------------------------------

    def _started(self, transport: Transport | None) -> NodeStarted:
        return NodeStarted(
            at=self._clock.now_ms(),
            name=self.config.name,
            peer_id=self._peer_id,
            swarm=self._charter.name,
            swarm_id=self._swarm_id,
            addresses=transport.addresses() if transport is not None else (),
            model=str(self._parts.policy.path),
            params=self._parts.policy.params,
            engine=self._parts.engine.name,
            sandbox=describe(self._parts.sandbox.report),
            run_dir=str(self._run_dir.root),
        )

    async def _snapshots(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            self._bus.emit(
                StagesSeen(
                    at=now_ms,
                    stages=tuple(gauge.status() for gauge in self._gauges.values()),
                    rollouts_in_flight=self._worker.in_flight if self._worker is not None else 0,
                    tokens_sampled=self._worker.sampled if self._worker is not None else 0,
                )
            )
            self._emit_peers()
            await asyncio.sleep(SNAPSHOT_S)

    def _emit_peers(self) -> None:
        if self._presence is not None:
            window = self._window()
            table = self._peers.table(
                self._presence.connected,
                dict(self._presence.known),
                lambda peer_id: self._trust.trust(peer_id, window),
            )
            self._bus.emit(PeersSeen(at=self._clock.now_ms(), peers=table))

    async def _health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            self._bus.emit(self._health_now())

    def _health_now(self) -> Health:
        refused = Counter(self._refused.counters())
        sources: list[Callable[[], dict[tuple[PeerId, str], int]]] = []
        if self._parts.transport is not None:
            sources.append(self._parts.transport.counters)
        if self._gossip is not None:
            sources.append(self._gossip.counters)
        for counters in sources:
            refused.update(counters())
        by_reason: Counter[str] = Counter()
        for (_, reason), count in refused.items():
            by_reason[reason] += count
        return Health(
            at=self._clock.now_ms(),
            loop_lag_p99_s=self._lag.p99_s(),
            rss_bytes=self._parts.rss_bytes(),
            transport_restarts=self._parts.transport.restarts if self._parts.transport is not None else 0,
            sandbox_restarts=self._parts.sandbox.restarts,
            refused=dict(sorted(by_reason.items())),
            announced=self._publisher.announced if self._publisher is not None else 0,
            bodies_fetched=self._collector.bodies_fetched if self._collector is not None else 0,
            bodies_served=self._publisher.bodies_served if self._publisher is not None else 0,
            checks=self._verifier.counts(),
            unshared=self._worker.unshared if self._worker is not None else 0,
            not_sharing=self._engine.not_sharing,
        )
