"""Which charter a node runs with, what its memory plan makes of its configuration, and which engine opens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from node import build
from node.budget import BudgetError, ModelFacts
from node.build import (
    as_begun,
    inspect_charter,
    load_charter,
    machine_of,
    open_engine,
    plan_of,
    planned,
    train_settings,
)
from node.config import NodeConfig, load_config
from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import EngineError
from node.rollout.engine.fallback import FallbackEngine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.state.paths import Home, bundled
from node.train.checkpoint import CheckpointState
from node.train.ess_scaling import EssScaling
from node.train.slow_fast import SlowFastSettings
from protocol.charter import charter_bytes, found, swarm_id
from protocol.errors import CharterError, ConfigError, ModelError, SwarmError
from protocol.identity import Identity

OURS = Identity.from_seed(b"o" * 32)
THEIRS = Identity.from_seed(b"t" * 32)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    home = Home(tmp_path / "home").create()
    return load_config([], {"home": home.root})


def rules(**changes: str) -> str:
    text = bundled("demo-charter.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_without_any_a_swarm_is_founded_once(config: NodeConfig) -> None:
    first = load_charter(config, OURS, 1000)
    assert (first.name, first.founder, first.created_at) == ("demo", OURS.peer_id, 1000)
    assert load_charter(config, OURS, 2000) == first


def test_a_founder_that_starts_again_stays_in_its_swarm(config: NodeConfig, tmp_path: Path) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules(group_size="group_size"))
    config = config.model_copy(update={"charter": str(own)})
    first = load_charter(config, OURS, 1000)
    assert swarm_id(load_charter(config, OURS, 2000)) == swarm_id(first)
    own.write_text(rules(**{'name = "demo"': 'name = "other"'}))
    changed = load_charter(config, OURS, 3000)
    assert (changed.name, changed.created_at) == ("other", 3000)
    assert load_charter(config, THEIRS, 4000).founder == THEIRS.peer_id


def test_a_given_charter_wins_over_the_one_at_home(config: NodeConfig, tmp_path: Path) -> None:
    load_charter(config, OURS, 1000)
    given = tmp_path / "given.bin"
    given.write_bytes(charter_bytes(found(THEIRS, rules(), 500)))
    config = config.model_copy(update={"charter": str(given)})
    assert load_charter(config, OURS, 2000).founder == THEIRS.peer_id
    assert inspect_charter(config) == (given, "demo")


def test_a_damaged_charter_at_home_is_not_replaced(config: NodeConfig) -> None:
    kept = Home(config.home).charter
    kept.write_bytes(b"damaged")
    with pytest.raises(CharterError, match=f"{kept}: these bytes are no charter"):
        load_charter(config, OURS, 1000)
    assert kept.read_bytes() == b"damaged"


def test_looking_founds_nothing(config: NodeConfig) -> None:
    assert inspect_charter(config) == (bundled("demo-charter.toml"), "demo")
    assert not Home(config.home).charter.exists()


# --- memory plan -------------------------------------------------------------------------------------------


def test_the_plan_leaves_nothing_open_and_keeps_the_rest(config: NodeConfig, tiny_policy_path: Path) -> None:
    charter = found(OURS, rules(), 0)
    config = load_config([], {"home": config.home, "policy.device": "cpu", "train.micro_batch_tokens": 3000})
    plan = plan_of(config, charter, Policy.open(tiny_policy_path))
    closed = planned(config, plan)
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
    assert planned(closed, plan_of(closed, charter, Policy.open(tiny_policy_path))) == closed


def test_too_little_memory_is_told_before_anything_is_loaded(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Policy, "load_model", never)
    config = load_config(
        [],
        {
            "home": config.home,
            "policy.device": "cpu",
            "policy.memory_gib": 0.25,
            "policy.path": "models/wren",
        },
    )
    with pytest.raises(BudgetError, match=r"needs 0\.5 GiB here and may use 0\.2; raise policy\.memory_gib"):
        build.load(config, found(OURS, rules(), 0), lambda level, text: None)


def test_memory_is_the_smallest_of_what_is_free_and_what_may_be_used(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config([], {"home": config.home, "policy.device": "cpu"})
    monkeypatch.setattr(build, "CGROUP", tmp_path)
    assert 0 < machine_of(config).free_bytes <= machine_of(config).total_bytes
    (tmp_path / "memory.max").write_text("max\n")
    free = machine_of(config).free_bytes
    assert free > 1_000_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine_of(config).free_bytes == 1_000_000
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine_of(config).free_bytes == 1_000_000  # how much of that are cached files is not told
    (tmp_path / "memory.stat").write_text("anon 250000\ninactive_file 90000\nactive_file 10000\n")
    assert machine_of(config).free_bytes == 700_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert machine_of(config).free_bytes == 0
    config = load_config([], {"home": config.home, "policy.device": "cpu", "policy.memory_gib": 1.5})
    assert machine_of(config).free_bytes == 1.5 * 2**30


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
    closed = planned(as_begun(config, policy), plan_of(config, charter, policy))
    assert closed.policy.tuning == ("full" if adapter is None else "lora")
    assert closed.train.optimiser == optimiser
    assert build.adapter_of(closed) == adapter
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
    monkeypatch.setattr(build, "find_spec", lambda _: object())  # PEFT and bitsandbytes, too

    def with_gib(gib: float) -> NodeConfig:
        return load_config([], {"home": config.home, "policy.device": "cpu", "policy.memory_gib": gib})

    def ways(*gibs: float) -> list[tuple[str, str]]:
        plans = [plan_of(with_gib(gib), charter, policy) for gib in gibs]
        return [(plan.tuning, plan.optimiser) for plan in plans]

    assert ways(8, 13, 64) == [("lora", "adamw"), ("full", "adamw_8bit"), ("full", "adamw")]
    begin(config, policy, 5, adapter=AdapterSpec(4, 8.0))
    assert ways(8, 64) == [("lora", "adamw")] * 2
    begin(config, policy, 6, optimiser="adamw_8bit")
    assert ways(13, 64) == [("full", "adamw_8bit")] * 2
    with pytest.raises(BudgetError, match="goes on only as it was begun"):
        plan_of(with_gib(8), charter, policy)


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
    assert (plain.ess_scaling, plain.slow_fast) == (None, None)
    keys = {
        "policy.device": "cpu",
        "train.ess_scaling": True,
        "train.ess_base": 0.5,
        "train.ess_rule": "linear",
        "train.slow_fast": True,
    }
    settings = train_settings(load_config([], keys), charter)
    assert (settings.ess_scaling, settings.slow_fast) == (EssScaling(0.5, "linear"), SlowFastSettings())


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
        (part.name, part.size_bytes) for part in plan_of(config, charter, policy).parts if part.name in names
    ]
    assert planned_for == [(name, each * 20_064 if each < 100 else each) for name, each in copies]


def test_groups_of_an_even_size_have_no_median_to_leave_out(config: NodeConfig) -> None:
    keys = {"policy.device": "cpu", "weight.advantage": "mc_grpo"}
    with pytest.raises(ConfigError, match=r"'mc_grpo' .* odd size; those of swarm demo have 8"):
        train_settings(load_config([], keys), found(OURS, rules(), 0))
    odd = found(OURS, rules(**{"group_size = 8": "group_size = 9"}), 0)
    assert train_settings(load_config([], keys), odd).treatment.advantage == "mc_grpo"


def test_adapters_are_not_merged(config: NodeConfig) -> None:
    keys = {"home": config.home, "policy.device": "cpu", "policy.tuning": "lora", "merge.enabled": True}
    with pytest.raises(ConfigError, match=r"merge.enabled is for all weights, and this node"):
        build.load(load_config([], keys), found(OURS, rules(), 0), lambda level, text: None)


# --- the engine --------------------------------------------------------------------------------------------


class Dying(TransformersEngine):
    """Stands for vLLM."""

    name = "vllm"
    lost = False

    def pause(self) -> None:
        if self.lost:
            raise EngineError("vLLM was started 6 times in a row")
        super().pause()


def test_the_embedded_engine_has_the_type_of_the_trainer(tiny_policy_path: Path) -> None:
    config, policy = load_config([], {"policy.device": "cpu"}), Policy.open(tiny_policy_path)
    assert [open_engine(config, policy).dtype, open_engine(config, policy, dtype="bfloat16").dtype] == [
        "float32",
        "bfloat16",
    ]


def test_no_two_nodes_sample_alike(tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.rollout.engine import vllm

    seeds: list[int] = []
    monkeypatch.setattr(vllm, "VllmEngine", lambda *_, seed, **__: seeds.append(seed))
    policy = Policy.open(tiny_policy_path)
    for seed, peer_id in ((0, OURS.peer_id), (0, THEIRS.peer_id), (1, OURS.peer_id), (0, OURS.peer_id)):
        config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "seed": seed})
        open_engine(config, policy, draws=peer_id)
    assert len(set(seeds)) == 3
    assert seeds[0] == seeds[3]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_without_fallback_an_engine_that_cannot_start_ends_the_node(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ConfigError("vLLM is not installed here")

    monkeypatch.setattr(build, "_open_vllm", broken)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm"})
    with pytest.raises(ConfigError, match="not installed"):
        open_engine(config, Policy.open(tiny_policy_path))
    policy = Policy.open(tiny_policy_path)
    monkeypatch.setattr(build, "_open_vllm", lambda *_: Dying(policy))
    assert isinstance(open_engine(config, policy), Dying)


@pytest.mark.parametrize(
    "error", [ConfigError("no vLLM"), ModelError("no such model"), EngineError("no start")]
)
def test_with_fallback_the_other_engine_takes_its_place(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch, error: SwarmError
) -> None:
    def broken(*_: object) -> None:
        raise error

    notices: list[tuple[str, str]] = []
    monkeypatch.setattr(build, "_open_vllm", broken)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "rollout.fallback": True})
    engine = open_engine(config, Policy.open(tiny_policy_path), lambda *told: notices.append(told))
    assert engine.name == "transformers"
    assert notices == [
        ("warning", f"vLLM cannot be started, the transformers engine takes its place: {error}")
    ]


def test_with_fallback_a_lost_engine_is_replaced_and_that_is_told(
    tiny_policy_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.open(tiny_policy_path)
    dying = Dying(policy)
    notices: list[tuple[str, str]] = []
    monkeypatch.setattr(build, "_open_vllm", lambda *_: dying)
    config = load_config([], {"policy.device": "cpu", "rollout.engine": "vllm", "rollout.fallback": True})
    engine = open_engine(config, policy, lambda *told: notices.append(told))
    assert isinstance(engine, FallbackEngine)
    engine.pause()
    assert (engine.name, notices) == ("vllm", [])
    dying.lost = True
    engine.pause()
    assert engine.name == "transformers"
    assert [level for level, _ in notices] == ["warning"]
    assert notices[0][1].startswith(
        "vLLM is lost, the transformers engine takes its place: vLLM was started 6"
    )
