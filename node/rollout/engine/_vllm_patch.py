"""Differences between two states of the weights, as the records that go into the engine's process.

For: `vllm.py`, which computes them against what it sent last, and `_vllm_worker.py`, which scatters them. A
record names a tensor of the checkpoint and gives either a run of its flattened elements or single positions
with new values, as raw bytes at the engine's type: what vLLM's serializer carries without pickle. Compared
are bits, so a NaN or a negative zero travels like any other value. Not for the network: peers get the deltas
of `node.share`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["CHUNK_BYTES", "Mirror", "TensorPatch", "WeightsDoNotFit", "batches", "send"]

CHUNK_BYTES = 32 * 2**20
"""Payload of one call into the engine; bounds the copies that vLLM's queues make of it."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDoNotFit(ValueError):
    """Names or shapes of new weights are not those of the checkpoint."""


@dataclass(frozen=True)
class TensorPatch:
    """front -> worker. New values for one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First flat position of a run; 0 where `indices` say the positions."""
    indices: bytes
    """Flat positions, ascending, little-endian; empty for a run."""
    index_bytes: int
    """Width of one position: 4, or 8 in tensors of 2**31 elements and more."""
    values: bytes

    @property
    def payload_bytes(self) -> int:
        return len(self.indices) + len(self.values)


class Mirror:
    """The weights as the engine has them, at the engine's type. Not known before the first full sending and
    after a failed one, when they are still what a new process is to be given."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes = dict(shapes)
        self._dtype = dtype
        self.weights: dict[str, Tensor] | None = None
        """By name, for an engine that starts anew; None before the first ones."""
        self.known = False
        """The engine has exactly these weights; whoever gave it others, or failed to, sets this to False."""

    def fit(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`state` under the names of the checkpoint, flat, at the engine's type, on the CPU. Extra names must
        repeat a known tensor, as a tied output layer does. Raises WeightsDoNotFit."""
        missing = sorted(set(self._shapes) - set(state))
        if missing:
            raise WeightsDoNotFit(f"{len(missing)} tensors are missing, the first is {missing[0]}")
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                raise WeightsDoNotFit(f"{name} is {tuple(state[name].shape)}, not {shape}")
        for name in sorted(set(state) - set(self._shapes)):
            extra = state[name]
            if not any(
                extra.shape == state[known].shape and torch.equal(extra, state[known])
                for known in self._shapes
            ):
                raise WeightsDoNotFit(f"{name} is no tensor of the checkpoint, nor a copy of one")
        return {
            name: state[name].detach().to("cpu", self._dtype).contiguous().view(-1) for name in self._shapes
        }

    def changes(self, fitted: Mapping[str, Tensor]) -> list[TensorPatch]:
        """What turns these weights into `fitted`: positions where few differ, runs where many do."""
        if self.weights is None or not self.known:
            return self.everything(fitted)
        patches = []
        for name, new in fitted.items():
            bits = _BITS[new.element_size()]
            changed = (new.view(bits) != self.weights[name].view(bits)).nonzero().view(-1)
            index_bytes = 4 if new.numel() < 2**31 else 8
            if changed.numel() * (index_bytes + new.element_size()) >= new.nbytes:
                patches += list(self._runs(name, new))
            elif changed.numel():
                patches += list(self._positions(name, new, changed, index_bytes))
        return patches

    def everything(self, fitted: Mapping[str, Tensor]) -> list[TensorPatch]:
        """All of `fitted`, as runs."""
        return [patch for name, new in fitted.items() for patch in self._runs(name, new)]

    def commit(self, fitted: Mapping[str, Tensor], patches: Iterable[TensorPatch]) -> None:
        """The engine now has `fitted`, which differs from the weights so far in `patches`."""
        self.known = True
        if self.weights is None:
            self.weights = {name: tensor.clone() for name, tensor in fitted.items()}
            return
        for name in {patch.name for patch in patches}:
            self.weights[name].copy_(fitted[name])

    def _runs(self, name: str, new: Tensor) -> Iterator[TensorPatch]:
        step = max(1, CHUNK_BYTES // new.element_size())
        for start in range(0, new.numel(), step):
            yield TensorPatch(name, self._shapes[name], start, b"", 0, _raw(new[start : start + step]))

    def _positions(self, name: str, new: Tensor, changed: Tensor, index_bytes: int) -> Iterator[TensorPatch]:
        kind = "<i4" if index_bytes == 4 else "<i8"
        for part in changed.split(max(1, CHUNK_BYTES // (index_bytes + new.element_size()))):
            yield TensorPatch(
                name, self._shapes[name], 0, part.numpy().astype(kind).tobytes(), index_bytes, _raw(new[part])
            )


def batches(patches: Iterable[TensorPatch]) -> Iterator[list[TensorPatch]]:
    """Patches in groups of about CHUNK_BYTES."""
    batch: list[TensorPatch] = []
    size = 0
    for patch in patches:
        if batch and size + patch.payload_bytes > CHUNK_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(patch)
        size += patch.payload_bytes
    if batch:
        yield batch


async def send(
    engine: AsyncLLM, patches: Iterable[TensorPatch], *, base: int, update: int, dtype: str
) -> None:
    """Into an engine whose last update had the number `base` (0: its weights do not matter), as number
    `update`. Raises whatever vLLM raises; then nobody knows what is there."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await engine.start_weight_update()
    for batch in batches(patches):
        info = {"base": base, "update": update, "dtype": dtype, "tensors": [vars(patch) for patch in batch]}
        await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
    await engine.finish_weight_update()


def _raw(values: Tensor) -> bytes:
    return np.ascontiguousarray(values.view(_BITS[values.element_size()]).numpy()).tobytes()
