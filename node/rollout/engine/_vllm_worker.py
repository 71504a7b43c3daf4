"""Inside vLLM's worker: takes patches in checkpoint coordinates and scatters them into the model's tensors.

For: weight updates without a restart, through vLLM's own weight-transfer API. Where an element of the
checkpoint lives (fused qkv and gate-up projections, tied or padded embeddings, a shard of tensor parallelism)
is learnt once from the model's own loader: each tensor is loaded once for show, with `Tensor.copy_` noting
source and destination in place of copying. A patch then goes straight to its places; no dense mask is built.
Data: plain dicts with raw bytes in (the fields of `_vllm_patch.TensorPatch`), nothing out. A patch names the
update that it builds upon; on any doubt it is refused, and the sender sends everything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from node.rollout.engine._vllm_linear import PackedLinear

__all__ = ["PatchInit", "PatchTransferEngine", "PatchUpdate"]


@dataclass
class PatchInit(WeightTransferInitInfo):
    """Nothing is needed: patches come with the calls."""


@dataclass
class PatchUpdate(WeightTransferUpdateInfo):
    """One call's worth of patches."""

    base: int
    """Update that the patches build upon; 0 means the whole of the weights comes."""
    update: int
    """Number of this update, from 1."""
    dtype: str
    tensors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Region:
    """A part of a checkpoint tensor and where it lives."""

    target: Tensor
    offset: int
    """Flat position of the part's first element."""
    strides: tuple[int, ...]
    whole: bool
    """The part is all of the tensor and lies contiguously: flat positions are the same on both sides."""
    packed: tuple[PackedLinear, ...]
    """Layers that compute with a packed copy of the weight that `target` is a view of."""

    def write(self, start: int, positions: Tensor | None, values: Tensor) -> None:
        """New values at flat positions of the checkpoint tensor, or as a run from `start`; those outside of
        the part are left out."""
        plain = all(layer.keeps for layer in self.packed)
        if self.whole and positions is None:
            if plain:
                self.target.view(-1)[start : start + values.numel()].copy_(values)
            for layer in self.packed:
                layer.write_run(start + int(self.target.storage_offset()), values)
            return
        if positions is None:
            positions = torch.arange(start, start + values.numel(), device=values.device)
        if self.whole:
            places = positions + int(self.target.storage_offset())
        else:
            places, values = self._inside(positions, values)
        if plain:
            count = self.target.untyped_storage().nbytes() // self.target.element_size()
            memory = self.target.as_strided((count,), (1,), 0)
            memory.index_copy_(0, places, values.to(memory.dtype))
        for layer in self.packed:
            layer.write(places, values)

    def _inside(self, positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the given positions that lie in the part, as places in the target's storage."""
        rest = positions - self.offset
        inside = rest >= 0
        places = torch.full_like(positions, int(self.target.storage_offset()))
        for size, stride, step in zip(self.target.shape, self.strides, self.target.stride(), strict=True):
            coordinate = torch.div(rest, stride, rounding_mode="floor")
            inside &= coordinate < size
            places += coordinate * step
            rest = rest - coordinate * stride
        return places[inside], values[inside]


class PatchTransferEngine(WeightTransferEngine[PatchInit, PatchUpdate]):
    """Registered as `murmuration`."""

    init_info_cls = PatchInit
    update_info_cls = PatchUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._regions: dict[str, list[_Region]] = {}
        self._applied: int | None = 0
        """Number of the last complete update; None while one is under way and after a failed one."""
        self._coming: int | None = None

    def init_transfer_engine(self, init_info: PatchInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._coming = None

    def finish_weight_update(self) -> None:
        if self._coming is not None:
            self._applied, self._coming = self._coming, None

    def shutdown(self) -> None:
        self._regions.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: PatchUpdate) -> None:
        if self._coming is None:
            if update_info.base not in (0, self._applied):
                raise ValueError(
                    f"update {update_info.update} builds upon {update_info.base}, and {self._applied} is here"
                )
            self._coming, self._applied = update_info.update, None
        elif update_info.update != self._coming:
            raise ValueError(f"update {update_info.update} came while {self._coming} was under way")
        dtype = getattr(torch, update_info.dtype)
        for record in update_info.tensors:
            self._apply(record, dtype)

    def _apply(self, record: dict[str, Any], dtype: torch.dtype) -> None:
        name, shape, start = record["name"], tuple(record["shape"]), record["start"]
        numel = math.prod(shape)
        values = torch.frombuffer(bytearray(record["values"]), dtype=dtype).to(self.device)
        positions: Tensor | None = None
        if record["index_bytes"]:
            kind = torch.int32 if record["index_bytes"] == 4 else torch.int64
            positions = torch.frombuffer(bytearray(record["indices"]), dtype=kind).to(
                self.device, torch.int64
            )
            if positions.numel() != values.numel() or int(positions[0]) < 0 or int(positions.max()) >= numel:
                raise ValueError(f"{name}: positions do not fit {values.numel()} values of shape {shape}")
        elif start < 0 or start + values.numel() > numel:
            raise ValueError(f"{name}: a run of {values.numel()} values from {start} exceeds shape {shape}")
        if name not in self._regions:
            self._regions[name] = self._learn(name, shape, dtype)
        for region in self._regions[name]:
            region.write(start, positions, values)

    def _learn(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[_Region]:
        # Never touched, so a large one takes no memory.
        probe = torch.empty(shape, dtype=dtype)
        with _noted_copies() as copies:
            self.model.load_weights([(name, probe)])
        if not copies:
            raise ValueError(f"the model has no place for {name} of shape {shape}")
        regions = []
        for target, source in copies:
            if source.untyped_storage().data_ptr() != probe.untyped_storage().data_ptr():
                raise ValueError(f"the model's loader computes with {name}; its elements have no fixed place")
            if target.shape != source.shape or list(source.stride()) != sorted(source.stride(), reverse=True):
                raise ValueError(f"{name} is loaded as {tuple(source.shape)} into {tuple(target.shape)}")
            whole = source.numel() == probe.numel() and source.is_contiguous() and target.is_contiguous()
            packed = self._packed_copies.get(target.untyped_storage().data_ptr(), ())
            regions.append(
                _Region(target.detach(), int(source.storage_offset()), source.stride(), whole, packed)
            )
        return regions

    @functools.cached_property
    def _packed_copies(self) -> dict[int, tuple[PackedLinear, ...]]:
        """Layers that compute with a packed weight, by the address of the weight."""
        found: dict[int, tuple[PackedLinear, ...]] = {}
        for module in self.model.modules():
            layer = getattr(module, "cpu_linear", None)
            if isinstance(layer, PackedLinear):
                address = module.weight.untyped_storage().data_ptr()
                found[address] = (*found.get(address, ()), layer)
        return found


@contextmanager
def _noted_copies() -> Iterator[list[tuple[Tensor, Tensor]]]:
    copies: list[tuple[Tensor, Tensor]] = []
    original = torch.Tensor.copy_

    def note(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append((target, source))
        return target

    torch.Tensor.copy_ = note  # type: ignore[assignment,method-assign]
    try:
        yield copies
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]
