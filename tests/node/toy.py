"""Whole nodes, cheap: tiny random policies, a task that is scored in process, virtual time, one network.

The question of a seed is a number of six digits; a completion is worth 1 when its length is odd. Any policy
therefore gets mixed rewards at once, and no sandbox has to start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from node.clock import VirtualClock
from node.compute import Compute, InlineCompute
from node.config import NodeConfig, load_config
from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup, TrustedHost
from node.environment.records import Completion, Environment, Prompt, Score
from node.events import Event, EventBus
from node.membership import Membership
from node.node import Node, open_node
from node.open.parts import Learner, Parts
from node.open.stores import Stores, memory_stores
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.runtime import Runtime
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork, MemoryTransport
from node.weight.settings import WeightSettings
from protocol.charter import found, swarm_id
from protocol.messages import Charter
from protocol.records import record_validator
from tests.node.verify.world import identity

__all__ = [
    "COSTS_S",
    "TASK",
    "Toy",
    "ToyEnvironment",
    "ToyHost",
    "ToySwarm",
    "ToyTrouble",
    "make_charter",
    "trained_otherwise",
]

TASK = "toy/odd"
COSTS_S = {"generate": 0.1, "train": 0.2, "score": 0.005, "verify": 0.01, "evaluate": 0.1}

E = TypeVar("E", bound=Event)


class ToyTrouble(Exception):
    """What a test makes a stage raise."""


class ToyEnvironment:
    """See the module's docstring."""

    name = TASK
    evaluates_answers = False
    reproducible = True

    def prompt(self, seed: int, index: int) -> Prompt:
        return Prompt(TASK, f"{seed % 10**6:06d}", seed, index, {})

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(float(len(completion.text) % 2), ())


class ToyHost(TrustedHost):
    """Runs the toy task, or another one of its name, right here; `failure` makes scoring fail as told."""

    def __init__(self, environment: Environment | None = None) -> None:
        super().__init__({TASK: environment or ToyEnvironment()})
        self.failure: FailureReason | None = None

    def score(
        self, groups: Sequence[Answers], *, strangers: bool = False
    ) -> Sequence[ScoredGroup | HostFailure]:
        """See `TaskHost.score`."""
        if self.failure is not None:
            return [HostFailure(self.failure, "as told")] * len(groups)
        return super().score(groups, strangers=strangers)


def make_charter(policies: Sequence[Policy], created_at: int, **rules: Any) -> Charter:
    """A swarm in which half of a window's prompts are shared by any two nodes."""
    tokenizers = {policy.tokenizer_digest: policy for policy in policies}
    fields: dict[str, Any] = {
        "name": "toys",
        "environments": [{"name": TASK}],
        "tokenizers": [
            {
                "name": f"letters{number}",
                "digest": digest,
                "vocab_size": policy.vocab_size,
                "end_token_ids": [policy.eos_token_id],
            }
            for number, (digest, policy) in enumerate(sorted(tokenizers.items()))
        ],
        "group_size": 4,
        "max_new_tokens": 5,
        "window_ms": 2000,
        "universe_size": 64,
        "pool_size": 32,
        "slots_per_window": 16,
        "rules": {"max_logprob_gap": 50.0, "max_age_windows": 5},
    }
    return found(identity("founder"), fields | rules, created_at)


@dataclass
class Toy:
    """A node of the toy swarm and what it said."""

    node: Node
    parts: Parts
    membership: Membership
    stores: Stores
    transport: MemoryTransport | None
    events: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def peer_id(self) -> str:
        return self.membership.peer_id

    @property
    def trainer(self) -> Trainer:
        """Of a node that trains."""
        assert self.parts.learner is not None
        return self.parts.learner.trainer

    def of(self, kind: type[E]) -> list[E]:
        """All events of one type."""
        return [event for event in self.events if isinstance(event, kind)]


def trained_otherwise(parts: Parts, **changes: Any) -> Parts:
    """`parts` with other settings of the trainer."""
    assert parts.learner is not None
    settings = dataclasses.replace(parts.learner.settings, **changes)
    trainer = Trainer(parts.policy, settings)
    return dataclasses.replace(
        parts, learner=dataclasses.replace(parts.learner, settings=settings, trainer=trainer)
    )


class ToySwarm:
    """Nodes in one process. Use as an async context manager inside `run_virtual`."""

    def __init__(
        self,
        home: Path,
        policies: Sequence[Policy],
        *,
        seed: int = 0,
        link: str = "perfect",
        costs_s: Mapping[str, float] = COSTS_S,
        **rules: Any,
    ) -> None:
        self.home = home
        self.policies = policies
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed, LINKS[link], self.clock)
        self.costs_s = costs_s
        self.charter = make_charter(policies, self.clock.now_ms(), **rules)
        self.swarm_id = swarm_id(self.charter)
        self.tasks = ToyHost()
        self.toys: list[Toy] = []

    async def __aenter__(self) -> ToySwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        for toy in self.toys:
            if toy.task is not None and not toy.task.done():
                toy.node.stop("the test is over")
                with contextlib.suppress(ToyTrouble):
                    await toy.task

    def config(self, name: str, **settings: Any) -> NodeConfig:
        """Small and quick; `train__steps=3` sets `train.steps`."""
        defaults: dict[str, Any] = {
            "name": name,
            "home": self.home / name,
            "network.transport": "memory",
            "network.reconcile_s": 2.0,
            "train.steps": 5,
            "train.local_groups": 2,
            "train.external_groups": 2,
            "train.external_wait_s": 1.0,
            "train.checkpoint_every": 1000,
            "evaluate.prompts_per_task": 1,
            "evaluate.every": 1000,
        }
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        return load_config([], defaults | changes)

    async def add(
        self,
        name: str,
        policy: int = 0,
        *,
        bootstraps: Sequence[Toy] = (),
        connected: bool = True,
        change: Callable[[Parts], Parts] = lambda parts: parts,
        stores: Stores | None = None,
        compute: Compute | None = None,
        **settings: Any,
    ) -> Toy:
        """A node that is not running yet; with `role="follower"` one without a trainer. `change` may replace
        its parts."""
        addresses = tuple(f"/memory/p2p/{toy.peer_id}" for toy in bootstraps)
        config = self.config(name, network__bootstraps=addresses, **settings)
        membership = Membership(identity(name), self.charter, self.clock)
        transport = None
        if connected:
            validate = record_validator(membership.swarm_id, self.clock.now_ms)
            transport = self.network.transport(membership.peer_id, validate_record=validate)
            await transport.start()
        parts = change(self._parts(config, self.policies[policy]))
        runtime = Runtime(
            self.clock, compute or InlineCompute(self.costs_s), EventBus(), random.Random(config.seed)
        )
        stores = stores or memory_stores(self.clock.now_ms())
        node = await open_node(parts, runtime, membership, stores, transport, meter=lambda: (0, 0))
        toy = Toy(node, parts, membership, stores, transport)
        runtime.bus.subscribe(toy.events.append)
        self.toys.append(toy)
        return toy

    async def add_follower(self, name: str, policy: int = 0, **settings: Any) -> Toy:
        """As `add`, without a trainer."""
        return await self.add(name, policy, role="follower", **settings)

    def _parts(self, config: NodeConfig, policy: Policy) -> Parts:
        learner = None
        if config.role == "trainer":
            weight = WeightSettings(
                local_groups=config.train.local_groups,
                external_groups=config.train.external_groups,
                external_wait_s=config.train.external_wait_s,
                max_completion_tokens=40,
            )
            train = TrainSettings(weight=weight, length_norm_tokens=5, measure_start_kl=False)
            decoders = {each.tokenizer_digest: each.decode for each in self.policies}
            learner = Learner(trainer=Trainer(policy, train), settings=train, decoders=decoders)
        return Parts(
            config=config,
            policy=policy,
            engine=TransformersEngine(policy),
            host=self.tasks,
            learner=learner,
        )

    def start(self, *toys: Toy) -> None:
        """Run these nodes, or all."""
        for toy in toys or self.toys:
            toy.task = asyncio.create_task(toy.node.run(), name=toy.node.config.name)

    async def run(self, *toys: Toy) -> None:
        """Start these nodes, or all, and wait until each has done its steps."""
        self.start(*toys)
        await self.finished(*toys)

    async def finished(self, *toys: Toy) -> None:
        """Wait until these nodes, or all trainers, have done their steps; what a node raised is raised."""
        for toy in toys or [toy for toy in self.toys if toy.parts.learner is not None]:
            if toy.task is None:
                raise ValueError(f"{toy.node.config.name} was not started")
            done = asyncio.create_task(toy.node.finished.wait())
            await asyncio.wait([done, toy.task], return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            if toy.task.done():
                await toy.task
