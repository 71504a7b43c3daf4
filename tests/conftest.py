"""Fixtures that several folders share: tiny random policies, made once per session in a temporary folder."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import string
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from node.rollout.policy import Policy

# A shell that runs the tests in the background ignores these, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tables are as wide as where no terminal is, on every terminal and in workers of pytest-xdist.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

pytest_plugins = ["tests.hostile.audit"]

# The same examples on every machine and in every run; no deadline, since the machine may be busy.
hypothesis.settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("deterministic")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several workers share the tests, one of them takes all that open real sockets: these have limits
    in seconds, and compete for ports and cores."""
    for item in items:
        if "net" in item.keywords:
            item.add_marker(pytest.mark.xdist_group("net"))


CHARACTERS = string.digits + string.ascii_lowercase + " +-=,"


def write_tiny_policy(folder: Path, characters: str = CHARACTERS, seed: int = 0, hidden: int = 32) -> Path:
    """A Llama-type policy with random weights: one token per character, template `<q>question<a>`, end
    `<end>`."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    specials = ["<pad>", "<end>", "<q>", "<a>"]
    vocab = {token: place for place, token in enumerate([*specials, "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(specials)

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.3,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "chat_template": "{% for message in messages %}<q>{{ message['content'] }}{% endfor %}"
                "{% if add_generation_prompt %}<a>{% endif %}",
            }
        )
    )
    return folder


@pytest.fixture(scope="session")
def compiled_delta() -> None:
    """The loops of `protocol.delta`, before a test's time counts and before it is watched for unpickling:
    numba reads its own cache so."""
    pytest.importorskip("constriction")
    pytest.importorskip("numba")
    from protocol.delta import warm_up

    warm_up()


@pytest.fixture(scope="session")
def compiled_merge(compiled_delta: None) -> None:
    """As `compiled_delta`, with the loops of `node.weights.merge.resolve`."""
    from node.weights.merge.resolve import warm_up

    warm_up()


@pytest.fixture(scope="session")
def tiny_policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny policy."""
    return write_tiny_policy(tmp_path_factory.mktemp("policies") / "tiny")


@pytest.fixture(scope="session")
def other_policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy with another tokenizer and other weights."""
    return write_tiny_policy(tmp_path_factory.mktemp("policies") / "other", CHARACTERS[::-1], seed=1)


@pytest.fixture(scope="module")
def policies(tiny_policy_path: Path, other_policy_path: Path) -> list[Policy]:
    """Two unlike ones, for whole nodes in one process."""
    import torch

    from node.rollout.policy import Policy

    torch.set_num_threads(1)
    return [Policy.open(tiny_policy_path), Policy.open(other_policy_path)]


@pytest.fixture
def make_tiny_policy(tmp_path: Path) -> Callable[[], Path]:
    """Writes a fresh folder that the test may damage."""
    return lambda: write_tiny_policy(tmp_path / "policy")


@pytest.fixture
def make_training_group() -> Callable[..., Any]:
    """Builds a `TrainingGroup` with seeded tokens and log-probabilities; keyword arguments replace its
    fields."""
    import numpy as np

    from node.weight.advantage.means import grpo
    from node.weight.groups import OWN_SOURCE, TrainingGroup, TrainingRollout
    from node.weight.settings import Treatment

    def make(source: str = OWN_SOURCE, size: int = 4, seed: int = 0, **fields: Any) -> TrainingGroup:
        draw = np.random.default_rng(seed)
        rollouts = []
        for _ in range(size):
            length = int(draw.integers(1, 7))
            behaviour_T = -3 * draw.random(length, dtype=np.float32) - 1
            rollouts.append(
                TrainingRollout(draw.integers(5, 46, length), float(behaviour_T.sum()), behaviour_T)
            )
        rewards = tuple(float(reward) for reward in draw.random(size))
        group = TrainingGroup(
            source=source,
            group=f"group{seed}",
            prompt_ids=(2, *(int(token) for token in draw.integers(5, 46, int(draw.integers(1, 6)))), 3),
            rollouts=tuple(rollouts),
            rewards=rewards,
            advantages=grpo(rewards),
            treatment=Treatment.OWN if source == OWN_SOURCE else Treatment.COMPAT,
        )
        return dataclasses.replace(group, **fields)

    return make
