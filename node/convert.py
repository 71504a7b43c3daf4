"""A GGUF file as a Hugging Face folder: weights de-quantised to bfloat16, tokenizer, template, configs.

The same input gives the same bytes on every machine: what names the converting software is left out of the
configs, since digests of this folder identify a model in the swarm. transformers shows bars of its own and
holds the weights in memory, so `node.models` runs this in a process of its own. Not for quantised inference,
and not for architectures that transformers cannot read from GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import ModelError

__all__ = ["convert_gguf"]

_OF_THE_MACHINE = (
    "_from_model_config",
    "_model_name_or_path",
    "_name_or_path",
    "is_local",
    "local_files_only",
    "transformers_version",
)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into `folder`. Needs gguf and accelerate. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
        # Or else it would be saved as a quantised one.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, ImportError) as error:
        raise ModelError(f"{gguf.name} cannot be converted: {' '.join(str(error).split())}") from error
    for file in folder.glob("*config.json"):
        settings = json.loads(file.read_bytes())
        for key in _OF_THE_MACHINE:
            settings.pop(key, None)
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
