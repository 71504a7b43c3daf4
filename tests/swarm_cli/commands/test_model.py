"""`swarm model get`: what is printed where, and how a refusal ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from node.paths import default_home
from node.rollout.policy import Policy
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


def _without_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_with_code, "models that bring code are refused"),
        (_with_auto_map, "models that bring code are refused"),
        (_without_template, "has no chat template"),
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
    assert not list((default_home() / "models").iterdir())


def test_unknown_names_and_missing_folders(swarm: Swarm) -> None:
    ended = swarm("model", "get", "smollm-135m")
    assert ended.code == 2
    assert "did you mean 'smollm2-135m'?" in ended.err
    ended = swarm("model", "get", "./nosuch")
    assert ended.code == 2
    assert "'./nosuch' is no folder here" in ended.err


def test_a_run_names_the_command_that_gets_its_policy(swarm: Swarm) -> None:
    ended = swarm("run", "--config", "smollm2-cpu.toml", "--set", "network.transport=none")
    assert ended.code == 2
    assert ended.err.splitlines()[-1].endswith("is not on this machine yet; swarm model get smollm2-135m")
