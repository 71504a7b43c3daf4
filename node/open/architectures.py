"""Facts of usual models without their weights: from a config.json, or by name.

For planning beforehand: how many parameters a config means is counted here, for the kinds whose tensors are
known. A policy that is here has its parameters counted in its files (`ModelFacts.of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.open.estimate import ModelFacts
from protocol.errors import ModelError

__all__ = ["KNOWN", "count_params", "facts_of"]

_QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "max_position_embeddings": 32_768}
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072}
_SMOL = {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8192}


def _sizes(
    kind: Mapping[str, Any], hidden: int, mlp: int, layers: int, heads: int, kv: int, **more: Any
) -> Mapping[str, Any]:
    return {
        **kind,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": True,
        **more,
    }


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _sizes(_SMOL, 576, 1536, 30, 9, 3),
    "smollm2-360m": _sizes(_SMOL, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _sizes(_SMOL, 2048, 8192, 24, 32, 32),
    "qwen2.5-0.5b": _sizes(_QWEN, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _sizes(_QWEN, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _sizes(_QWEN, 2048, 11_008, 36, 16, 2),
    "qwen2.5-7b": _sizes(_QWEN, 3584, 18_944, 28, 28, 4, vocab_size=152_064, tie_word_embeddings=False),
    "llama-3.2-1b": _sizes(_LLAMA, 2048, 8192, 16, 32, 8, head_dim=64),
    "llama-3.2-3b": _sizes(_LLAMA, 3072, 8192, 28, 24, 8, head_dim=128),
}
"""What the config.json of these models says, as published with them."""
_BIASED = {"qwen2"}
"""Kinds with biases of queries, keys and values."""
_NORMED = {"qwen3"}
"""Kinds with norms of queries and keys."""
_COUNTED = {"llama", "mistral"} | _BIASED | _NORMED


def count_params(config: Mapping[str, Any]) -> int:
    """Parameters of a decoder of the Llama kind. Raises ModelError for another kind."""
    kind = config.get("model_type")
    if kind not in _COUNTED:
        known = ", ".join(sorted(_COUNTED))
        raise ModelError(
            f"the parameters of a {kind!r} model are not counted from its config (known: {known}); give the "
            "folder with its weights"
        )
    facts = ModelFacts.read(config, 0, 0)
    attention = 2 * facts.hidden * (facts.query_width + facts.kv_width)
    attention += (facts.query_width + 2 * facts.kv_width) * (kind in _BIASED)
    attention += 2 * facts.head_dim * (kind in _NORMED)
    layer = attention + 3 * facts.hidden * facts.intermediate + 2 * facts.hidden
    ends = facts.vocab * facts.hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ends + facts.layers * layer + facts.hidden


def facts_of(model: str) -> ModelFacts:
    """Of a known name, a config.json, or a folder with one. Raises ModelError."""
    config = KNOWN.get(model)
    if config is None:
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            names = ", ".join(KNOWN)
            raise ModelError(f"{model!r} is none of {names}, and no config.json ({error})") from None
        if not isinstance(config, dict) or not isinstance(config.get("vocab_size"), int):
            raise ModelError(f"{path} is no config of a model: it has no vocab_size")
    return ModelFacts.read(config, count_params(config), int(config.get("max_position_embeddings") or 2**31))
