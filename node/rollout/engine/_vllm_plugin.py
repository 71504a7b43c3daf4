"""What vLLM loads into each of its processes: the entry point `murmuration` of `vllm.general_plugins`.

For: registering our weight-transfer engine, scoring at other temperatures than 1 (`_vllm_scores.py`), and
packing the linear weights of such an engine on a CPU so that they can be patched. vLLM's own packing there
frees the originals and hides the copies, so that nothing can be patched in place; with tied embeddings the
packed copy even goes stale. Engines started without our weight transfer stay untouched. vLLM loads plugins
several times in some processes, so all of it may run twice.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND", "PLUGIN", "register"]

PLUGIN = "murmuration"
"""Name of the entry point; `VLLM_PLUGINS` allows only this one."""
BACKEND = "murmuration"
"""Name of our engine in vLLM's weight-transfer factory."""


def register() -> None:
    """Called by vLLM before a model is loaded."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from node.rollout.engine._vllm_scores import score_at_temperature

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "node.rollout.engine._vllm_worker", "PatchTransferEngine"
        )
    _keep_cpu_weights_open()
    score_at_temperature()


def _keep_cpu_weights_open() -> None:
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    from node.rollout.engine._vllm_linear import PackedLinear

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "keeps_open", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = None if config is None else config.weight_transfer_config
        if transfer is not None and transfer.backend == BACKEND and layer.weight.ndim == 2:
            if PackedLinear.fits(layer.weight):
                layer.cpu_linear = PackedLinear(layer.weight, keep=not remove_weight)
            else:  # slower, and patched like any tensor
                layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    dispatch.keeps_open = True  # type: ignore[attr-defined]
    # Its two callers look it up in this module at every call.
    utils.dispatch_cpu_unquantized_gemm = dispatch
