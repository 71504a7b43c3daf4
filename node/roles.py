"""The two roles of a node, wired: which services a trainer has, and which a follower has.

    Parts, Runtime, Membership, Stores, network --> `Common` --> `open_trainer`, `open_follower` --> services

Nothing is decided here: every service is given the objects that it asks. The flow is drawn in `node.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from node.events import Health, PeersSeen
from node.membership import Membership
from node.network import Network
from node.open.parts import Learner, Parts
from node.open.policy import adapter_of
from node.open.stores import Stores
from node.peers.book import PeerBook
from node.peers.trust import TrustSettings
from node.rollout.admission import Admission
from node.rollout.engine.parity import tolerance_of
from node.rollout.generate import Generator
from node.rollout.prompts import PromptFeed, Universe
from node.rollout.scoring import OwnScorer
from node.rollout.stage import RolloutStage
from node.runtime import Runtime
from node.service import Service
from node.share.accepted import Accepted
from node.share.collect import Collector
from node.share.own import OwnSharing, Publish, Sharing, keep_to_oneself
from node.share.pool import ReplayPool
from node.state.paths import Home
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
from node.weights.follow.follower import Follower
from node.weights.follow.probe import FollowerProbe
from node.weights.follow.rollouts import FollowerRollouts
from node.weights.merge.adopt import MergeAdoption
from node.weights.merge.merger import Merger
from node.weights.publish import VersionPublisher
from node.weights.sharing import WeightsSharing
from protocol.errors import ConfigError
from protocol.messages import Lineage

__all__ = ["Common", "FollowerRole", "TrainerRole", "open_follower", "open_trainer"]


class Common:
    """What every node has, whatever its role."""

    def __init__(
        self,
        parts: Parts,
        runtime: Runtime,
        membership: Membership,
        stores: Stores,
        transport: Transport | None,
    ) -> None:
        config = parts.config
        self.parts = parts
        self.runtime = runtime
        self.membership = membership
        self.transport = transport
        self.home = Home(config.home)
        self.run_dir = self.home.run(config.run)
        self.closing = contextlib.AsyncExitStack()
        """Closes at the end what was opened, the last one first."""
        weight, rollout = config.weight, config.rollout
        trust = TrustSettings(newcomer=weight.newcomer_trust, quarantine_windows=weight.quarantine_windows)
        refusals = transport.refusals if transport is not None else None
        self.peers = PeerBook(runtime, membership, trust, stores.standings, refusals=refusals)
        self.trust_file = stores.trust
        self.universe = Universe(membership.swarm_id, membership.charter, parts.host)
        self.scorer = OwnScorer(parts.host)
        self.feed = PromptFeed(runtime, membership, self.universe, stores.windows)
        self.admission = Admission(rollout.max_staleness, config.train.local_groups, rollout.token_budget)
        self.made: asyncio.Queue[Accepted] = asyncio.Queue(2 * config.train.local_groups)
        """Own groups, scored."""
        self.network: Network | None = None
        if transport is not None:
            sequence, replay = stores.sequence, stores.replay
            self.network = Network(
                runtime, membership, self.peers, transport, config, sequence=sequence, replay=replay
            )

    def open_rollout(self, publish: Publish, awake: asyncio.Event | None = None) -> RolloutStage:
        """The rollout stage, which gives each own group to `publish`, too."""
        in_flight = self.parts.config.rollout.max_in_flight
        return RolloutStage(
            self.runtime, self.feed, self.admission, self.made, publish, max_in_flight=in_flight, awake=awake
        )

    def generator(self, lineage: Lineage) -> Generator:
        """What makes this node's groups of `lineage`."""
        parts = self.parts
        return Generator(self.membership, lineage, parts.policy, parts.engine, self.scorer, parts.config)

    def open_sharing(self, network: Network) -> WeightsSharing:
        """What weights travel by; closed after the network."""
        sharing = WeightsSharing(
            self.runtime, self.membership, network, self.peers, self.parts.config.broadcast, self.home
        )
        self.closing.push_async_callback(network.transport.close)
        return sharing

    def rollout_service(
        self, rollout: RolloutStage, run: Callable[[], Coroutine[Any, Any, None]], sharing: Sharing
    ) -> Service:
        """Generation by `run`, and whether its groups may be shared."""
        return Service(
            name="rollout",
            run=run,
            gauges=(rollout.gauge,),
            health=lambda health: replace(
                health,
                sandbox_restarts=self.parts.host.restarts,
                host_waited_s=self.parts.host.waited_s,
                unshared=rollout.unshared,
                not_sharing=sharing.not_sharing,
            ),
        )

    def network_services(self) -> list[Service]:
        """Gossip and presence, and what they tell; nothing for a node that is alone."""
        network = self.network
        if network is None:
            return []

        def peers_seen() -> Sequence[PeersSeen]:
            presence, tokenizer = network.presence, self.parts.policy.tokenizer_digest
            table = self.peers.table(presence.links, presence.known, tokenizer)
            return (PeersSeen(at=self.runtime.now_ms(), peers=table),)

        def health(health: Health) -> Health:
            return replace(
                health,
                transport_restarts=network.transport.restarts,
                refused=self.peers.refusals(),
                announced=network.publisher.announced,
                bodies_served=network.publisher.bodies_served,
            )

        services = [
            Service(name="network", run=network.run, snapshot=peers_seen, last=peers_seen, health=health)
        ]
        if (path := self.trust_file) is not None:
            services.append(
                Service(name="trust", run=lambda: self.peers.keep(path), stop=lambda: self.peers.save(path))
            )
        return services


# --- a trainer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerRole:
    """A node that trains."""

    lineage: Lineage
    """What this node trains."""
    services: Sequence[Service]
    """In the order of the flow."""
    finished: asyncio.Event
    """Set once all steps are done and evaluated."""
    steps: Callable[[], int]
    """How many steps were made in this run."""
    rollout: RolloutStage
    held_out: HeldOut
    engine: EngineSync
    publisher: VersionPublisher | None
    """None without a network."""


async def open_trainer(common: Common, learner: Learner) -> TrainerRole:
    """Wire a trainer. Loads the base model's weights where merges need them."""
    parts, runtime, membership = common.parts, common.runtime, common.membership
    config, trainer = parts.config, learner.trainer
    lineage = Lineage(membership.peer_id, parts.policy.base_model, parts.policy.tokenizer_digest)
    held_out = HeldOut(
        parts.engine,
        parts.policy,
        common.universe,
        common.scorer.rewards,
        per_task=config.evaluate.prompts_per_task,
        max_new_tokens=membership.charter.max_new_tokens,
    )
    base = BaseWeights(runtime, functools.partial(base_bits, parts.policy, learner.settings.adapter))
    publisher = None
    if common.network is not None:
        publisher = VersionPublisher(
            runtime, membership, lineage, trainer, base, common.open_sharing(common.network)
        )
    settings = SyncSettings(
        tolerance=config.rollout.parity_tolerance or tolerance_of(parts.engine.dtype),
        probe_every=config.train.checkpoint_every,
        sequential=config.policy.sharing == "sequential",
    )
    engine = EngineSync(runtime, trainer, parts.engine, held_out, publisher, settings)
    pool = ReplayPool(config.share.pool_groups, config.share.max_uses, runtime.rng)
    own = OwnGroups(common.made, common.admission)
    weight = WeightStage(runtime, membership, learner.settings.weight, parts.policy, own, pool, common.peers)
    stepper = open_stepper(runtime, config, trainer, engine)
    checkpoints = Checkpoints(runtime, config, trainer)
    train = TrainStage(runtime, config, weight, stepper, Evaluator(runtime, held_out), checkpoints)
    publish: Publish = keep_to_oneself
    share: list[Service] = []
    weights: list[Service] = []
    if common.network is not None and publisher is not None:
        verifier = Verifier(
            membership,
            common.peers,
            common.universe.item,
            parts.host,
            learner.decoders,
            own=OwnPolicy(lineage, parts.policy, parts.engine),
            enabled=config.verify.enabled,
        )
        publish = OwnSharing(common.network.publisher, engine, verifier.observe_own).publish
        share = _share_services(common, common.network, verifier, engine, pool)
        weights = [_publish_service(common, publisher)]
        if config.merge.enabled:
            merger = Merger(
                runtime, membership, await base.get(), publisher, engine, publisher.sharing, config.merge
            )
            stepper.merges = MergeAdoption(runtime, trainer, engine, merger, held_out, config.merge)
            weights.append(Service(name="merge", run=merger.run, gauges=(merger.gauge,)))
    rollout = common.open_rollout(publish, engine.awake)
    return TrainerRole(
        lineage=lineage,
        services=(
            common.rollout_service(rollout, lambda: rollout.run(common.generator(lineage)), engine),
            *share,
            Service(
                name="train",
                run=train.run,
                finishes=True,
                gauges=(weight.gauge, train.gauge, engine.gauge),
                start=checkpoints.start,
                stop=checkpoints.save_last,
            ),
            *weights,
        ),
        finished=train.finished,
        steps=lambda: trainer.steps,
        rollout=rollout,
        held_out=held_out,
        engine=engine,
        publisher=publisher,
    )


def _share_services(
    common: Common, network: Network, verifier: Verifier, engine: EngineSync, pool: ReplayPool
) -> list[Service]:
    """Others' groups on their way into the pool."""
    runtime, peers = common.runtime, common.peers
    collector = Collector(runtime, peers, network.gossip, pool, verifier, engine, common.parts.config)
    verify = VerifyStage(runtime, peers, collector.fetched, verifier, pool)
    return [
        Service(
            name="verify",
            run=verify.run,
            gauges=(verify.gauge,),
            health=lambda health: replace(health, checks=verifier.counts()),
        ),
        Service(
            name="collect",
            run=collector.run,
            gauges=(collector.gauge,),
            health=lambda health: replace(health, bodies_fetched=collector.bodies_fetched),
        ),
    ]


def _publish_service(common: Common, publisher: VersionPublisher) -> Service:
    return Service(
        name="publish",
        run=publisher.run,
        start=lambda: publisher.resume(common.parts.engine, common.run_dir.published),
        snapshot=lambda: (publisher.seen(),),
    )


# --- a follower ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FollowerRole:
    """A node that generates with the weights of another one."""

    services: Sequence[Service]
    """In the order of the flow."""
    finished: asyncio.Event
    """Never set: a follower runs until it is stopped."""
    steps: Callable[[], int]
    """How many versions the engine was given in this run."""
    rollout: RolloutStage
    following: Follower
    """Which owner's weights the engine has."""


def open_follower(common: Common) -> FollowerRole:
    """Wire a follower. Raises ConfigError without a network."""
    parts, runtime, config = common.parts, common.runtime, common.parts.config
    if common.network is None:
        raise ConfigError("role 'follower' has nobody to follow with network.transport 'none'")
    adapter = adapter_of(config)
    probe = FollowerProbe(
        parts.engine,
        parts.policy,
        adapter,
        prompt=lambda number: common.universe.item(number).text,
        tolerance=config.rollout.parity_tolerance or tolerance_of(parts.engine.dtype),
    )
    rollout = common.open_rollout(OwnSharing(common.network.publisher, probe).publish)
    rollouts = FollowerRollouts(rollout, common.admission, common.made, common.generator)
    base = BaseWeights(runtime, functools.partial(base_bits, parts.policy, adapter))
    sharing = common.open_sharing(common.network)
    following = Follower(runtime, probe, base, sharing, rollouts, config.follow)
    return FollowerRole(
        services=(
            common.rollout_service(rollout, rollouts.run, probe),
            Service(
                name="follow",
                run=following.run,
                gauges=(following.gauge,),
                snapshot=lambda: (following.seen(),),
            ),
        ),
        finished=asyncio.Event(),
        steps=lambda: following.versions,
        rollout=rollout,
        following=following,
    )
