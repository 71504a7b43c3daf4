"""A node ends when it is told to, also when a piece of its work never does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

NODE = """
import asyncio, sys, time
import node.signals
from node.compute import Lane, ThreadCompute
node.signals.HUNG_S, node.signals.HUNG_POLL_S = 0.3, 0.05

async def main():
    compute = ThreadCompute()
    for _ in range(int(sys.argv[2])):
        await compute.run(Lane.TRAIN, time.sleep, 0.3)
    with node.signals.EndSignals(compute) as signals:
        stopped = asyncio.Event()
        signals.then(lambda reason: stopped.set())
        work = asyncio.create_task(compute.run(Lane.TRAIN, time.sleep, float(sys.argv[1])))
        await asyncio.sleep(0.05)
        print("works", flush=True)
        await stopped.wait()
        await work
        compute.close()
    print("ended in order", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work_s", "steps_before", "code", "said"),
    [
        (0.1, 0, 0, "ended in order"),
        (60.0, 0, 130, ""),  # hangs: left behind
        (0.55, 1, 0, "ended in order"),  # longer than HUNG_S, but not than twice the longest before it
    ],
)
def test_work_that_hangs_does_not_keep_a_node_from_ending(
    work_s: float, steps_before: int, code: int, said: str
) -> None:
    command = [sys.executable, "-c", NODE, str(work_s), str(steps_before)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == code
        assert process.stdout.read().strip() == said
