"""What vLLM loads into each of its processes: the entry point `murmuration` of `vllm.general_plugins`.

For: registering our weight-transfer engine, scoring at other temperatures than 1 (`_vllm_scores.py`),
refusing rows without a word (`../words.py`), and packing the linear weights of such an engine on a CPU so
that they can be patched. vLLM's own packing there frees the originals and hides the copies, so that nothing
can be patched in place; with tied embeddings the packed copy even goes stale. Engines started without our
weight transfer stay untouched. vLLM loads plugins several times in some processes, so all may run twice.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND", "PLUGIN", "WORDS", "register"]

PLUGIN = "murmuration"
"""Name of the entry point; `VLLM_PLUGINS` allows only this one."""
BACKEND = "murmuration"
"""Name of our engine in vLLM's weight-transfer factory."""
WORDS = "murmuration_words"
"""Key in vLLM's `additional_config`: arguments of `refuse_rows`."""


def register() -> None:
    """Called by vLLM before a model is loaded."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from node.rollout.engine._vllm_scores import score_at_temperature

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "node.rollout.engine._vllm_worker", "PatchTransferEngine"
        )
    _keep_cpu_weights_open()
    _refuse_rows_without_a_word()
    score_at_temperature()


def _refuse_rows_without_a_word() -> None:
    """Everything that vLLM makes of logits, sampled or scored, comes after this layer."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from node.rollout.words import refuse_rows

    made, forward = LogitsProcessor.__init__, LogitsProcessor.forward
    if hasattr(forward, "words"):
        return
    words: list[Any] = []

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        config = get_current_vllm_config_or_none()
        words[:] = config.additional_config.get(WORDS, ()) if config else ()

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = forward(self, *args, **kwargs)
        return refuse_rows(logits, *words) if words and logits is not None else logits

    compute.words = words  # type: ignore[attr-defined]
    LogitsProcessor.__init__, LogitsProcessor.forward = make, compute


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
