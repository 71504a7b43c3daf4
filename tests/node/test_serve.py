"""What `swarm serve` decides without vLLM: who may come in, which weights, which port, when they change."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.config import NodeConfig
from node.rollout.policy import Policy
from node.serve import Choice, Door, choose, require_closed, serve
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


def test_a_broken_checkpoint_is_not_started_with(config: NodeConfig, policy: Policy) -> None:
    whole, broken = checkpoint(config, policy, 3), checkpoint(config, policy, 4)
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert choose(config, policy) == Choice(broken, 4)  # which then is told, and left out
    assert choose(config, policy, whole=True) == Choice(whole, 3)


def test_a_checkpoint_by_its_path_keeps_its_version(config: NodeConfig, policy: Policy) -> None:
    base = Policy.open(checkpoint(config, policy, 7))
    assert choose(config, base, follow=False) == Choice(base.path, 7)
    elsewhere = config.model_copy(update={"run": "other"})  # a run that began with it counts from 0
    assert choose(elsewhere, base) == Choice(base.path, 0)


async def settled() -> None:
    """Every task that can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Visit:
    """A request: `inside` once it was let in, `leave` when its answer was sent."""

    def __init__(self, door: Door) -> None:
        self._stay = door.enter()
        self._entering = asyncio.ensure_future(anext(self._stay))

    @property
    def inside(self) -> bool:
        return self._entering.done()

    async def leave(self) -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(self._stay)


async def test_the_door_closes_behind_the_last_answer() -> None:
    door = Door()
    door.open()
    first, second = Visit(door), Visit(door)
    await settled()
    assert first.inside
    closing = asyncio.ensure_future(door.close(60))
    late = Visit(door)
    await first.leave()
    await settled()
    assert not closing.done(), "the second one may still be without the engine's answer"
    await second.leave()
    assert await closing
    assert not late.inside
    door.open()
    await settled()
    assert late.inside
    await late.leave()


async def test_a_door_that_closes_at_once_lets_nobody_slip_in() -> None:
    door = Door()
    waiting = Visit(door)
    await settled()
    door.open()
    assert await door.close(60)
    await settled()
    assert not waiting.inside
    door.open()
    await settled()
    await waiting.leave()


async def test_an_answer_that_takes_too_long_is_not_waited_for() -> None:
    door = Door()
    door.open()
    slow = Visit(door)
    await settled()
    assert not await door.close(0)
    await slow.leave()
    assert await door.close(0)


async def test_an_answer_that_fails_has_left() -> None:
    door = Door()
    door.open()
    stay = door.enter()
    await anext(stay)
    with pytest.raises(ConnectionError):
        await stay.athrow(ConnectionError())  # type: ignore[attr-defined]
    assert await door.close(0)


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
