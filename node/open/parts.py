"""Everything of a node that takes seconds to make and needs no network: policy, engine, and trainer.

    config + charter -> policy -> memory plan -> resolved config -> trainer -> engine -> `Parts`

Blocks. A policy that does not fit is refused before its weights are read. Torch is imported by the functions
that need it, so what needs none (charter, sandbox) is checked before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.environment.host import TaskHost
from node.events import NoticeLevel
from node.open.engine import NoticeFunction, open_engine
from node.open.memory import MemoryPlan
from node.open.policy import open_decoders, open_policy
from node.open.settings import memory_plan, resolved, train_settings
from node.open.trial import try_policy
from node.rollout.policy import Policy
from node.state.paths import Home
from node.verify.tokens import Decode
from protocol.messages import Charter, Digest, PeerId

if TYPE_CHECKING:
    from node.rollout.engine.base import Engine
    from node.train.settings import TrainSettings
    from node.train.step import Trainer

__all__ = ["Learner", "Parts", "open_parts"]


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What only a node that trains has."""

    trainer: Trainer
    settings: TrainSettings
    decoders: Mapping[Digest, Decode]
    """Tokenizers of peers' groups, by digest."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a node is made of, whatever it is connected to."""

    config: NodeConfig
    """With nothing left open: what really runs."""
    policy: Policy
    engine: Engine
    host: TaskHost
    """Has the charter's tasks; whoever made it closes it."""
    learner: Learner | None
    """None for a follower."""


def open_parts(
    config: NodeConfig,
    charter: Charter,
    host: TaskHost,
    notice: NoticeFunction,
    peer_id: PeerId = "",
) -> Parts:
    """The parts of a node of the configured role; a trainer goes on from the run's newest checkpoint. The
    caller closes the engine. `notice(level, text)` hears the memory plan, and later of the engine, on any
    thread. `peer_id` makes this node's samples other ones than those of a node with equal weights. Raises
    SwarmError."""
    policy = open_policy(config, charter)
    import torch

    from node.train.checkpoint import checkpoints_of, restore, resume
    from node.train.recent import take_recent

    run_dir = Home(config.home).run(config.run)
    checkpoints = run_dir.checkpoints
    if config.role == "trainer":
        restore(checkpoints)
    plan = memory_plan(config, charter, policy)
    config = resolved(config, policy, plan)
    torch.manual_seed(config.seed)
    learner, draws = None, [peer_id]
    if config.role == "trainer":
        learner = _open_learner(config, charter, policy, plan)
        draws += [folder.name for folder in checkpoints_of(checkpoints, policy.base_model)][:1]
    # A follower's engine has the policy's own weights: what an owner's anchors start from.
    engine = open_engine(config, policy, notice, dtype=plan.way.dtype, draws="/".join(draws))
    try:
        if learner is not None:
            resume(learner.trainer, engine, checkpoints)
            take_recent(learner.trainer, engine, run_dir.recent)
        if config.policy.sharing != "sequential":
            spec = next(each for each in charter.tokenizers if each.digest == policy.tokenizer_digest)
            try_policy(policy, spec, engine, learner.trainer if learner is not None else None, notice)
    except BaseException:
        engine.close()
        raise
    notice(NoticeLevel.INFO, "\n".join(plan.lines()))
    return Parts(
        config=config,
        policy=policy,
        engine=engine,
        host=host,
        learner=learner,
    )


def _open_learner(config: NodeConfig, charter: Charter, policy: Policy, plan: MemoryPlan) -> Learner:
    from node.train.step import Trainer

    settings = replace(train_settings(config, charter), dtype=plan.way.dtype, recompute=plan.way.recompute)
    return Learner(
        trainer=Trainer(policy, settings), settings=settings, decoders=open_decoders(policy, charter)
    )
