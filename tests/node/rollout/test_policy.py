"""A policy folder: what is read from it, what is refused, how text becomes tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node.rollout.policy import Policy
from protocol.errors import ModelError


def test_facts_of_a_folder(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    weights = (tiny_policy_path / "model.safetensors").read_bytes()
    config = (tiny_policy_path / "config.json").read_bytes()
    assert policy.base_model == hashlib.sha256(weights + config).hexdigest()
    assert (
        policy.tokenizer_digest
        == hashlib.sha256((tiny_policy_path / "tokenizer.json").read_bytes()).hexdigest()
    )
    assert policy.vocab_size == 46
    assert policy.eos_token_id == 1
    assert policy.max_positions == 128
    # embedding 46 x 32, per layer q, o 32 x 32, k, v 32 x 16, three MLP 32 x 64, two norms 32; one last norm
    assert policy.params == 46 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 2048 + 64) + 32
    assert policy.params == sum(parameter.numel() for parameter in policy.load_model().parameters())


def test_prompt_is_framed_by_the_template(tiny_policy_path: Path) -> None:
    assert Policy.open(tiny_policy_path).encode_prompt("1+2") == [2, 6, 42, 7, 3]


def test_completion_ends_only_if_finished(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    assert policy.encode_completion("42", True) == [9, 7, 1]
    assert policy.encode_completion("42", False) == [9, 7]
    assert policy.decode([9, 7, 1]) == "42"


def test_text_cannot_smuggle_in_an_end_token(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    ids = policy.encode_completion("1<end>2", False)
    assert policy.eos_token_id not in ids
    assert ids[0] == 6
    assert ids[-1] == 7


def test_every_model_is_a_fresh_copy(tiny_policy_path: Path) -> None:
    policy = Policy.open(tiny_policy_path)
    first, second = policy.load_model(), policy.load_model()
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_one_sentence(make_tiny_policy: Callable[[], Path], name: str) -> None:
    folder = make_tiny_policy()
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
        Policy.open(folder)
    assert "\n" not in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No policy folder"):
        Policy.open(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_auto_map_is_refused(make_tiny_policy: Callable[[], Path], name: str) -> None:
    folder = make_tiny_policy()
    content = json.loads((folder / name).read_text())
    content["nested"] = [{"auto_map": {"AutoModel": "evil.Model"}}]
    (folder / name).write_text(json.dumps(content).replace("auto_map", "auto\\u005fmap"))
    with pytest.raises(ModelError, match="auto_map"):
        Policy.open(folder)


def test_programs_are_refused(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "deep").mkdir()
    (folder / "deep" / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(ModelError, match="program"):
        Policy.open(folder)


def test_pickled_weights_do_not_count(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        Policy.open(folder)


def test_broken_weights(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="safetensors"):
        Policy.open(folder)


def test_lost_tensors(make_tiny_policy: Callable[[], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_policy()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Policy.open(folder).load_model()


def test_index_cannot_leave_the_folder(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no file of that folder"):
        Policy.open(folder)


def test_tokenizer_larger_than_the_model(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 20
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="outside the model"):
        Policy.open(folder)


def test_no_chat_template(make_tiny_policy: Callable[[], Path]) -> None:
    folder = make_tiny_policy()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="chat template"):
        Policy.open(folder)


def test_unknown_dtype(tiny_policy_path: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        Policy.open(tiny_policy_path).load_model(dtype="int8")
