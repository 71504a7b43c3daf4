"""What every vLLM engine of ours is started with, for rollouts and for `swarm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node.config import VllmConfig
from node.rollout.engine._vllm_plugin import WORDS
from node.rollout.policy import Policy

__all__ = ["GPU_MEMORY_SHARE", "shared_arguments"]

CPU_BLOCK = 32
"""Tokens in a block of a CPU's cache. vLLM's default, 128, never caches the short prompt of a group."""
GPU_MEMORY_SHARE = 0.4
"""Where nobody planned."""


def shared_arguments(settings: VllmConfig, policy: Policy, folder: Path, *, on_cpu: bool) -> dict[str, Any]:
    """For vLLM's AsyncEngineArgs: the model in `folder`, which has the words of `policy`, and its memory;
    nothing that opens a door."""
    memory: dict[str, Any] = (
        {
            "enforce_eager": True,
            "kv_cache_memory_bytes": settings.kv_cache_mib * 2**20,
            "block_size": CPU_BLOCK,
        }
        if on_cpu
        else {"gpu_memory_utilization": settings.gpu_memory_share or GPU_MEMORY_SHARE}
    )
    return memory | {
        "model": str(folder),
        "additional_config": {WORDS: [policy.vocab_size, list(policy.holes)]},
        "generation_config": "vllm",  # not the folder's sampling defaults
        "trust_remote_code": False,
        "enable_prompt_embeds": False,
        "load_format": "safetensors",
        "use_tqdm_on_load": False,
        "dtype": settings.dtype,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
