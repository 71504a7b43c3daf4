"""From a configuration with "auto" in it to one that leaves nothing open, and to the trainer's settings.

    config -> `as_begun` (this run, earlier) -> `memory_plan` -> `resolved` -> `train_settings`

The resolved configuration is what the run folder records. A run that was begun goes on as it was: the memory
that is free today does not change how it is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.open.estimate import ModelFacts, Wishes
from node.open.machine import device_of, machine_of
from node.open.memory import MemoryPlan, plan_memory
from node.open.policy import adapter_of
from node.rollout.policy import Policy
from node.state.paths import Home
from protocol.errors import ConfigError
from protocol.messages import Charter

if TYPE_CHECKING:
    from node.train.settings import TrainSettings

__all__ = ["as_begun", "memory_plan", "resolved", "train_settings"]


def as_begun(config: NodeConfig, policy: Policy) -> NodeConfig:
    """`config` with tuning and optimiser, where it leaves them open, as the run's newest checkpoint of this
    policy has them."""
    checkpoints = Home(config.home).run(config.run).checkpoints
    if "auto" not in (config.policy.tuning, config.train.optimiser) or not checkpoints.is_dir():
        return config
    from node.train.checkpoint import checkpoints_of, read_state

    newest = next(iter(checkpoints_of(checkpoints, policy.base_model)), None)
    if newest is None:
        return config
    state = read_state(newest)
    update: dict[str, object] = {}
    if config.policy.tuning == "auto":
        tuning: dict[str, object] = {"tuning": "full"}
        if state.adapter is not None:
            tuning = {"tuning": "lora", "lora_rank": state.adapter.rank, "lora_alpha": state.adapter.alpha}
        update["policy"] = config.policy.model_copy(update=tuning)
    if config.train.optimiser == "auto":
        update["train"] = config.train.model_copy(update={"optimiser": state.optimiser})
    return config.model_copy(update=update)


def memory_plan(config: NodeConfig, charter: Charter, policy: Policy) -> MemoryPlan:
    """How this policy is trained on this machine; a run that was begun, as it was. Raises BudgetError, and
    ConfigError for an objective that does not exist."""
    facts, machine, begun = ModelFacts.of(policy), machine_of(config), as_begun(config, policy)
    needs = _needs(config)
    wishes, anew = (Wishes.of(each, charter, facts, machine.device, needs) for each in (begun, config))
    return plan_memory(facts, machine, replace(wishes, anew=anew if begun != config else None))


def _needs(config: NodeConfig) -> frozenset[str]:
    """Names of what the own objective asks for (`Need`). Raises ConfigError."""
    from node.train.objectives import open_objective

    return frozenset(open_objective(config.train.objective, config.train.objective_options).needs)


def resolved(config: NodeConfig, policy: Policy, plan: MemoryPlan) -> NodeConfig:
    """`config` with every "auto" decided: by the run's newest checkpoint, else by `plan`."""
    begun, way = as_begun(config, policy), plan.way
    in_flight, concurrent = begun.rollout.max_in_flight, begun.vllm.max_concurrent
    if plan.fewer:
        in_flight, concurrent = min(in_flight, plan.max_in_flight), min(concurrent, way.rollouts)
    return begun.model_copy(
        update={
            "policy": begun.policy.model_copy(
                update={"device": plan.machine.device, "tuning": way.tuning, "sharing": way.sharing}
            ),
            "train": begun.train.model_copy(
                update={"optimiser": way.optimiser, "micro_batch_tokens": way.micro_batch_tokens}
            ),
            "rollout": begun.rollout.model_copy(update={"max_in_flight": in_flight}),
            "vllm": begun.vllm.model_copy(
                update={"gpu_memory_share": plan.engine_share, "max_concurrent": concurrent}
            ),
            "supervise": begun.supervise.model_copy(update={"enabled": plan.supervise}),
        }
    )


def train_settings(config: NodeConfig, charter: Charter) -> TrainSettings:
    """What the trainer and the batches need, apart from the memory plan. Raises ConfigError for an objective
    that this node cannot feed, for options that it does not have, and for merges of adapters."""
    from node.train.objectives import (
        EVERY_TRAINER,
        Aggregation,
        Need,
        open_objective,
        require,
        require_disbelief,
    )
    from node.train.settings import TrainSettings
    from node.weight.advantage.registry import ADVANTAGES
    from node.weight.settings import Treatment, WeightSettings

    train, weight, device = config.train, config.weight, device_of(config)
    if config.merge.enabled and config.policy.tuning == "lora":
        raise ConfigError(
            "merge.enabled is for all weights, and this node trains an adapter (policy.tuning 'lora', or "
            "'auto' with too little memory): adapters of different draws do not add up; turn merging off"
        )
    own, compat = open_objective(train.objective, train.objective_options), open_objective("compat")
    require(own, EVERY_TRAINER | {Need.SNAPSHOT, Need.EWMA})  # which are kept as soon as one is needed
    if train.external_groups and config.network.transport != "none":
        require_disbelief(own)
    if ADVANTAGES[weight.advantage].drops_pivot and charter.group_size % 2 == 0:
        raise ConfigError(
            f"weight.advantage {weight.advantage!r} leaves one rollout of each group out and needs groups of "
            f"an odd size; those of swarm {charter.name} have {charter.group_size}"
        )
    if weight.advantage == "dr_grpo":
        # Dr.GRPO divides by a constant length instead of by the tokens there are.
        constant = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
        compat = replace(compat, aggregation=constant)
        if "aggregation" not in train.objective_options:
            own = replace(own, aggregation=constant)
    return TrainSettings(
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        optimiser="adamw_8bit" if train.optimiser == "adamw_8bit" else "adamw",
        micro_batch_tokens=train.micro_batch_tokens,
        length_norm_tokens=charter.max_new_tokens,
        own=own,
        compat=compat,
        ess_scaling=train.ess_scaling,
        slow_fast=train.slow_fast,
        weight=WeightSettings(
            local_groups=train.local_groups,
            external_groups=train.external_groups,
            external_wait_s=train.external_wait_s,
            advantage=weight.advantage,
            force=None if weight.external == "auto" else Treatment(weight.external),
            # Another tokenizer may need several of ours for one of its tokens.
            max_completion_tokens=8 * charter.max_new_tokens,
        ),
        device=device,
        by_turns=device == "cuda" and config.policy.sharing == "sequential",
        adapter=adapter_of(config),
    )
