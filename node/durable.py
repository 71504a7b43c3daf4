"""Writes that the disk does not take: none ends the node, each is told once, and tried until it works.

A full disk, a read-only one, and want of descriptors or rights all come as OSError, and all may pass. There
are two kinds of writes. `durable` is for one that must happen before the node goes on (windows begun,
sequence numbers): whoever needs it waits by name. `LeftOut` is for one that may be left out and comes again
by itself (trust, checkpoints, versions of weights, the annex): the node goes on meanwhile. Not for what is
written (`node/state`), nor for events (`node/telemetry.py` counts lines that are lost).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from node.events import NoticeLevel
from node.runtime import Runtime
from node.supervise import StageGauge

__all__ = ["LeftOut", "durable"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0

T = TypeVar("T")


async def durable(runtime: Runtime, what: str, write: Callable[[], T], gauge: StageGauge | None = None) -> T:
    """The result of `write()`, once it raises no OSError any more; meanwhile a wait of `gauge`. `what` is
    written, in a word or two. It is a small write, and blocks."""
    try:
        return write()
    except OSError as error:
        text = (
            f"cannot write {what}: {error}; this waits until it can: make room, or let this user write there"
        )
        runtime.notice(NoticeLevel.ERROR, text)
    pause_s = FIRST_PAUSE_S
    with gauge.waiting("the disk") if gauge is not None else contextlib.nullcontext():
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(OSError):
                result = write()
                runtime.notice(NoticeLevel.INFO, f"{what}: written now")
                return result


class LeftOut:
    """One kind of write that may be left out: told when it begins to fail, and when it works again."""

    def __init__(self, runtime: Runtime, what: str) -> None:
        """`what` is written, in a word or two."""
        self._runtime = runtime
        self._what = what
        self._failing = False

    def failed(self, text: str) -> None:
        """It was left out just now; `text` says what and why, with the path."""
        if not self._failing:
            self._runtime.notice(
                NoticeLevel.WARNING, f"{text}; make room, or let this user write there; tried again meanwhile"
            )
        self._failing = True

    def worked(self) -> None:
        """It was written just now."""
        if self._failing:
            self._runtime.notice(NoticeLevel.INFO, f"{self._what}: written again")
        self._failing = False
