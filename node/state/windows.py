"""Which windows this node has begun to answer: no slot is answered twice, whatever its clock says meanwhile.

Ranges of windows, at most MAX_RANGES, on the disk before the first slot of a window is used. A clock that was
wrong leaves a range far ahead; time before it stays free, and when its windows come they are not answered
again. Where there would be too many ranges, the two with the least between them become one. Not for what a
window is (`protocol/prompts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from node.state.stores import read_file, write_atomically

__all__ = ["MemoryWindows", "WindowStore"]

MAX_RANGES = 16
MAX_BYTES = 1024
FIRST_FORMAT = 64
"""Windows before the one in a file of the first format, which held only the newest: maybe begun, too."""

Range = tuple[int, int]
"""First and last window."""


class MemoryWindows:
    """The windows begun, for simulations."""

    def __init__(self, ranges: Sequence[Range] = ()) -> None:
        self._ranges = list(ranges)
        """Ascending, with something between each two."""

    def newest(self) -> int:
        """The last one that was begun, by time; -1 before the first."""
        return self._ranges[-1][1] if self._ranges else -1

    def was_begun(self, window: int) -> bool:
        """Whether slots of this window may have been answered."""
        return any(first <= window <= last for first, last in self._ranges)

    def begin(self, window: int) -> None:
        """From now on this window is begun."""
        self._ranges = _with(self._ranges, window)


class WindowStore(MemoryWindows):
    """On disk, in `path`: `5-7 457-460`."""

    def __init__(self, path: Path) -> None:
        super().__init__(_parsed(read_file(path, MAX_BYTES)))
        self._path = path

    def begin(self, window: int) -> None:
        """As in memory, and on the disk on return. Raises OSError when the disk refuses; the window is then
        not begun."""
        ranges = _with(self._ranges, window)
        text = " ".join(f"{first}-{last}" for first, last in ranges)
        write_atomically(self._path, f"{text}\n".encode("ascii"))
        self._ranges = ranges


def _with(ranges: Sequence[Range], window: int) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted([*ranges, (window, window)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    while len(merged) > MAX_RANGES:
        gaps = [merged[place + 1][0] - merged[place][1] for place in range(len(merged) - 1)]
        place = gaps.index(min(gaps))
        merged[place : place + 2] = [(merged[place][0], merged[place + 1][1])]
    return merged


def _parsed(data: bytes) -> list[Range]:
    """What the file says; nothing where it is damaged (at worst, peers see one equivocation)."""
    words = data.decode("ascii", "replace").split()
    if len(words) == 1 and words[0].isdigit():
        newest = int(words[0])
        return [(max(0, newest - FIRST_FORMAT), newest)]
    ranges: list[Range] = []
    for word in words[:MAX_RANGES]:
        first, _, last = word.partition("-")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            return []
        ranges.append((int(first), int(last)))
    return ranges if ranges == sorted(ranges) else []
