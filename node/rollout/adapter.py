"""A low-rank adapter (LoRA) on a policy: what it is, how a model gets one, and its files.

For: training and serving a policy whose own weights stay as they are, so that a version is a few megabytes
and the start policy is the same model with the adapter switched off. An adapter's state is what PEFT saves:
tensors `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank], float32; a
linear layer then computes W x + (alpha / rank) B A x. PEFT is imported by what needs it; files are written
without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = [
    "AdapterSpec",
    "adapter_state",
    "adapter_tensors",
    "merged_state",
    "wrap",
    "write_adapter",
]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of attention and MLP, as Llama, Qwen and their relatives name them."""


@dataclass(frozen=True)
class AdapterSpec:
    """Shape of an adapter."""

    rank: int
    alpha: float
    """Its output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = LINEARS
    """Names of the linear layers that get one, without the path before them."""


def wrap(model: PreTrainedModel, spec: AdapterSpec) -> PeftModel:
    """`model` with a new adapter that changes nothing yet (B = 0); only the adapter has gradients. The model
    is changed in place. Raises ConfigError without PEFT, ModelError for a model without these layers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            "policy.tuning is 'lora' and PEFT is not installed; pip install 'murmuration[node]', or set it "
            "to 'full'"
        ) from None
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor
        target_modules=list(spec.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        wrapped: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(
            f"a {model.config.model_type} model has no layers {', '.join(spec.targets)} for an adapter; set "
            "policy.tuning to 'full'"
        ) from error
    return wrapped.eval()


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The adapter of `model` by PEFT's saved names: its own tensors, not copies."""
    from peft import get_peft_model_state_dict

    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """A copy of the adapter of `model` by PEFT's saved names."""
    return {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}


def merged_state(model: PeftModel) -> dict[str, Tensor]:
    """Weights of the policy with the adapter added to them, by checkpoint name, on the CPU and in the type of
    the policy's own. The model stays as it is; tied weights come once."""
    policy = model.get_base_model()
    merged: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        path, adapted, leaf = name.rpartition(".base_layer.")
        if adapted and leaf == "weight":
            layer: Any = policy.get_submodule(path)
            weight = (weight.float() + layer.get_delta_weight("default").detach()).to(weight.dtype)
        merged[f"{path}.{leaf}" if adapted else name] = weight.cpu().contiguous()
    return merged


def write_adapter(folder: Path, spec: AdapterSpec, state: Mapping[str, Tensor], base: Path) -> None:
    """Write `folder` as PEFT and vLLM read it; `base` is the policy that the adapter is for. Raises
    OSError."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": list(spec.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
