"""A low-rank adapter: starts without effect, moves only itself, and its files are PEFT's."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from node.rollout.adapter import (
    AdapterSpec,
    adapter_state,
    adapter_tensors,
    merged_state,
    wrap,
    write_adapter,
)
from node.rollout.policy import Policy
from protocol.errors import ConfigError, ModelError
from tests.node.rollout.rounding import LOGPROB_NATS

if TYPE_CHECKING:
    from peft import PeftModel

SPEC = AdapterSpec(rank=4, alpha=8.0)
TOKENS = torch.tensor([[2, 5, 9, 7, 3]])
pytestmark = pytest.mark.slow
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def load(model: PeftModel, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in adapter_tensors(model).items():
        tensor.copy_(state[name])


def drawn(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Another state of the same shapes, with an effect."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) / 5 for name, tensor in state.items()}


def test_without_peft_one_sentence_says_what_to_do(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"PEFT is not installed; pip install 'murmuration\[node\]'"):
        wrap(policy.load_model(), SPEC)


@needs_peft
def test_a_new_adapter_changes_nothing_and_alone_has_gradients(policy: Policy) -> None:
    plain, wrapped = policy.load_model(), wrap(policy.load_model(), SPEC)
    assert torch.equal(logits(plain), logits(wrapped))
    learning = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert len(learning) == 2 * 7 * 2  # A and B of seven linears in two layers
    assert all(".lora_" in name for name in learning)


@needs_peft
def test_state_has_the_saved_names_and_goes_round(policy: Policy) -> None:
    first, second = wrap(policy.load_model(), SPEC), wrap(policy.load_model(), SPEC)
    state = adapter_state(first)
    layer = "base_model.model.model.layers.1.mlp.down_proj"
    assert state[f"{layer}.lora_A.weight"].shape == (4, 64)
    assert state[f"{layer}.lora_B.weight"].shape == (32, 4)
    load(first, drawn(state))
    assert not torch.equal(state[f"{layer}.lora_B.weight"], adapter_state(first)[f"{layer}.lora_B.weight"])
    load(second, adapter_state(first))
    assert torch.equal(logits(first), logits(second))
    assert not torch.allclose(logits(first), logits(policy.load_model()), atol=1e-2)


@needs_peft
def test_merged_weights_are_a_plain_policy_and_leave_the_adapter_alone(policy: Policy) -> None:
    model = wrap(policy.load_model(), SPEC)
    load(model, drawn(adapter_state(model)))
    before = logits(model)
    merged = merged_state(model)
    assert torch.equal(logits(model), before)
    plain = policy.load_model()
    assert set(merged) == {name for name, _ in plain.named_parameters()}
    plain.load_state_dict(merged, strict=False)
    assert torch.allclose(logits(plain), before, atol=LOGPROB_NATS)


@needs_peft
def test_peft_reads_the_files(policy: Policy, tmp_path: Path) -> None:
    from peft import PeftModel

    model = wrap(policy.load_model(), SPEC)
    state = drawn(adapter_state(model))
    load(model, state)
    write_adapter(tmp_path / "made", SPEC, state, policy.path)
    theirs = PeftModel.from_pretrained(policy.load_model(), tmp_path / "made")
    assert torch.equal(logits(theirs), logits(model))


@needs_peft
def test_a_model_without_these_layers_is_refused(policy: Policy) -> None:
    with pytest.raises(ModelError, match="llama model has no layers c_attn"):
        wrap(policy.load_model(), AdapterSpec(rank=4, alpha=8.0, targets=("c_attn",)))
