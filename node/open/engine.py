"""The configured engine with its own copy of the weights: vLLM, the embedded one, or one after the other.

Blocks, for vLLM up to a minute or more. Torch and vLLM are imported by the functions that need them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.events import NoticeLevel
from node.open.machine import device_of
from node.open.policy import adapter_of
from node.rollout.policy import Policy
from protocol.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from node.rollout.engine.base import Engine, EngineError
    from node.rollout.engine.vllm import VllmEngine

__all__ = ["NoticeFunction", "open_engine"]

NoticeFunction = Callable[[NoticeLevel, str], None]
"""Gets a level and a sentence for the operator, on any thread."""


def open_engine(
    config: NodeConfig,
    policy: Policy,
    notice: NoticeFunction | None = None,
    *,
    dtype: str = "float32",
    draws: str = "",
) -> Engine:
    """The configured engine. `notice(level, text)` hears of slow starts and of restarts, on any thread;
    `dtype` is the trainer's, which the embedded engine shares; with other `draws` (a node's, a run's) vLLM
    samples otherwise. Raises ConfigError when vLLM is asked for and not installed, ModelError when it cannot
    use the policy; with `rollout.fallback` the transformers engine takes its place."""
    if config.rollout.engine != "vllm":
        return _open_transformers(config, policy, dtype)
    from node.rollout.engine.base import EngineError

    try:
        engine = _open_vllm(config, policy, notice, draws)
    except (ConfigError, ModelError, EngineError) as error:
        if not config.rollout.fallback:
            raise
        _tell_fallback(notice, "cannot be started", error)
        return _open_transformers(config, policy, dtype)
    if not config.rollout.fallback:
        return engine
    from node.rollout.engine.fallback import FallbackEngine

    def fall_back(error: EngineError) -> Engine:
        _tell_fallback(notice, "is lost", error)
        return _open_transformers(config, policy, dtype)

    return FallbackEngine(engine, lost=lambda: engine.lost, fall_back=fall_back)


def _tell_fallback(notice: NoticeFunction | None, problem: str, error: Exception) -> None:
    if notice is not None:
        notice(NoticeLevel.WARNING, f"vLLM {problem}, the transformers engine takes its place: {error}")


def _open_vllm(config: NodeConfig, policy: Policy, notice: NoticeFunction | None, draws: str) -> VllmEngine:
    policy.require_names_of_files()
    from node.rollout.engine.vllm import VllmEngine

    return VllmEngine(
        policy,
        config.vllm,
        in_flight=config.rollout.in_flight,
        adapter=adapter_of(config),
        sleeps=config.policy.sharing == "sequential",
        seed=_engine_seed(config.seed, draws),
        notice=notice,
    )


def _engine_seed(seed: int, draws: str) -> int:
    """31 bits for vLLM's own random numbers: with equal ones, nodes of equal weights would draw equal
    rollouts, which peers call copies."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{draws}".encode()).digest()[:4], "big") >> 1


def _open_transformers(config: NodeConfig, policy: Policy, dtype: str) -> Engine:
    from node.rollout.engine.transformers import TransformersEngine

    engine = TransformersEngine(
        policy,
        device=device_of(config),
        dtype=dtype,
        in_flight=config.rollout.in_flight,
        adapter=adapter_of(config),
        max_batch_tokens=config.train.micro_batch_tokens,
    )
    engine.require_cache()
    return engine
