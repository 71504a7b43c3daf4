"""Where output goes: data to stdout, talk to stderr. The only place that writes to either."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console

__all__ = ["err", "out", "write_json"]

out = Console(highlight=False, markup=False)
"""For data that a person reads."""
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
"""For talk: progress, hints, warnings."""


def write_json(value: object) -> None:
    """One JSON document on one line of stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
