"""The weights that every member of a lineage has on disk before anything travels: what anchors start from.

Full tuning: the policy's own weights, in bfloat16. An adapter: zeros of its shapes, since how it begins is
the owner's draw. Names and shapes are those of `Trainer.state_dict` and `Engine.update`, tied weights under
each of their names. Not for weights that were trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from node.rollout.adapter import AdapterSpec, adapter_state, wrap
from node.rollout.policy import Policy
from node.weights.chain.bf16 import U16, to_bits

__all__ = ["base_bits", "travelling"]


def base_bits(policy: Policy, adapter: AdapterSpec | None) -> dict[str, U16]:
    """By name. Loads the policy once more and lets it go. Blocking, seconds for a large one. Raises
    ModelError."""
    model = policy.load_model("cpu", "bfloat16")
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
