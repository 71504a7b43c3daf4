"""Weights as they travel: the bfloat16 view of a state dict, as numpy bits.

    {name: tensor of any float type} --to_bits--> {name: uint16 array} --to_tensors--> {name: bfloat16 tensor}

`to_bits` rounds to nearest, ties to even; tied tensors stay one array under several names, so that they are
coded and hashed once. `to_tensors` makes views. An engine that computes in bfloat16 and the chain need the
same values: `rounded` makes them once for both. Not for coding (`protocol/delta.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.errors import LocalProtocolError

__all__ = ["U16", "all_finite", "rounded", "ties_of", "to_bits", "to_tensors"]

U16 = NDArray[np.uint16]

_EXPONENT = np.uint16(0x7F80)
_PIECE = 1 << 20


def to_bits(state: Mapping[str, Tensor], *, copy: bool = True) -> dict[str, U16]:
    """The weights in bfloat16, without `copy` in the same memory where they are so already, on the CPU.
    Raises LocalProtocolError for a tensor that is not floating point."""
    copies: dict[tuple[object, ...], U16] = {}
    bits: dict[str, U16] = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise LocalProtocolError(f"{name} is {tensor.dtype}; only floating-point weights travel")
        where = (
            tensor.device,
            tensor.data_ptr() if tensor.numel() else name,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if where not in copies:
            rounded = tensor.detach().to("cpu", torch.bfloat16, copy=copy).contiguous()
            copies[where] = rounded.view(torch.int16).numpy().view(np.uint16)
        bits[name] = copies[where]
    return bits


def rounded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in bfloat16, on the device that they are on; tensors of whole numbers as they are."""
    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def to_tensors(bits: Mapping[str, U16]) -> dict[str, Tensor]:
    """The same memory as bfloat16 tensors."""
    return {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in bits.items()}


def ties_of(bits: Mapping[str, U16]) -> dict[str, str]:
    """For each name whose memory an earlier one in order has, that name."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    ties = {}
    for name in sorted(bits):
        source = first.setdefault((bits[name].ctypes.data, bits[name].shape), name)
        if source != name and bits[name].size:
            ties[name] = source
    return ties


def all_finite(bits: Mapping[str, U16]) -> bool:
    """Whether no weight is an infinity or NaN."""
    for array in {id(array): array for array in bits.values()}.values():
        flat = array.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            if ((flat[start : start + _PIECE] & _EXPONENT) == _EXPONENT).any():
                return False
    return True
