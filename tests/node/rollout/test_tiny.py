"""The tiny policies: what is committed loads and is sound, and what is built repeats to the byte."""

from __future__ import annotations

import hashlib
import json
import random
import string
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from node.environment.installed import DEMO_ENVIRONMENTS
from node.environment.records import Completion, Environment
from node.environment.tasks import open_environment
from node.rollout import tiny
from node.rollout.policy import Policy
from node.rollout.tiny import MAX_NEW_TOKENS, TINY_POLICIES, TinyReport, TinySpec, make_tiny
from protocol.errors import ConfigError
from protocol.prompts import is_held_out

MODELS = Path(__file__).parents[3] / "configs" / "models"
NAMES = [spec.name for spec in TINY_POLICIES]


@pytest.fixture(scope="module")
def environments() -> list[Environment]:
    return [open_environment(spec.name, json.loads(spec.config)) for spec in DEMO_ENVIRONMENTS]


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {name: Policy.open(MODELS / name) for name in NAMES}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def quick_build(out: Path, seed: int, name: str = "rook") -> TinyReport:
    spec: TinySpec = next(spec for spec in TINY_POLICIES if spec.name == name)
    quick = msgspec.structs.replace(
        spec, clean_steps=3, noisy_steps=2, batch_size=8, draws_per_task=400, evaluation_prompts=4
    )
    return tiny.make_tiny_from_spec(quick, out, seed, lambda *_: None)


@pytest.mark.parametrize("name", NAMES)
def test_committed_files_are_complete_and_small(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (MODELS / name).iterdir()}
    assert files.keys() == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 5_000_000


@pytest.mark.parametrize(("name", "millions"), [("wren", 0.3), ("starling", 0.6), ("rook", 1.2)])
def test_committed_weights_are_finite_and_as_many_as_said(name: str, millions: float) -> None:
    from safetensors.numpy import load_file

    weights = load_file(MODELS / name / "model.safetensors")
    assert all(np.isfinite(tensor).all() and tensor.dtype == np.float32 for tensor in weights.values())
    assert sum(tensor.size for tensor in weights.values()) == pytest.approx(millions * 1e6, rel=0.15)
    assert all(tensor.std() > 0 for key, tensor in weights.items() if "norm" not in key)


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_what_engines_expect(name: str) -> None:
    """vLLM's attention on CPU takes heads that are multiples of 32 wide."""
    config = json.loads((MODELS / name / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] % 32 == 0
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    generation = json.loads((MODELS / name / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["temperature"] == 1.0


def test_two_tokenizers_for_three_policies(policies: dict[str, Policy]) -> None:
    assert policies["wren"].tokenizer_digest == policies["starling"].tokenizer_digest
    assert policies["rook"].tokenizer_digest != policies["wren"].tokenizer_digest
    assert len({policy.base_model for policy in policies.values()}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_short(policies: dict[str, Policy], environments: list[Environment], name: str) -> None:
    """One token per fixed phrase: 380 characters of sorting instructions are two tokens."""
    policy = policies[name]
    for environment in environments:
        lengths = [len(policy.encode_prompt(environment.prompt(3, index).text)) for index in range(20)]
        assert 4 <= min(lengths) <= max(lengths) <= 9


@pytest.mark.parametrize("name", NAMES)
def test_answers_survive_the_tokenizer(
    policies: dict[str, Policy], environments: list[Environment], name: str
) -> None:
    policy, rng = policies[name], random.Random(5)
    for environment in environments:
        for index in range(20):
            prompt = environment.prompt(3, index)
            right, wrong = tiny.right_answer(prompt), tiny.wrong_answer(prompt, rng)
            for answer in (right, wrong):
                ids = policy.encode_completion(answer, finished=True)
                assert policy.decode(ids) == answer
                assert len(ids) < MAX_NEW_TOKENS
                assert policy.decode(policy.encode_prompt(prompt.text)) == prompt.text
            assert environment.score(prompt, Completion(right, finished=True)).reward == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_any_text_can_be_encoded(policies: dict[str, Policy], name: str) -> None:
    policy = policies[name]
    printable = string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")
    assert policy.decode(policy.encode_completion(printable, finished=False)) == printable
    foreign = policy.encode_completion("naïve \U0001f426", finished=False)
    assert len(foreign) == len("naïve \U0001f426")
    assert policy.encode_completion("", finished=True) == [policy.eos_token_id]


@pytest.mark.parametrize("name", NAMES)
def test_chat_template_renders(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True)
    chat = [{"role": "user", "content": "2 + 2 ="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "2 + 2 =<a>"
    chat.append({"role": "assistant", "content": "4"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "2 + 2 =<a>4<end>"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_committed_policies_are_unsure_but_not_ignorant(environments: list[Environment], name: str) -> None:
    """What reinforcement needs: groups of 8 with mixed rewards. The card must say what is measured here."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODELS / name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True)
    lessons = [
        tiny.Lesson(environment, [], held_out)
        for environment in environments
        if (held_out := [p for i in range(3000) if is_held_out((p := environment.prompt(17, i)).text)])
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shares = [share for _, share in tiny.accuracies(model, tokenizer, lessons, 300)]
    assert len(shares) == 3
    assert all(0.08 < share < 0.6 for share in shares)
    assert 0.2 <= sum(shares) / 3 <= 0.45


@pytest.mark.slow
def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again = (quick_build(tmp_path / place, seed=3) for place in ("first", "again"))
    other = quick_build(tmp_path / "other", seed=4)
    assert msgspec.structs.replace(first, folder="") == msgspec.structs.replace(again, folder="")
    assert digests(Path(first.folder)) == digests(Path(again.folder))
    assert (
        digests(Path(first.folder))["model.safetensors"] != digests(Path(other.folder))["model.safetensors"]
    )


@pytest.mark.slow
def test_building_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[str] = []
    real = tiny.right_answer
    monkeypatch.setattr(tiny, "right_answer", lambda prompt: asked.append(prompt.text) or real(prompt))
    before = torch.get_num_threads(), torch.random.get_rng_state().tolist(), random.getstate()
    leftover = tmp_path / "wren" / "leftover"
    leftover.parent.mkdir()
    leftover.touch()
    report = quick_build(tmp_path, seed=0, name="wren")
    assert (torch.get_num_threads(), torch.random.get_rng_state().tolist(), random.getstate()) == before
    assert not leftover.exists()
    assert report.bytes <= 5_000_000
    assert asked
    assert not any(is_held_out(text) for text in asked)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wren, starling, rook"):
        make_tiny("eagle", tmp_path, 0, lambda *_: None)


def test_command_refuses_unknown_names(tmp_path: Path) -> None:
    from swarm_cli.commands.model import app

    result = CliRunner().invoke(app, ["make-tiny", "eagle", "--out", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "'eagle'" in str(result.exception)
    assert result.exception.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_command_builds_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm_cli.commands.model import app

    def fake(name: str, out: Path, seed: int, progress: Any) -> TinyReport:
        progress("learning", 1, 2)
        return TinyReport(name, str(out / name), seed, 10, 20, (("a", 0.9),), (("a", 0.25),))

    monkeypatch.setattr(tiny, "make_tiny", fake)
    result = CliRunner().invoke(app, ["make-tiny", "all", "--out", str(tmp_path), "--seed", "7", "--json"])
    assert result.exit_code == 0
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(report["name"], report["seed"]) for report in reports] == [(name, 7) for name in NAMES]
