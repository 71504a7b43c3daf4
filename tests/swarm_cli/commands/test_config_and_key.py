"""`swarm config` and `swarm key`, and the resolved configuration of `swarm run --dry-run`."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest

from node.state.keys import load_key
from tests.swarm_cli.conftest import Swarm


def test_show_prints_defaults_files_and_flags_together(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 7\nlocal_groups = 3\n")
    ended = swarm("config", "show", "--config", file, "--set", "train.steps=9", "--home", tmp_path / "here")
    shown = json.loads(ended.out)
    assert ended.code == 0
    assert (shown["train"]["steps"], shown["train"]["local_groups"]) == (9, 3)
    assert shown["home"] == str(tmp_path / "here")


def test_what_show_prints_is_a_configuration_again(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "resolved.json"
    file.write_text(swarm("config", "show", "--set", "seed=3").out)
    assert swarm("config", "show", "--config", file).out == file.read_text()


def test_a_dry_run_prints_the_configuration_and_touches_nothing(swarm: Swarm, tmp_path: Path) -> None:
    home = tmp_path / "untouched"
    ended = swarm("run", "--dry-run", "--home", home, "--name", "ada", "--steps", "4")
    assert json.loads(ended.out)["name"] == "ada"
    assert json.loads(ended.out)["train"]["steps"] == 4
    assert not home.exists()


def test_the_schema_explains_every_key(swarm: Swarm) -> None:
    schema = json.loads(swarm("config", "schema").out)
    for section in [schema, *schema["$defs"].values()]:
        for name, field in section["properties"].items():
            assert "$ref" in field or field.get("description"), name


def test_path_prints_where_things_lie(swarm: Swarm, tmp_path: Path) -> None:
    assert swarm("config", "path").out.strip() == str(tmp_path / "home")
    assert swarm("config", "path", "--home", tmp_path).out.strip() == str(tmp_path)
    assert (Path(swarm("config", "path", "--profiles").out.strip()) / "demo.toml").is_file()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.stepz=3", "unknown config key 'train.stepz'; the nearest valid one is 'train.steps'"),
        ("train.steps=0", "config key train.steps = 0"),
        ("train.steps=many", "config key train.steps = 'many'"),
        ("network.transport=pigeon", "config key network.transport = 'pigeon'"),
        ("train.steps", "--set 'train.steps' is not of the form key=value"),
    ],
)
def test_wrong_keys_and_values_are_one_sentence(swarm: Swarm, setting: str, sentence: str) -> None:
    ended = swarm("config", "show", "--set", setting)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"swarm: {sentence}")
    assert ended.err.count("\n") == 1


def test_a_missing_file_is_one_sentence(swarm: Swarm) -> None:
    ended = swarm("config", "show", "--config", "nosuch.toml")
    assert ended.code == 2
    assert "no config file 'nosuch.toml'" in ended.err


def test_a_key_is_made_once_and_only_its_public_part_is_shown(swarm: Swarm, tmp_path: Path) -> None:
    home = tmp_path / "home"
    made = json.loads(swarm("key", "new", "--json").out)
    path = home / "identity.key"
    assert made == {"peer_id": load_key(path).peer_id, "path": str(path)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    again = swarm("key", "new")
    assert again.code == 2
    assert "never overwritten" in again.err
    told = swarm("key", "show").out + swarm("key", "show", "--json").out + swarm("config", "show").out
    assert made["peer_id"] in told
    for form in secret_forms(path):
        assert form not in told


def secret_forms(path: Path) -> list[str]:
    """The private key as text that somebody could print."""
    seed = path.read_bytes()[4:36]
    return [seed.hex(), base64.b64encode(seed).decode()[:40], repr(seed)[2:-1]]


def test_without_a_key_show_says_how_to_make_one(swarm: Swarm) -> None:
    ended = swarm("key", "show")
    assert ended.code == 2
    assert "`swarm key new` makes one" in ended.err


def test_a_key_moves_to_another_home(swarm: Swarm, tmp_path: Path) -> None:
    made = json.loads(swarm("key", "new", "--json").out)
    file = tmp_path / "moved.key"
    assert json.loads(swarm("key", "export", file, "--json").out) == {
        "peer_id": made["peer_id"],
        "path": str(file),
    }
    assert file.stat().st_mode & 0o777 == 0o600
    assert swarm("key", "export", file).code == 2  # never overwritten
    other = tmp_path / "other"
    assert (
        json.loads(swarm("key", "import", file, "--home", other, "--json").out)["peer_id"] == made["peer_id"]
    )
    assert json.loads(swarm("key", "show", "--home", other, "--json").out)["peer_id"] == made["peer_id"]
    ended = swarm("key", "import", file, "--home", other)
    assert (ended.code, "already exists" in ended.err) == (2, True)
    file.chmod(0o644)
    assert "is open to others" in swarm("key", "import", file, "--home", tmp_path / "third").err
