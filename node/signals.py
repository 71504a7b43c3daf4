"""How a node is told to end: SIGINT and SIGTERM.

    first signal --> `then`'s callback on the event loop: the node ends in order
    second one, or work that hangs --> the process ends at once

Ending at once is safe at any time: what must outlive a process is on the disk before anybody hears of it, so
the step in flight is all that is lost. The network daemon and the sandbox end when their pipes to us close.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from node.compute import ThreadCompute

__all__ = ["EndSignals"]

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code, as shells give it to what SIGINT ends."""
HUNG_S = 8.0
HUNG_POLL_S = 0.25


class EndSignals:
    """The first SIGINT or SIGTERM ends the node in order, a second one ends the process at once. So does a
    piece of work that was under way at the first one and does not end in HUNG_S, nor in twice the time of the
    longest before it: threads cannot be ended, and a node that is killed loses the step in flight at most.

    Real signal handlers, not the loop's: they also run while the loop's thread waits for the work in flight.
    """

    def __init__(self, compute: ThreadCompute) -> None:
        self.received: signal.Signals | None = None
        self._compute = compute
        self._ended = threading.Event()
        self._stop: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def then(self, stop: Callable[[str], None]) -> None:
        """Call `stop` with the reason at the first signal, also if that came before."""
        self._stop = stop
        self._tell()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(INTERRUPTED)
        self.received = signal.Signals(number)
        threading.Thread(target=self._leave_hung_work, name="swarm-end", daemon=True).start()
        self._loop.call_soon_threadsafe(self._tell)

    def _leave_hung_work(self) -> None:
        began_s = time.monotonic()
        work = self._compute.under_way()
        while not self._ended.wait(HUNG_POLL_S):
            waited_s = time.monotonic() - began_s
            for lane, piece in work.items():
                hung = waited_s > max(HUNG_S, 2 * self._compute.longest_s(lane))
                if hung and self._compute.under_way().get(lane) is piece:
                    log.error("%s did not end in %.0f s; left behind", lane, waited_s)
                    os._exit(INTERRUPTED)

    def _tell(self) -> None:
        if self.received is not None and self._stop is not None:
            self._stop(f"signal {self.received.name}")
