"""The machine a node finds: its device, and how much memory of it is free for this process.

For the memory plan (`node/open/memory.py`) and whatever is put on the device. A control group's limit counts
as the machine's: what a container may not use is not free. Torch is imported only where a GPU may be meant.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from node.config import NodeConfig
from protocol.errors import ConfigError

__all__ = ["Machine", "device_of", "machine_of"]

USABLE = 0.9
"""Share of the free memory that is planned with; the rest is for fragments and for what is estimated low."""
CGROUP = Path("/sys/fs/cgroup")
LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Files of either kind of control group: the limit, what is used of it, and what that is."""


@dataclass(frozen=True)
class Machine:
    """The device that trainer and engine share."""

    device: Literal["cpu", "cuda"]
    name: str
    free_bytes: int
    """Memory that nobody else uses."""
    total_bytes: int
    has_bitsandbytes: bool = True
    """8-bit moments can be kept."""
    has_peft: bool = True
    """An adapter can be trained."""

    @property
    def usable_bytes(self) -> int:
        """The part of the free memory that a plan may fill."""
        return int(USABLE * self.free_bytes)


def device_of(config: NodeConfig) -> Literal["cpu", "cuda"]:
    """Where trainer and engine run. Raises ConfigError when CUDA is asked for and not there."""
    if config.policy.device == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if config.policy.device == "cuda" and not available:
        raise ConfigError("policy.device is 'cuda' and torch sees no CUDA device; set it to 'auto' or 'cpu'")
    return "cuda" if available else "cpu"


def machine_of(config: NodeConfig) -> Machine:
    """The device that trainer and engine get, with `policy.memory_gib` in place of what is free there."""
    device = device_of(config)
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
    else:
        memory = psutil.virtual_memory()
        free, total, name = min(memory.available, _container_bytes()), memory.total, "the CPU"
    if config.policy.memory_gib:
        free = int(config.policy.memory_gib * 2**30)
    return Machine(
        device=device,
        name=name,
        free_bytes=free,
        total_bytes=total,
        has_bitsandbytes=find_spec("bitsandbytes") is not None,
        has_peft=find_spec("peft") is not None,
    )


def _container_bytes() -> int:
    """What this process's control group leaves it; the largest of numbers without a limit."""
    for limit, current, parts in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            return max(0, int((CGROUP / limit).read_text()) - _used_bytes(CGROUP / current, CGROUP / parts))
    return sys.maxsize


def _used_bytes(current: Path, parts: Path) -> int:
    """What a control group uses and cannot give back at once, as cached files can be; 0 if it does not
    tell."""
    with contextlib.suppress(OSError, ValueError):
        told = dict(line.split() for line in parts.read_text().splitlines())
        cached = int(told.get("active_file", 0)) + int(told.get("inactive_file", 0))
        return max(0, int(current.read_text()) - cached)
    return 0
