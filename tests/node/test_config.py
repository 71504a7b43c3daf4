"""The configuration: who wins, and what is said about a wrong key or value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from node.config import NodeConfig, load_config
from node.state.paths import default_home
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_swarm_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what a test sets, in an empty folder."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written(folder: Path, text: str, name: str = "a.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


# --- precedence --------------------------------------------------------------------------------------------


def test_each_layer_wins_over_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(tmp_path, "[train]\nsteps = 1\nlocal_groups = 1\nwarmup_steps = 1\nexternal_groups = 1")
    second = written(tmp_path, "[train]\nsteps = 2\nlocal_groups = 2\nwarmup_steps = 2", "b.toml")
    monkeypatch.setenv("SWARM_TRAIN__STEPS", "3")
    monkeypatch.setenv("SWARM_TRAIN__LOCAL_GROUPS", "3")
    train = load_config([first, second], {"train.steps": "4"}).train
    assert (train.steps, train.local_groups, train.warmup_steps) == (4, 3, 2)
    assert train.external_groups == 1
    assert train.checkpoint_every == NodeConfig().train.checkpoint_every


def test_a_section_as_one_override_keeps_the_files_other_keys(tmp_path: Path) -> None:
    file = written(tmp_path, "[train]\nsteps = 7\nwarmup_steps = 2")
    train = load_config([file], {"train": "{ steps = 8 }"}).train
    assert (train.steps, train.warmup_steps) == (8, 2)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.learning_rate", "1e-4", 1e-4),
        ("linger", "true", True),
        ("seed", "007", 7),  # no TOML, but a number to pydantic
        ("network.bootstraps", '["/memory/p2p/a", "/memory/p2p/b"]', ("/memory/p2p/a", "/memory/p2p/b")),
        ("name", "wren", "wren"),
        ("name", '"wren"', "wren"),
        ("name", "7", "7"),
        ("run", "2026-01-31", "2026-01-31"),
        ("policy.path", "models/rook", "models/rook"),
    ],
)
def test_text_of_a_flag_or_variable_becomes_a_value(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: object
) -> None:
    def found(config: NodeConfig) -> object:
        node: Any = config
        for part in key.split("."):
            node = getattr(node, part)
        return node

    assert found(load_config([], {key: text})) == value
    monkeypatch.setenv("SWARM_" + key.upper().replace(".", "__"), text)
    assert found(load_config()) == value


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", "")
    monkeypatch.setenv("SWARM_TRAIN__STEPS", "")
    assert load_config().home == default_home()
    assert load_config().train.steps == 100


@pytest.mark.parametrize("how", ["file", "variable", "flag"])
def test_home_is_absolute_wherever_it_comes_from(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files = [written(tmp_path, 'home = "~/swarm"')] if how == "file" else []
    if how == "variable":
        monkeypatch.setenv("SWARM_HOME", "~/swarm")
    flags = {"home": Path("~/swarm")} if how == "flag" else {}
    assert load_config(files, flags).home == tmp_path / "swarm"
    assert load_config([], {"home": "here"}).home == tmp_path / "here"


# --- wrong keys --------------------------------------------------------------------------------------------


def test_unknown_keys_name_the_nearest_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        ("stpes = 3", "stpes", "seed"),
        ("[trian]\nsteps = 3", "trian", "train"),
        ("[train]\nlearning_rte = 3", "train.learning_rte", "train.learning_rate"),
    ]
    for text, key, _ in wrong:
        with pytest.raises(ConfigError, match=f"unknown config key '{key}'; the nearest valid one is"):
            load_config([written(tmp_path, text)])
    for text, _, nearest in wrong[1:]:
        with pytest.raises(ConfigError, match=f"nearest valid one is '{nearest}'"):
            load_config([written(tmp_path, text)])
    with pytest.raises(ConfigError, match=r"'train.stepz'.*'train.steps'"):
        load_config([], {"train.stepz": 3})
    with pytest.raises(ConfigError, match=r"'train.stepz'.*'train.steps'"):
        load_config([], {"train": "{ stepz = 3 }"})
    with pytest.raises(ConfigError, match=r"'train.steps.more'.*'train.steps'"):
        load_config([], {"train.steps.more": 3})
    monkeypatch.setenv("SWARM_TRAIN__STEPZ", "3")
    with pytest.raises(ConfigError, match=r"'train.stepz'.*'train.steps'"):
        load_config()


# --- wrong values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", 0),
        ("train.steps", "many"),
        ("train.steps", 1.5),
        ("train.external_wait_s", "inf"),
        ("train.learning_rate", "nan"),
        ("train.objective", "ppo"),
        ("rollout.max_staleness", -1),
        ("name", "two words"),
        ("run", "../elsewhere"),
        ("policy.device", "tpu"),
        ("network.bootstraps", 3),
        ("supervise.enabled", "perhaps"),
        ("supervise.grad_norm", 0.5),
        ("train.snapshots", 0),
        ("train.ewma_beta", 1.0),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence_with_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], {key: value})
    text = str(caught.value)
    assert text.startswith(f"config key {key} = ")
    assert str(value) in text
    assert "\n" not in text


def test_a_value_where_a_section_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "train = 3")
    with pytest.raises(ConfigError, match="config key train = 3"):
        load_config([file])
    monkeypatch.setenv("SWARM_TRAIN__STEPS", "4")
    assert load_config([file]).train.steps == 4  # the later layer says what the section is


# --- files -------------------------------------------------------------------------------------------------


def test_a_profile_is_found_by_name() -> None:
    demo = load_config([Path("demo.toml")])
    assert demo.linger is True
    assert load_config([Path("demo")]) == demo


def test_a_path_with_a_folder_never_falls_back_to_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'missing/demo.toml' cannot be read: No such file"):
        load_config([Path("missing/demo.toml")])
    with pytest.raises(ConfigError, match="no profile of that name"):
        load_config([Path("nosuch")])
    (tmp_path / "demo").mkdir()
    assert load_config([Path("demo")]).linger is True
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config([tmp_path])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "train = = 3", "not valid TOML: .*line 1"),
        ("a.toml", "a = 1\na = 2", "not valid TOML"),
        ("a.toml", "\x00", "not valid TOML"),
        ("a.json", '{"train": ', "not valid JSON"),
        ("a.json", "[1, 2]", "holds a list"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([written(tmp_path, text, name)])


def test_the_resolved_json_loads_again_to_the_same(tmp_path: Path) -> None:
    config = load_config(
        [Path("demo")], {"home": tmp_path, "network.bootstraps": ["/memory/p2p/a"], "train.steps": 3}
    )
    file = written(tmp_path, config.model_dump_json(indent=2), "config.json")
    assert load_config([file]) == config


# --- the schema and the values -----------------------------------------------------------------------------


def leaves(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_every_key_has_help() -> None:
    assert [name for name, field in leaves(NodeConfig) if not field.description] == []
    schema = NodeConfig.model_json_schema()
    assert "AReaL" in json.dumps(schema)


def test_the_configuration_is_immutable() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        NodeConfig().train.steps = 3


def test_policy_folder_is_looked_up_here_then_at_home_then_among_the_bundled(tmp_path: Path) -> None:
    def folder(path: str) -> Path:
        config = load_config([], {"policy.path": path, "home": tmp_path / "home"})
        return config.policy.folder(config.home)

    (tmp_path / "home/models/mine").mkdir(parents=True)
    (tmp_path / "home/models/models/wren").mkdir(parents=True)
    assert folder("models/rook") == ROOT / "configs/models/rook"
    assert folder("models/wren") == tmp_path / "home/models/models/wren"
    assert folder("mine") == tmp_path / "home/models/mine"
    (tmp_path / "mine").mkdir()
    assert folder("mine") == tmp_path / "mine"
    assert folder(str(tmp_path / "mine")) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("smollm2-135m", "is not on this machine yet; swarm model get smollm2-135m$"),
        ("nosuch", "is no folder here, no model that `swarm model get` has fetched"),
        ("org/name", "no folder here"),
    ],
)
def test_a_policy_that_is_nowhere_says_how_to_get_it(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^policy.path '{path}' .*{words}"):
        load_config([], {"policy.path": path}).policy.folder(tmp_path)


def test_a_token_budget_needs_partial_rollouts() -> None:
    with pytest.raises(ConfigError, match=r"rollout.token_budget = 100: .*needs rollout.max_in_flight"):
        load_config([], {"rollout.token_budget": 100})
    rollout = load_config([], {"rollout.token_budget": 100, "rollout.max_in_flight": 8}).rollout
    assert rollout.token_budget == 100


@pytest.mark.parametrize("name", ["demo", "gpu-24gb", "gpu-8gb", "smollm2-cpu"])
def test_profiles_need_nothing_else(name: str, tmp_path: Path) -> None:
    """Each names a charter that can be founded and a policy that is bundled or can be got by name."""
    from node.known_models import KNOWN_MODELS
    from node.open.charter import inspect_charter

    config = load_config([Path(name)], {"home": tmp_path})
    assert inspect_charter(config)[1].name in {"demo", "smollm2"}
    assert config.policy.path in KNOWN_MODELS or config.policy.folder(tmp_path).is_dir()
    assert config.rollout.max_in_flight <= config.vllm.max_concurrent


def test_rules_in_place_of_a_profile_found_their_swarm_with_their_first_model(tmp_path: Path) -> None:
    rules = written(tmp_path, 'name = "x"\n[[environments]]\n[[models]]\nname = "wren"\n', "rules.toml")
    config = load_config([rules])
    assert (config.charter, config.policy.path) == (str(rules), "wren")
    assert config.policy.folder(tmp_path) == ROOT / "configs/models/wren"
    mine = written(tmp_path, '[policy]\npath = "mine"\n')
    assert load_config([rules, mine]).policy.path == "mine"
    for models in ("", "models = 3", "[[models]]\nname = 3"):
        bare = load_config([written(tmp_path, f"environments = []\n{models}", "bare.toml")])
        assert bare.policy == NodeConfig().policy


def test_the_charter_of_smollm2_fits_the_model_that_is_got() -> None:
    from node.environment.tasks import open_environment
    from node.known_models import KNOWN_MODELS
    from protocol.charter import found
    from protocol.identity import Identity

    rules = (ROOT / "configs/smollm2-charter.toml").read_text()
    charter = found(Identity.generate(), rules, 0)
    (tokenizer,) = charter.tokenizers
    assert tokenizer.digest == KNOWN_MODELS["smollm2-135m"].sha256["tokenizer.json"]
    for spec in charter.environments:
        environment = open_environment(spec.name, json.loads(spec.config))
        assert environment.prompt(1, 1).text.endswith("Reply with the final answer only.")
        assert not environment.evaluates_answers


@pytest.mark.slow
def test_configuration_events_and_paths_start_without_torch() -> None:
    modules = "node.config, node.events, node.state.paths, node.telemetry"
    heavy = "{'torch', 'transformers', 'hivemind', 'numpy', 'reasoning_gym'}"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_merging_is_for_trainers_with_a_network() -> None:
    on = {"merge.enabled": True}
    assert load_config([], on).merge.every_windows == 60
    with pytest.raises(ConfigError, match=r"config key merge = .*'trainer'; a follower takes its owner's"):
        load_config([], on | {"role": "follower"})
    with pytest.raises(ConfigError, match=r"needs a network; there is nobody to merge with"):
        load_config([], on | {"network.transport": "none"})
    assert load_config([], {"role": "follower", "network.transport": "none"}).merge.enabled is False
