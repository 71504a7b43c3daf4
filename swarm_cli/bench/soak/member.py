"""A node of the soak: `swarm run` with few descriptors and a clock that can be set wrong.

    python -m swarm_cli.bench.soak.member node.json

SIGUSR1 sets its clock an hour ahead, SIGUSR2 right again. Not for what happens to it from outside.
"""

from __future__ import annotations

import resource
import runpy
import signal
import sys
import time
from types import FrameType

from node.clock import SystemClock

__all__ = ["main"]

DESCRIPTORS = 256
WRONG_MS = 3_600_000


def main(config: str) -> None:
    """Run the node of this configuration file in the foreground."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    ahead_ms = 0

    def wrong(number: int, frame: FrameType | None) -> None:
        nonlocal ahead_ms
        ahead_ms = WRONG_MS if number == signal.SIGUSR1 else 0

    def now_ms(self: SystemClock) -> int:
        return time.time_ns() // 1_000_000 + ahead_ms

    signal.signal(signal.SIGUSR1, wrong)
    signal.signal(signal.SIGUSR2, wrong)
    SystemClock.now_ms = now_ms  # type: ignore[method-assign]  # as if the machine's clock were set
    sys.argv = ["swarm", "run", "--config", config]
    runpy.run_module("swarm_cli", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
