"""`swarm model get`: what is printed where, how a refusal ends, and which commands get what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import node.models
from node.config import NodeConfig, load_config
from node.rollout.policy import Policy
from node.state.paths import default_home
from protocol.errors import ConfigError
from swarm_cli.commands.model import fetch_missing
from tests.swarm_cli.conftest import Swarm


def test_a_folder_is_got_and_found_by_its_name(swarm: Swarm, tiny_policy_path: Path) -> None:
    ended = swarm("model", "get", tiny_policy_path, "--name", "mine")
    kept = default_home() / "models/mine"
    policy = Policy.open(kept)
    assert ended.code == 0
    assert ended.out == f"{kept}: {policy.params:,} parameters, 0.1 MB\n"
    assert "policy.path = 'mine'" in ended.err
    assert "copying" in ended.err
    shown = swarm("run", "--dry-run", "--set", "policy.path=mine")
    assert json.loads(shown.out)["policy"]["path"] == "mine"


def test_json_is_one_object_and_talk_stays_on_stderr(
    swarm: Swarm, tiny_policy_path: Path, tmp_path: Path
) -> None:
    ended = swarm("model", "get", tiny_policy_path, "--home", tmp_path / "other", "--json")
    policy = Policy.open(tmp_path / "other/models/tiny")
    assert json.loads(ended.out) == {
        "name": "tiny",
        "path": str(policy.path),
        "params": policy.params,
        "bytes": sum(file.stat().st_size for file in policy.path.iterdir()),
        "sha256": policy.base_model,
    }


def _with_code(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit")


def _with_auto_map(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}}))


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_with_code, "models that bring code are refused"),
        (_with_auto_map, "models that bring code are refused"),
        (_without_weights, "lacks model.safetensors"),
    ],
)
def test_a_bad_folder_is_one_sentence_and_leaves_nothing(
    swarm: Swarm, make_tiny_policy: Callable[[], Path], spoil: Callable[[Path], None], words: str
) -> None:
    folder = make_tiny_policy()
    spoil(folder)
    ended = swarm("model", "get", folder)
    assert (ended.code, ended.out) == (2, "")
    said = ended.err.splitlines()[-1]  # after what made the folder
    assert said.startswith(f"swarm: {folder}")
    assert words in said
    assert [path.name for path in (default_home() / "models").iterdir()] == [".lock"]


def test_unknown_names_and_missing_folders(swarm: Swarm) -> None:
    ended = swarm("model", "get", "smollm-135m")
    assert ended.code == 2
    assert "did you mean 'smollm2-135m'?" in ended.err
    ended = swarm("model", "get", "./nosuch")
    assert ended.code == 2
    assert "'./nosuch' is no folder here" in ended.err


# --- getting what is missing -----------------------------------------------------------------------------


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What `get_model` is asked for, and in which home."""
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        node.models, "get_model", lambda what, home, *_, **__: asked.append((what, home.root))
    )
    return asked


def configured(path: str, home: Path) -> NodeConfig:
    return load_config(overrides={"policy.path": path, "home": home})


def test_a_known_policy_that_is_missing_is_got_into_the_home(
    got: list[tuple[str, Path]], tmp_path: Path
) -> None:
    fetch_missing(configured("smollm2-135m", tmp_path))
    assert got == [("smollm2-135m", tmp_path)]


def test_a_policy_that_is_there_is_left_alone(got: list[tuple[str, Path]], tmp_path: Path) -> None:
    (tmp_path / "models/smollm2-135m").mkdir(parents=True)
    fetch_missing(configured("smollm2-135m", tmp_path))
    fetch_missing(configured("models/starling", tmp_path))
    assert got == []


def test_a_policy_that_nobody_knows_is_refused(got: list[tuple[str, Path]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.path 'smolm2' is no folder here"):
        fetch_missing(configured("smolm2", tmp_path))
    assert got == []


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("run", ("run",)),
        ("join", ("join", "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWE4yAZKyCLhLjfCosqahHTJSwhwUzh3yK18juZTpLFP5j")),
        ("bench", ("bench", "rollout", "--model", "models/starling")),
    ],
)
def test_commands_that_need_a_policy_get_it_first(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, module: str, command: tuple[str, ...]
) -> None:
    def refuse(config: NodeConfig) -> None:
        raise ConfigError(f"asked for {config.policy.path}")

    monkeypatch.setattr(f"swarm_cli.commands.{module}.fetch_missing", refuse)
    ended = swarm(*command, "--set", "policy.path=models/starling")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == "swarm: asked for models/starling"


def test_a_dry_run_gets_nothing(swarm: Swarm, got: list[tuple[str, Path]]) -> None:
    assert swarm("run", "--dry-run", "--set", "policy.path=smollm2-135m").code == 0
    assert got == []
