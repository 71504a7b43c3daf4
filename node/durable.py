"""A write that must happen before the node goes on: tried until the disk takes it, never the end of the node.

A full disk, a read-only one, and want of descriptors or rights all come as OSError, and all may pass. Until
then whoever needs the write waits by name, and the operator is told once, with what to do, and once when it
is over. Not for writes that may be left out (metrics, checkpoints, trust): those are told and tried later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from node.events import NoticeLevel
from node.runtime import Runtime
from node.supervise import StageGauge

__all__ = ["durable"]

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
