"""Weight sets that wait on the disk while others are decoded: memory holds one of them.

    weights --keep--> one file, tied weights once --mapped--> the same weights, read only

Written as a file and mapped after that: a map of a file without room behind it kills the process where a
write raises. Not for anything that outlives a merge.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from node.weights.chain.bf16 import U16, ties_of
from protocol.errors import OurFault

__all__ = ["MergeScratch"]

_FREE_BYTES = 1 << 28
"""Left to others on the disk: their checkpoints come first."""


class MergeScratch:
    """A folder of its own, which it makes and removes. All calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Remove the folder. What is mapped stays readable until it is let go."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def require_room(self, count: int, weights: Mapping[str, U16]) -> None:
        """Raise OurFault when the disk has no room for so many copies of such weights, OSError when it cannot
        be asked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = count * sum(weights[name].nbytes for name in weights.keys() - ties_of(weights).keys())
        free = shutil.disk_usage(self._folder).free
        if free < needed + _FREE_BYTES:
            raise OurFault(
                f"{self._folder} has {free / 1e9:.2f} GB free, {count} contributions need "
                f"{needed / 1e9:.2f} GB; free some disk"
            )

    def keep(self, name: str, weights: Mapping[str, U16]) -> dict[str, U16]:
        """The same weights, mapped from the disk; tied ones stay tied. Raises OSError when it is full."""
        path = self._folder / name
        ties = ties_of(weights)
        untied = [name for name in weights if name not in ties]
        with path.open("wb") as file:
            for name in untied:
                file.write(weights[name].reshape(-1).view(np.uint8).data)
        whole = np.asarray(np.memmap(path, np.uint16, "r")) if path.stat().st_size else np.empty(0, np.uint16)
        mapped, start = {}, 0
        for name in untied:
            array = weights[name]
            mapped[name] = whole[start : start + array.size].reshape(array.shape)
            start += array.size
        return {name: mapped[ties.get(name, name)] for name in weights}
