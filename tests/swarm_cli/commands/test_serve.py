"""`swarm serve` as far as the command line goes: which configuration, and refusals in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import node.serve
from node.config import load_config
from swarm_cli.commands.serve import serve
from tests.swarm_cli.conftest import Swarm


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reaches `node.serve`."""
    got: dict[str, Any] = {}
    monkeypatch.setattr(node.serve, "serve", lambda config, **rest: got.update(rest, config=config))
    return got


def test_a_run_is_served_as_it_was_started(tmp_path: Path, asked: dict[str, Any]) -> None:
    kept = load_config(overrides={"name": "robin", "home": tmp_path, "vllm.max_context": 99})
    folder = tmp_path / "runs/latest"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(kept.model_dump_json())
    serve(home=tmp_path)
    assert asked["config"] == kept
    assert (asked["host"], asked["port"], asked["api_key"], asked["policy"]) == ("127.0.0.1", 8000, "", None)
    serve(home=tmp_path, name="wren", setting=["vllm.max_context=77"])
    assert (asked["config"].name, asked["config"].vllm.max_context) == ("wren", 77)
    serve(home=tmp_path, run="other")
    assert (asked["config"].name, asked["config"].run) == ("node", "other")


def test_a_config_given_by_hand_wins_over_the_run(tmp_path: Path, asked: dict[str, Any]) -> None:
    folder = tmp_path / "runs/latest"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"name": "robin"}')
    given = tmp_path / "given.toml"
    given.write_text('name = "given"')
    serve(config=[given], home=tmp_path)
    assert asked["config"].name == "given"


def test_the_key_comes_from_the_environment(
    swarm: Swarm, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    ended = swarm("serve", "--host", "0.0.0.0", "--port", "0")
    assert ended.code == 0
    assert (asked["api_key"], asked["host"], asked["port"]) == ("secret", "0.0.0.0", 0)


def test_others_are_not_let_in_without_a_key(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    ended = swarm("serve", "--host", "0.0.0.0")
    assert (ended.code, ended.out) == (2, "")
    refusal = "swarm: --host '0.0.0.0' lets other machines in; give them a key with --api-key"
    assert ended.err.splitlines()[-1].startswith(refusal)
