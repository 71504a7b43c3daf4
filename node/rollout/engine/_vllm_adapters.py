"""Versions of a low-rank adapter as folders, which is how vLLM takes them.

For: `vllm.py` with a policy that is an adapter on weights which never change. Every version gets a number and
a folder of its own, so rollouts under way finish with the adapter they began with; a folder goes when no
request needs it. Not for: what an adapter is (`node.rollout.adapter`).
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from node.rollout.adapter import AdapterSpec, write_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Adapter", "AdapterFolders", "lora_arguments"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as the largest rank."""
MAX_ADAPTERS = 4
"""Versions that can be computed with in one pass; a fifth waits for the oldest to be done."""


@dataclass(frozen=True)
class Adapter:
    """One version on disk."""

    number: int
    policy_version: int
    folder: Path

    def request(self) -> LoRARequest:
        """What vLLM is told with every request that is answered by it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter {self.number}", self.number, str(self.folder))

    def remove(self) -> None:
        """Delete its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class AdapterFolders:
    """Writes versions under `root`; removes all that is left when closed."""

    def __init__(self, spec: AdapterSpec, base: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`base` is the policy's folder, `shapes` those of its tensors."""
        self._spec = spec
        self._base = base
        self._shapes = _expected(spec, shapes)
        self.root = Path(tempfile.mkdtemp(prefix="murmuration-adapters-"))
        self._numbers = itertools.count(1)
        self.newest: Adapter | None = None
        """What a new process is to be given."""

    def write(self, state: Mapping[str, Tensor], policy_version: int) -> Adapter:
        """A new folder with `state`. Raises ValueError when names or shapes are not those of such
        an adapter (vLLM ignores what it does not know), OSError."""
        for name in sorted(set(state) ^ set(self._shapes)):
            raise ValueError(f"{name} is {'missing' if name in self._shapes else 'no tensor of the adapter'}")
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)}, not {shape}")
        number = next(self._numbers)
        folder = self.root / str(number)
        write_adapter(folder, self._spec, state, self._base)
        return Adapter(number, policy_version, folder)

    def close(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def _expected(spec: AdapterSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter's tensors."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module != name and module.rsplit(".", 1)[-1] in spec.targets:
            rows, columns = shape
            expected[f"base_model.model.{module}.lora_A.weight"] = (spec.rank, columns)
            expected[f"base_model.model.{module}.lora_B.weight"] = (rows, spec.rank)
    return expected


def lora_arguments(spec: AdapterSpec) -> dict[str, Any]:
    """For vLLM's AsyncEngineArgs."""
    return {
        "enable_lora": True,
        # Only these: its wrapper of the output layer breaks, on a CPU, when a prompt is scored in a batch.
        "lora_target_modules": list(spec.targets),
        "max_lora_rank": next((rank for rank in RANKS if rank >= spec.rank), spec.rank),
        "max_loras": MAX_ADAPTERS,
        "max_cpu_loras": 2 * MAX_ADAPTERS,
    }
