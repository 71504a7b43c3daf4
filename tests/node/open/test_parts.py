"""The parts of a node: what they take over from an earlier run of the name, and what is refused first."""

from __future__ import annotations

import dataclasses
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.config import NodeConfig, load_config
from node.environment.host import TrustedHost
from node.events import NoticeLevel
from node.open import parts as opening
from node.open.memory import BudgetError
from node.open.parts import Learner, Parts, open_parts
from node.rollout.adapter import adapter_tensors
from node.rollout.engine.base import EngineError, TokenSequence
from node.rollout.policy import Policy
from node.state.paths import Home, bundled
from node.train.checkpoint import save_checkpoint
from protocol.charter import found
from protocol.errors import ModelError
from protocol.identity import Identity
from protocol.messages import Charter


@pytest.fixture
def charter() -> Charter:
    return found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)


def config_of(home: Path, **changes: Any) -> NodeConfig:
    keys = {"home": home, "policy.path": "models/wren", "policy.device": "cpu"}
    return load_config([], keys | {key.replace("__", "."): value for key, value in changes.items()})


def opened(config: NodeConfig, charter: Charter, told: list[str] | None = None) -> Parts:
    def notice(level: NoticeLevel, text: str) -> None:
        if told is not None:
            told.append(text)

    return open_parts(config, charter, TrustedHost({}), notice)


def learner_of(parts: Parts) -> Learner:
    assert parts.learner is not None
    return parts.learner


def test_too_little_memory_is_told_before_anything_is_loaded(
    tmp_path: Path, charter: Charter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Policy, "load_model", never)
    config = config_of(tmp_path, policy__memory_gib=0.25)
    with pytest.raises(BudgetError, match=r"needs 0\.5 GiB here and may use 0\.2; raise policy\.memory_gib"):
        opened(config, charter)


def test_a_policy_that_computes_no_numbers_is_refused_before_the_plan_is_told(
    tmp_path: Path, charter: Charter
) -> None:
    folder = shutil.copytree(bundled("models/wren"), tmp_path / "wren")
    weights = load_file(folder / "model.safetensors")
    save_file({name: each * float("nan") for name, each in weights.items()}, folder / "model.safetensors")
    told: list[str] = []
    with pytest.raises((ModelError, EngineError), match=r"(?i)probabilit|no number|not finite|\bnan\b"):
        opened(config_of(tmp_path, policy__path=str(folder)), charter, told)
    assert told == []


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint_and_no_other_does(tmp_path: Path, charter: Charter) -> None:
    state = torch.random.get_rng_state()
    try:
        config = config_of(tmp_path)
        told: list[str] = []
        parts = opened(config, charter, told)
        first = learner_of(parts)
        assert told[0].startswith(
            "memory plan for the CPU: full tuning, adamw, concurrent, supervised, 16384 tokens a pass"
        )
        assert (parts.config.policy.tuning, parts.config.train.optimiser) == ("full", "adamw")
        assert (first.trainer.policy_version, parts.engine.policy_version) == (0, 0)
        with torch.no_grad():
            for parameter in first.trainer.model.parameters():
                parameter += 0.5
        first.trainer.policy_version = 41
        save_checkpoint(first.trainer, Home(tmp_path).run("latest").checkpoints / "v41")

        again = opened(config, charter)
        resumed = learner_of(again).trainer
        assert (resumed.policy_version, again.engine.policy_version) == (41, 41)
        for name, tensor in first.trainer.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], tensor)
        assert again.policy.base_model == parts.policy.base_model  # the lineage is the same
        for other in (config_of(tmp_path, run="other"), config_of(tmp_path, policy__path="models/rook")):
            assert learner_of(opened(other, charter)).trainer.policy_version == 0
    finally:
        torch.random.set_rng_state(state)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
def test_the_embedded_engine_computes_as_the_trainer_does(
    tmp_path: Path, charter: Charter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter in the type that the plan has for it on a GPU."""
    real, state = opening.memory_plan, torch.random.get_rng_state()

    def as_on_a_gpu(*args: Any) -> Any:
        plan = real(*args)
        return dataclasses.replace(plan, way=dataclasses.replace(plan.way, on_gpu=True))

    monkeypatch.setattr(opening, "memory_plan", as_on_a_gpu)
    config = config_of(tmp_path, policy__tuning="lora")
    try:
        loaded = opened(config, charter)
    finally:
        torch.random.set_rng_state(state)
    trainer = learner_of(loaded).trainer
    drawn = torch.Generator().manual_seed(0)
    moved = {
        name: torch.randn(tensor.shape, generator=drawn) / 20 for name, tensor in trainer.state_dict().items()
    }
    for name, tensor in adapter_tensors(trainer.model).items():
        tensor.copy_(moved[name])
    loaded.engine.update(moved, 1)
    sequences = [TokenSequence((2, 7, 3), tuple(range(5, 5 + length))) for length in (30, 4, 17)]
    assert loaded.engine.dtype == "bfloat16"
    for ours, theirs in zip(trainer.logprobs(sequences), loaded.engine.logprobs(sequences), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    loaded.engine.close()
