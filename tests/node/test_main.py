"""The real parts of a node: what they take over from an earlier run of the same name, and how they end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from node import build
from node.build import Loaded, load
from node.config import NodeConfig, load_config
from node.events import Event
from node.main import _EngineNotices, _run
from node.node import NodeParts
from node.rollout.adapter import load_adapter
from node.rollout.engine.base import TokenSequence
from node.sandbox.scorer import Scorer
from node.state.paths import Home, bundled
from node.train.checkpoint import save_checkpoint
from protocol.charter import found
from protocol.identity import Identity
from protocol.messages import Charter


@pytest.fixture
def charter() -> Charter:
    return found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)


def config_of(home: Path, run: str = "latest", policy: str = "models/wren") -> NodeConfig:
    return load_config([], {"home": home, "run": run, "policy.path": policy, "policy.device": "cpu"})


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint_and_no_other_does(tmp_path: Path, charter: Charter) -> None:
    state = torch.random.get_rng_state()
    try:
        config = config_of(tmp_path)
        told: list[str] = []
        planned, first = load(config, charter, lambda level, text: told.append(text))
        assert told[0].startswith(
            "memory plan for the CPU: full tuning, adamw, concurrent, supervised, 16384 tokens a pass"
        )
        assert (planned.policy.tuning, planned.train.optimiser) == ("full", "adamw")
        assert (first.trainer.policy_version, first.engine.policy_version) == (0, 0)
        with torch.no_grad():
            for parameter in first.trainer.model.parameters():
                parameter += 0.5
        first.trainer.policy_version = 41
        save_checkpoint(first.trainer, Home(tmp_path).run("latest").checkpoints / "v41")

        _, again = load(config, charter, lambda level, text: None)
        assert (again.trainer.policy_version, again.engine.policy_version) == (41, 41)
        for name, tensor in first.trainer.state_dict().items():
            assert torch.equal(again.trainer.state_dict()[name], tensor)
        assert again.policy.base_model == first.policy.base_model  # the lineage is the same
        for other in (config_of(tmp_path, run="other"), config_of(tmp_path, policy="models/rook")):
            assert load(other, charter, lambda level, text: None)[1].trainer.policy_version == 0
    finally:
        torch.random.set_rng_state(state)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
def test_the_embedded_engine_computes_as_the_trainer_does(
    tmp_path: Path, charter: Charter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter in the type that the plan has for it on a GPU."""
    real, state = build.plan_of, torch.random.get_rng_state()
    monkeypatch.setattr(build, "plan_of", lambda *args: dataclasses.replace(real(*args), dtype="bfloat16"))
    policy = config_of(tmp_path).policy.model_copy(update={"tuning": "lora"})
    config = config_of(tmp_path).model_copy(update={"policy": policy})
    try:
        _, loaded = load(config, charter, lambda level, text: None)
    finally:
        torch.random.set_rng_state(state)
    drawn = torch.Generator().manual_seed(0)
    moved = {
        name: torch.randn(tensor.shape, generator=drawn) / 20
        for name, tensor in loaded.trainer.state_dict().items()
    }
    load_adapter(loaded.trainer.model, moved)
    loaded.engine.update(moved, 1)
    sequences = [TokenSequence((2, 7, 3), tuple(range(5, 5 + length))) for length in (30, 4, 17)]
    assert loaded.engine.dtype == "bfloat16"
    for ours, theirs in zip(
        loaded.trainer.logprobs(sequences), loaded.engine.logprobs(sequences), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=config.rollout.parity_tolerance)
    loaded.engine.close()


class Endless:
    """An engine that generates until it is closed."""

    def __init__(self) -> None:
        self.generating = threading.Event()
        self._closed = threading.Event()
        self.was_ended = False

    def generate(self) -> None:
        self.generating.set()
        self.was_ended = self._closed.wait(5)

    def close(self) -> None:
        self._closed.set()


class Stopped:
    """A node that is stopped while a thread of its own waits for the engine."""

    def __init__(self, config: NodeConfig, parts: NodeParts) -> None:
        self._parts = parts

    async def run(self) -> None:
        engine = cast("Endless", self._parts.engine)
        rollouts = asyncio.create_task(self._parts.compute.run("generate", engine.generate))
        await asyncio.to_thread(engine.generating.wait)
        rollouts.cancel()


def test_what_waits_for_the_engine_is_ended_before_it_is_waited_for(
    tmp_path: Path, charter: Charter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.node.Node", Stopped)
    home, engine = Home(tmp_path).create(), Endless()
    config = load_config([], {"home": tmp_path, "network.transport": "none"})
    home.run(config.run).create()
    fields = dict.fromkeys((field.name for field in dataclasses.fields(Loaded)), None)
    loaded = cast("Loaded", SimpleNamespace(**{**fields, "engine": engine}))
    sandbox = cast("Scorer", None)
    shown: list[Event] = []
    notices = _EngineNotices(shown.append)
    assert asyncio.run(
        _run(config, home, Identity.generate(), charter, loaded, sandbox, notices, shown.append)
    )
    assert engine.was_ended
