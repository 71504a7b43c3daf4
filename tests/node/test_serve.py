"""What `swarm serve` decides before vLLM is there: who may come in, which weights, which port."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.config import NodeConfig
from node.rollout.policy import Policy
from node.serve import Choice, choose, require_closed, serve
from node.train.checkpoint import CheckpointState
from protocol.errors import AddressError, ConfigError, ModelError


def say(level: str, text: str) -> None:
    raise AssertionError(f"nothing to say yet: {text}")


@pytest.fixture
def config(tmp_path: Path, tiny_policy_path: Path) -> NodeConfig:
    return NodeConfig(home=tmp_path, policy={"path": str(tiny_policy_path)})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


def checkpoint(config: NodeConfig, policy: Policy, version: int, **changes: str) -> Path:
    folder = config.home / "runs/latest/checkpoints" / f"v{version}"
    shutil.copytree(policy.path, folder)
    state = CheckpointState(version, version, 0, policy.base_model, policy.tokenizer_digest)
    (folder / "trainer.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(state, **changes)))
    return folder


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    require_closed(host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.7", "my-machine"])
def test_other_addresses_need_a_key(host: str) -> None:
    require_closed(host, "key")
    with pytest.raises(ConfigError, match=r"lets other machines in; give them a key with --api-key"):
        require_closed(host, "")


def test_the_newest_checkpoint_of_the_run(config: NodeConfig, policy: Policy) -> None:
    assert choose(config, policy) == Choice(policy.path, 0)
    checkpoint(config, policy, 9)
    newest = checkpoint(config, policy, 10)
    checkpoint(config, policy, 11, base_model="f" * 64)
    (config.home / "runs/latest/checkpoints/v12").mkdir()
    assert choose(config, policy) == Choice(newest, 10)
    assert choose(config, policy, follow=False) == Choice(policy.path, 0)


def test_a_checkpoint_by_its_path_keeps_its_version(config: NodeConfig, policy: Policy) -> None:
    base = Policy.open(checkpoint(config, policy, 7))
    assert choose(config, base, follow=False) == Choice(base.path, 7)
    elsewhere = config.model_copy(update={"run": "other"})  # a run that began with it counts from 0
    assert choose(elsewhere, base) == Choice(base.path, 0)


def test_without_vllm(config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"serving needs vLLM.*install murmuration\[vllm\]"):
        serve(config, notice=say)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed; nothing here gets as far as to import it."""
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or find(name))


@pytest.mark.usefixtures("vllm")
def test_a_port_in_use(config: NodeConfig) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(AddressError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            serve(config, notice=say, port=port)


@pytest.mark.usefixtures("vllm")
def test_an_address_of_nobody(config: NodeConfig) -> None:
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        serve(config, notice=say, host="192.0.2.1", api_key="key")


@pytest.mark.usefixtures("vllm")
def test_a_missing_folder(config: NodeConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No policy folder at .*nowhere"):
        serve(config, notice=say, port=0, policy=tmp_path / "nowhere")
