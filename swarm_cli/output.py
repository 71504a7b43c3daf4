"""Where output goes: data to stdout, talk to stderr. The only place that writes to either."""

from __future__ import annotations

import os
import sys

from rich.console import Console

__all__ = ["err", "out", "write_json"]

PIPED_COLUMNS = 100
"""Width of tables where stdout is no terminal and COLUMNS says nothing."""

_KNOWN_WIDTH = sys.stdout.isatty() or "COLUMNS" in os.environ

out = Console(highlight=False, markup=False, width=None if _KNOWN_WIDTH else PIPED_COLUMNS)
"""For data that a person reads."""
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
"""For talk: progress, hints, warnings."""


def write_json(value: object, *, indent: int = 0) -> None:
    """One JSON document on stdout, on one line unless indented."""
    import msgspec

    data = msgspec.json.encode(value)
    text = (msgspec.json.format(data, indent=indent) if indent else data).decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
