"""A copy of all that a step changes, to go back to it: weights, moments, and what counts the steps.

In RAM, into the same memory every time. Memory: the weights that learn and their moments, three times four
bytes a weight with AdamW: 1.6 GB for 135 million weights (0.25 s to keep), 60 MB for an adapter of 5 million.
The random state is not in it, since a step draws nothing, nor is the version: no number may mean two
policies, so old weights come back as a new version. Not for disks (`checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from node.train.slow_fast import SlowFastState
from node.train.step import Trainer
from protocol.errors import LocalProtocolError

__all__ = ["GoodState"]


class GoodState:
    """Empty at first. Between steps, on the thread that trains."""

    def __init__(self) -> None:
        self.policy_version: int | None = None
        """Of the weights in it."""
        self._updates = 0
        self._steps = 0
        self._slow_fast = SlowFastState()
        self._weights: dict[str, Tensor] = {}
        self._moments: list[dict[str, Any]] = []
        """Of each parameter of the optimiser: its entries by name, copies of those that are tensors."""

    @property
    def nbytes(self) -> int:
        moments = (entry for entries in self._moments for entry in entries.values())
        tensors = (*self._weights.values(), *(entry for entry in moments if isinstance(entry, Tensor)))
        return sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def keep(self, trainer: Trainer) -> None:
        """Hold what `trainer` is now, in place of what was held."""
        self._weights = {
            name: _kept(self._weights.get(name), tensor) for name, tensor in trainer.learning().items()
        }
        parameters = list(_parameters(trainer))
        held = self._moments or [{} for _ in parameters]
        self._moments = [
            {
                field: _kept(entries.get(field), value) if isinstance(value, Tensor) else value
                for field, value in trainer.optimiser.state.get(parameter, {}).items()
            }
            for parameter, entries in zip(parameters, held, strict=True)
        ]
        self._updates, self._steps = trainer.updates, trainer.steps
        if trainer.slow_fast is not None:
            self._slow_fast = trainer.slow_fast.state
        self.policy_version = trainer.policy_version

    @torch.no_grad()
    def restore(self, trainer: Trainer, policy_version: int) -> None:
        """Give `trainer` back what is held, as this version. The skipped steps that it has counted stay
        counted. Raises LocalProtocolError when nothing is held, or for a version that is not new."""
        if self.policy_version is None or policy_version <= trainer.policy_version:
            raise LocalProtocolError(
                f"version {self.policy_version} cannot come back as {policy_version} after "
                f"{trainer.policy_version}"
            )
        trainer.take(self._weights, policy_version)
        for parameter, entries in zip(_parameters(trainer), self._moments, strict=True):
            if entries:
                _give(trainer.optimiser.state[parameter], entries, parameter.device)
            else:
                trainer.optimiser.state.pop(parameter, None)
        trainer.updates, trainer.steps = self._updates, self._steps
        if trainer.slow_fast is not None:
            trainer.slow_fast.state = self._slow_fast


def _parameters(trainer: Trainer) -> Iterator[Tensor]:
    return (parameter for group in trainer.optimiser.param_groups for parameter in group["params"])


def _kept(buffer: Tensor | None, value: Tensor) -> Tensor:
    if not isinstance(buffer, Tensor) or buffer.shape != value.shape or buffer.dtype != value.dtype:
        buffer = torch.empty_like(value, device="cpu", requires_grad=False)
    return buffer.copy_(value)


def _give(state: dict[str, Any], entries: dict[str, Any], device: torch.device) -> None:
    for field, value in entries.items():
        there = state.get(field)
        if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
            there.copy_(value)
        else:
            state[field] = value.to(device, copy=True) if isinstance(value, Tensor) else value
    for field in set(state) - set(entries):
        del state[field]
