"""Starts that fail: each with one sentence, and nothing left running."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.config import VllmConfig, load_config
from node.open.engine import open_engine
from node.rollout.engine._vllm_process import EngineDied, VllmProcess
from node.rollout.engine.base import EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from protocol.errors import ConfigError, ModelError, SwarmError
from protocol.messages import Sampling

STARLING = Path(__file__).parents[2] / "configs/models/starling"


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """vLLM leaves the sockets of a failed start to the collector, which then complains: here, not later."""
    yield
    gc.collect()


def folder(tmp_path: Path, **changes: Any) -> Path:
    """A copy of the bundled policy with another config.json."""
    copy = Path(shutil.copytree(STARLING, tmp_path / "policy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


def start(path: Path, **vllm: Any) -> None:
    keys = {f"vllm.{key}": value for key, value in vllm.items()}
    config = load_config(overrides={"rollout.engine": "vllm", "vllm.kv_cache_mib": 64, **keys})
    open_engine(config, Policy.open(path)).close()


def none_left() -> bool:
    return not any(process.name == "EngineCore" for process in multiprocessing.active_children())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "nosuch", "architectures": ["NoSuch"]},
            "config.json cannot be used: .*`nosuch` but Transformers does not",
        ),
        ({"model_type": "bert"}, "policy holds no tensor of a bert model: config.json and weights do not"),
    ],
)
def test_a_model_that_nobody_knows(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        start(folder(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert none_left()


def test_rows_without_a_word_are_neither_sampled_nor_counted() -> None:
    """As many rows as the prompt needs have a word here, but for one; the embedded engine's numbers are the
    reference."""
    whole = Policy.open(STARLING)
    prompt = tuple(whole.encode_prompt("spell abc backward"))
    hole = next(each for each in range(20, max(prompt)) if each not in prompt)
    policy = dataclasses.replace(whole, vocab_size=max(prompt) + 1, holes=(hole,))
    assert policy.vocab_size < whole.vocab_size - 5
    with contextlib.closing(VllmEngine(policy, VllmConfig(kv_cache_mib=64))) as engine:
        sampling = Sampling(max_new_tokens=16, temperature=1.5)
        (rollouts,) = engine.generate([GenerationRequest(prompt, 32, 1, sampling)])
        answers = [each.answer for each in rollouts]
        ids = [tuple(np.frombuffer(each.token_ids, "<u4").tolist()) for each in answers]
        assert max(map(max, ids)) < policy.vocab_size
        assert all(hole not in each for each in ids)
        sequences = [TokenSequence(prompt, each, 1.5) for each in ids]
        for reference, scored, sampled in zip(
            TransformersEngine(policy).logprobs(sequences), engine.logprobs(sequences), answers, strict=True
        ):
            np.testing.assert_allclose(scored, reference, atol=1e-4)
            np.testing.assert_allclose(np.frombuffer(sampled.logprobs, "<f4"), reference, atol=1e-4)


def test_a_folder_with_code_is_refused_before_vllm(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="auto_map entry; models that bring code are refused"):
        start(folder(tmp_path, auto_map={"AutoModel": "evil.Model"}))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        start(tmp_path / "nowhere")
    gone = folder(tmp_path)
    policy = Policy.open(gone)
    shutil.rmtree(gone)
    with pytest.raises(ModelError, match="policy") as caught:
        VllmEngine(policy, VllmConfig(kv_cache_mib=64))
    assert "\n" not in str(caught.value)
    assert none_left()


def test_not_ready_in_time() -> None:
    with pytest.raises(
        EngineError, match=r"not ready after \d+ s and was stopped; raise vllm.start_timeout_s"
    ):
        start(STARLING, start_timeout_s=1)
    assert none_left()


def test_closed_before_it_is_ready() -> None:
    closing = threading.Event()
    closing.set()
    with pytest.raises(EngineDied, match="closed before it was ready"):
        VllmProcess(
            lambda *, on_cpu: {"model": str(STARLING), "skip_tokenizer_init": True, "enforce_eager": True},
            start_timeout_s=60,
            deadline_s=60,
            notice=lambda level, text: None,
            closing=closing,
        )
    for thread in threading.enumerate():
        if thread.name == "vllm":  # it has not begun with a process, and does not now
            thread.join(60)
    assert none_left()


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match=r"vLLM could not start with .*policy; its last error: ") as caught:
        start(folder(tmp_path, hidden_size=96, head_dim=24))
    assert "\n" not in str(caught.value)
    assert none_left()


def test_without_our_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.rollout.engine._vllm_process.PLUGIN", "nowhere")
    with pytest.raises(ConfigError, match="the entry point that lets vLLM take new weights is not installed"):
        start(STARLING)
