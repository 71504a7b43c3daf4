"""How values become text on the screen: one palette, one way to write each kind of number.

Everything here returns plain `str` or `rich.text.Text`; markup is never parsed. Peer text arrives inert
(`node.events.inert`) and is only flattened and cut here.
"""

from __future__ import annotations

import math

from rich.cells import cell_len
from rich.text import Text

__all__ = [
    "ACCENT",
    "BAD",
    "DIM",
    "GOOD",
    "INFO",
    "WARN",
    "cut",
    "cut_head",
    "decimal",
    "duration",
    "labelled",
    "quantity",
    "short_id",
    "signed",
    "since",
]

ACCENT = "#6cb6a9"
INFO = "#82a7d8"
GOOD = "#8fbc7a"
WARN = "#d9a962"
BAD = "#dd7878"
DIM = "#77828f"

NOTHING = "–"


def cut(text: str, cells: int) -> str:
    """`text` on one line and at most `cells` wide, with an ellipsis where something is missing."""
    line = text[: cells * 4].replace("\n", "⏎").replace("\t", " ")
    if cell_len(line) <= cells and len(text) <= cells * 4:
        return line
    if cells <= 1:
        return "…"[:cells]
    kept = Text(line, no_wrap=True)
    kept.truncate(cells - 1)
    return kept.plain.rstrip() + "…"


def cut_head(text: str, cells: int) -> str:
    """The end of `text` on one line: questions of one environment begin alike."""
    line = text.replace("\n", "⏎").replace("\t", " ").rstrip()
    if cell_len(line) <= cells:
        return line
    tail = line[-cells:]
    while tail and cell_len(tail) > cells - 1:
        tail = tail[1:]
    return "…" + tail


def short_id(peer_id: str) -> str:
    """The tail of a peer id; the head is the same for all."""
    return f"…{peer_id[-6:]}" if peer_id else NOTHING


def decimal(value: float, digits: int = 2) -> str:
    """A fixed number of digits after the point; a dash for what is no number."""
    return f"{value:.{digits}f}" if math.isfinite(value) else NOTHING


def signed(value: float, digits: int = 2) -> str:
    """Like `decimal`, with the sign."""
    return f"{value:+.{digits}f}" if math.isfinite(value) else NOTHING


def quantity(value: float) -> str:
    """A count in at most five characters: 812, 4.1k, 12.3M."""
    if not math.isfinite(value):
        return NOTHING
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """0.4s, 12s, 2m 05s, 3h 10m, 4d 02h."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"


def since(at: int, start: int) -> str:
    """Time of an event within its run, as h:mm:ss."""
    whole = max(0, at - start) // 1000
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def labelled(label: str, value: str, style: str = "") -> Text:
    """A dim label and its value."""
    return Text.assemble((f"{label} ", DIM), (value, style), no_wrap=True, overflow="ellipsis")
