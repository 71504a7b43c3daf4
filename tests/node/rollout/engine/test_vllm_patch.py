"""Differences between two states of the weights, and what they weigh. Needs no vLLM."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from node.rollout.engine import _vllm_patch, _vllm_process
from node.rollout.engine._vllm_patch import Mirror, TensorPatch, WeightsDoNotFit, batches
from protocol.errors import ConfigError

SHAPES = {"a": (4, 5), "b": (300,)}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def applied(patches: list[TensorPatch], base: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    result = {name: tensor.to(dtype).reshape(-1).clone() for name, tensor in base.items()}
    for patch in patches:
        values = torch.frombuffer(bytearray(patch.values), dtype=dtype)
        if patch.index_bytes:
            kind = np.int32 if patch.index_bytes == 4 else np.int64
            result[patch.name][np.frombuffer(patch.indices, kind).astype(np.int64)] = values
        else:
            result[patch.name][patch.start : patch.start + len(values)] = values
    return {name: tensor.reshape(SHAPES[name]) for name, tensor in result.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patch_turns_one_state_into_the_other(dtype: torch.dtype) -> None:
    mirror = Mirror(SHAPES, dtype)
    old = weights()
    fitted = mirror.fit(old)
    whole = mirror.changes(fitted)
    assert sum(patch.payload_bytes for patch in whole) == 320 * dtype.itemsize
    mirror.commit(fitted, whole)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][1, 2] = float("nan")
    new["b"][7] = -0.0
    new["b"][9] += 1e-12  # below the resolution of either type
    fitted = mirror.fit(new)
    patches = mirror.changes(fitted)
    assert [(patch.name, patch.index_bytes, len(patch.values)) for patch in patches] == [
        ("a", 4, dtype.itemsize),
        ("b", 4, dtype.itemsize),
    ]
    result = applied(patches, old, dtype)
    for name in SHAPES:
        expected = new[name].to(dtype)
        assert torch.equal(result[name].view(torch.int16), expected.view(torch.int16))
    mirror.commit(fitted, patches)
    assert mirror.changes(mirror.fit(new)) == []


def test_many_changes_travel_as_a_run() -> None:
    mirror = Mirror(SHAPES, torch.float32)
    fitted = mirror.fit(weights())
    mirror.commit(fitted, mirror.changes(fitted))
    other = weights()
    other["b"] += 1
    (patch,) = mirror.changes(mirror.fit(other))
    assert (patch.name, patch.index_bytes, patch.payload_bytes) == ("b", 0, 1200)


def test_after_a_failure_everything_is_sent() -> None:
    mirror = Mirror(SHAPES, torch.float32)
    fitted = mirror.fit(weights())
    mirror.commit(fitted, mirror.changes(fitted))
    mirror.known = False
    assert {patch.name for patch in mirror.changes(fitted)} == set(SHAPES)
    held = mirror.weights
    assert held is not None, "a new process gets these"
    assert torch.equal(held["b"], fitted["b"])


def test_held_weights_are_a_copy() -> None:
    mirror = Mirror(SHAPES, torch.float32)
    state = weights()
    fitted = mirror.fit(state)
    mirror.commit(fitted, mirror.changes(fitted))
    state["b"] += 1  # the trainer goes on
    assert len(mirror.changes(mirror.fit(state))) == 1


def test_large_patches_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_patch, "CHUNK_BYTES", 64)
    mirror = Mirror(SHAPES, torch.float32)
    fitted = mirror.fit(weights())
    patches = mirror.changes(fitted)
    assert max(patch.payload_bytes for patch in patches) <= 64
    result = applied(patches, {name: torch.zeros(shape) for name, shape in SHAPES.items()}, torch.float32)
    assert all(torch.equal(result[name], tensor) for name, tensor in weights().items())
    mirror.commit(fitted, patches)
    other = weights()
    other["b"][::3] += 1
    sparse = mirror.changes(mirror.fit(other))
    assert len(sparse) == 13
    assert torch.equal(applied(sparse, weights(), torch.float32)["b"], other["b"])
    for batch in batches(patches):
        assert sum(patch.payload_bytes for patch in batch) <= 64


def test_weights_that_do_not_fit() -> None:
    mirror = Mirror(SHAPES, torch.float32)
    state = weights()
    with pytest.raises(WeightsDoNotFit, match="1 tensors are missing, the first is b"):
        mirror.fit({"a": state["a"]})
    with pytest.raises(WeightsDoNotFit, match=r"a is \(5, 4\), not \(4, 5\)"):
        mirror.fit(state | {"a": state["a"].T})
    with pytest.raises(WeightsDoNotFit, match="c is no tensor of the checkpoint"):
        mirror.fit(state | {"c": torch.zeros(3)})
    assert set(mirror.fit(state | {"tied": state["a"].clone()})) == {"a", "b"}


def test_without_vllm_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed here; install murmuration"):
        _vllm_process.require_vllm()


def test_the_last_error_is_found_among_the_lines(tmp_path: object) -> None:
    from pathlib import Path

    log = Path(str(tmp_path)) / "errors.log"
    log.write_text("ERROR 1 old\nValueError: long ago\n")
    start = log.stat().st_size
    assert _vllm_process.last_error(log, start) == ""
    with log.open("a") as stream:
        stream.write("ERROR 7 EngineCore failed\nTraceback:\n  File x\nRuntimeError: out of memory\nbye\n")
    assert _vllm_process.last_error(log, start) == "RuntimeError: out of memory"
    assert _vllm_process.last_error(log.parent / "none.log", 0) == ""
