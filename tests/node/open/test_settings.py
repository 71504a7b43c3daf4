"""What the memory plan and an earlier start make of a configuration, and which settings follow."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from node.config import NodeConfig, load_config
from node.open import machine
from node.open.estimate import ModelFacts
from node.open.memory import BudgetError
from node.open.policy import adapter_of
from node.open.settings import as_begun, memory_plan, resolved, train_settings
from node.rollout.adapter import AdapterSpec
from node.rollout.policy import Policy
from node.state.paths import Home
from node.train.checkpoint import CheckpointState
from protocol.charter import found
from protocol.errors import ConfigError
from tests.node.open.conftest import OURS, rules


def test_the_plan_leaves_nothing_open_and_keeps_the_rest(config: NodeConfig, tiny_policy_path: Path) -> None:
    charter = found(OURS, rules(), 0)
    config = load_config([], {"home": config.home, "policy.device": "cpu", "train.micro_batch_tokens": 3000})
    policy = Policy.open(tiny_policy_path)
    closed = resolved(config, policy, memory_plan(config, charter, policy))
    assert (closed.policy.tuning, closed.policy.sharing) == ("full", "concurrent")
    assert (closed.train.optimiser, closed.train.micro_batch_tokens) == ("adamw", 3000)
    assert closed.vllm.gpu_memory_share == 0.0
    assert closed.supervise.enabled is True
    changed = {
        "policy": config.policy,
        "train": config.train,
        "vllm": config.vllm,
        "supervise": config.supervise,
    }
    assert closed.model_copy(update=changed) == config
    assert resolved(closed, policy, memory_plan(closed, charter, policy)) == closed


def begin(config: NodeConfig, policy: Policy, version: int, **changes: object) -> None:
    """What planning reads of a checkpoint."""
    folder = Home(config.home).run(config.run).checkpoints / f"v{version}"
    folder.mkdir(parents=True)
    state = CheckpointState(version, version, 0, policy.base_model, policy.tokenizer_digest)
    (folder / "trainer.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(state, **changes)))


@pytest.mark.parametrize(
    ("gib", "adapter", "optimiser"),
    [(0.8, None, "adamw"), (64.0, AdapterSpec(4, 8.0), "adamw_8bit")],
)
def test_a_run_goes_on_as_it_was_begun_whatever_is_free_today(
    config: NodeConfig, tiny_policy_path: Path, gib: float, adapter: AdapterSpec | None, optimiser: str
) -> None:
    charter, policy = found(OURS, rules(), 0), Policy.open(tiny_policy_path)
    config = load_config([], {"home": config.home, "policy.device": "cpu", "policy.memory_gib": gib})
    assert as_begun(config, policy) == config
    begin(config, policy, 1)
    begin(config, policy, 20, adapter=adapter, optimiser=optimiser)
    begin(config, policy, 300, base_model="of another policy", optimiser="adamw_8bit")
    closed = resolved(config, policy, memory_plan(config, charter, policy))
    assert closed.policy.tuning == ("full" if adapter is None else "lora")
    assert closed.train.optimiser == optimiser
    assert adapter_of(closed) == adapter
    wished = {"policy.tuning": "full", "train.optimiser": "adamw", "policy.device": "cpu"}
    wished_config = load_config([], {"home": config.home, **wished})
    assert as_begun(wished_config, policy) == wished_config


def test_memory_chooses_for_a_new_run_and_not_for_a_begun_one(
    config: NodeConfig, tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of a real policy, which need not be there."""
    charter, policy = found(OURS, rules(), 0), Policy.open(tiny_policy_path)
    half = ModelFacts(494_032_768, 24, 896, 4864, 14, 2, 64, 151_936, 32_768)
    monkeypatch.setattr(ModelFacts, "of", lambda _: half)
    monkeypatch.setattr(machine, "find_spec", lambda _: object())  # PEFT and bitsandbytes, too

    def with_gib(gib: float) -> NodeConfig:
        return load_config([], {"home": config.home, "policy.device": "cpu", "policy.memory_gib": gib})

    def ways(*gibs: float) -> list[tuple[str, str]]:
        plans = [memory_plan(with_gib(gib), charter, policy) for gib in gibs]
        return [(plan.way.tuning, plan.way.optimiser) for plan in plans]

    assert ways(8, 13, 64) == [("lora", "adamw"), ("full", "adamw_8bit"), ("full", "adamw")]
    begin(config, policy, 5, adapter=AdapterSpec(4, 8.0))
    assert ways(8, 64) == [("lora", "adamw")] * 2
    begin(config, policy, 6, optimiser="adamw_8bit")
    assert ways(13, 64) == [("full", "adamw_8bit")] * 2
    with pytest.raises(BudgetError, match="goes on only as it was begun"):
        memory_plan(with_gib(8), charter, policy)


def test_settings_follow_the_plan(config: NodeConfig) -> None:
    charter = found(OURS, rules(), 0)
    keys = {
        "home": config.home,
        "policy.device": "cpu",
        "policy.tuning": "lora",
        "policy.lora_rank": 7,
        "policy.lora_alpha": 21.0,
        "policy.sharing": "sequential",
        "train.optimiser": "adamw_8bit",
    }
    settings = train_settings(load_config([], keys), charter)
    assert settings.adapter == AdapterSpec(7, 21.0)
    assert settings.optimiser == "adamw_8bit"
    assert not settings.by_turns  # RAM is the same place before and after
    plain = train_settings(load_config([], {"policy.device": "cpu"}), charter)
    assert (plain.adapter, plain.optimiser) == (None, "adamw")


def test_what_surrounds_a_step_follows_the_configuration(config: NodeConfig) -> None:
    charter = found(OURS, rules(), 0)
    plain = train_settings(load_config([], {"policy.device": "cpu"}), charter)
    assert (plain.ess_scaling, plain.slow_fast) == (False, False)
    keys = {
        "policy.device": "cpu",
        "train.ess_scaling": True,
        "train.slow_fast": True,
    }
    settings = train_settings(load_config([], keys), charter)
    assert (settings.ess_scaling, settings.slow_fast) == (True, True)


@pytest.mark.parametrize(
    ("keys", "copies"),
    [
        ({}, []),
        ({"train.objective": "ppo_ewma"}, [("average", 4)]),
        ({"train.objective": "copris", "train.snapshots": 5}, [("snapshots", 20)]),
        ({"train.objective": "copris", "train.snapshot_bytes": 99_999}, [("snapshots", 99_999)]),
        ({"train.objective": "tis", "train.objective_options": {"old": "ewma"}}, [("average", 4)]),
        ({"supervise.enabled": True}, [("good state", 12)]),
        ({"supervise.enabled": True, "supervise.probe_every": 9}, [("good state", 24)]),
        ({"train.objective": "ppo_ewma", "role": "follower"}, []),
    ],
)
def test_earlier_weights_are_kept_and_planned_where_something_needs_them(
    config: NodeConfig, tiny_policy_path: Path, keys: dict[str, object], copies: list[tuple[str, int]]
) -> None:
    """In bytes for each of 20,064 weights, or in all."""
    charter, policy = found(OURS, rules(), 0), Policy.open(tiny_policy_path)
    config = load_config(
        [], {"home": config.home, "policy.device": "cpu", "supervise.enabled": False, **keys}
    )
    if config.role == "trainer":
        train_settings(config, charter)  # refuses nothing of it
    names = {"good state", "snapshots", "average"}
    planned_for = [
        (part.name, part.size_bytes)
        for part in memory_plan(config, charter, policy).parts
        if part.name in names
    ]
    assert planned_for == [(name, each * 20_064 if each < 100 else each) for name, each in copies]


def test_groups_of_an_even_size_have_no_median_to_leave_out(config: NodeConfig) -> None:
    keys = {"policy.device": "cpu", "weight.advantage": "mc_grpo"}
    with pytest.raises(ConfigError, match=r"'mc_grpo' .* odd size; those of swarm demo have 8"):
        train_settings(load_config([], keys), found(OURS, rules(), 0))
    odd = found(OURS, rules(**{"group_size = 8": "group_size = 9"}), 0)
    assert train_settings(load_config([], keys), odd).weight.advantage == "mc_grpo"


def test_an_objective_that_believes_claims_is_not_for_peers_groups(config: NodeConfig) -> None:
    keys: dict[str, object] = {"policy.device": "cpu", "train.objective": "vcpo"}
    with pytest.raises(
        ConfigError, match=r"objective vcpo, .* choose one of .* set train.external_groups to 0"
    ):
        train_settings(load_config([], keys), found(OURS, rules(), 0))
    for alone in ({"train.external_groups": 0}, {"network.transport": "none"}):
        train_settings(load_config([], keys | alone), found(OURS, rules(), 0))  # refuses nothing of it


def test_adapters_are_not_merged(config: NodeConfig) -> None:
    keys = {"policy.device": "cpu", "policy.tuning": "lora", "merge.enabled": True}
    with pytest.raises(ConfigError, match=r"merge.enabled is for all weights, and this node"):
        train_settings(load_config([], keys), found(OURS, rules(), 0))
