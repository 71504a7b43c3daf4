"""The weights that every member of a lineage has on disk before anything travels: what anchors start from.

Full tuning: the policy's own weights, in bfloat16. An adapter: zeros of its shapes, since how it begins is
the owner's draw. Names and shapes are those of `Trainer.state_dict` and `Engine.update`, tied weights under
each of their names. They take 2 bytes a parameter, so `BaseWeights` loads them only once somebody needs them.
Not for weights that were trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from node.compute import Lane
from node.rollout.adapter import AdapterSpec, adapter_state, wrap
from node.rollout.policy import Policy
from node.runtime import Runtime
from node.weights.chain.apply import THREADS
from node.weights.chain.bf16 import U16, to_bits
from protocol.delta import warm_up, weights_digest
from protocol.messages import Digest

__all__ = ["Base", "BaseWeights", "base_bits", "travelling"]


@dataclass(frozen=True)
class Base:
    """Weights that anchors start from; nobody may change the arrays."""

    bits: Mapping[str, U16]
    """bfloat16 bits by name."""
    digest: Digest
    """`weights_digest` of them."""


class BaseWeights:
    """Calls `load` (blocking) when the weights are first asked for, and keeps what it returns."""

    def __init__(self, runtime: Runtime, load: Callable[[], Mapping[str, U16]]) -> None:
        self._runtime = runtime
        self._load = load
        self._loading = asyncio.Lock()
        self._base: Base | None = None

    async def get(self) -> Base:
        """The weights and their hash. Raises what `load` raises."""
        async with self._loading:
            if self._base is None:
                self._base = await self._runtime.run(Lane.BROADCAST, self._loaded)
            return self._base

    def _loaded(self) -> Base:
        warm_up()
        bits = self._load()
        return Base(bits, weights_digest(bits, threads=THREADS))


def base_bits(policy: Policy, adapter: AdapterSpec | None) -> dict[str, U16]:
    """By name. Loads the policy once more and lets it go: 4 bytes a parameter meanwhile. Blocking, seconds
    for a large one. Raises ModelError."""
    # Not in bfloat16: loading sets torch's default type for the whole process, and a step may be running.
    model = policy.load_model("cpu", "float32")
    if adapter is None:
        return to_bits({name: tensor for name, tensor in model.state_dict().items() if _is_weight(tensor)})
    with torch.random.fork_rng(devices=[]):  # the adapter's first values are drawn, and not used
        state = adapter_state(wrap(model, adapter))
    return to_bits({name: torch.zeros_like(tensor) for name, tensor in state.items()})


def travelling(state: Mapping[str, Tensor], base: Mapping[str, U16]) -> dict[str, Tensor]:
    """What travels of a trainer's `state`: no buffers of whole numbers, and weights that `base` holds once
    under several names as one tensor again, so that they are coded and sent once."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(array), name) for name, array in base.items()}
    return {name: state[tied.get(name, name)] for name, tensor in state.items() if _is_weight(tensor)}


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
