"""The demo in one process: the same nodes on the in-memory transport, a virtual clock and one torch thread.

Work is done inline and costs a fixed virtual time per lane, so two runs with the same seed give the same
events, measured seconds aside. Not a benchmark: virtual time says nothing about speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch

from node.clock import VirtualClock, run_virtual
from node.compute import InlineCompute, Lane
from node.environment.host import TaskHost
from node.events import Event, EventBus, NoticeLevel
from node.membership import Membership
from node.node import Node, open_node
from node.open.charter import installed_pins, read_or_found_charter
from node.open.parts import open_parts
from node.open.policy import open_host, require_fit
from node.open.stores import memory_stores
from node.runtime import Runtime
from node.supervise import sole_cause
from node.telemetry import JsonlSink
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork
from protocol.messages import Charter
from protocol.records import record_validator
from swarm_cli.demo.plan import DemoPlan, PlannedNode

__all__ = ["simulate"]

COSTS_S = {
    Lane.GENERATE: 0.15,
    Lane.TRAIN: 0.2,
    Lane.SCORE: 0.005,
    Lane.VERIFY: 0.01,
    Lane.EVALUATE: 1.0,
}
STOP_AFTER_S = 3.0
"""Virtual seconds in which the last node's announcements still reach the others."""


def simulate(plan: DemoPlan, show: Callable[[str, Event], None]) -> None:
    """Run all nodes of `plan` to their end; events go to each node's metrics.jsonl and to `show`. A signal
    that would end the process cancels them in order, and then raises KeyboardInterrupt."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.options.seed)
    try:
        run_virtual(_simulate(plan, show))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        raise sole_cause(group) from None


async def _simulate(plan: DemoPlan, show: Callable[[str, Event], None]) -> None:
    loop, simulation = asyncio.get_running_loop(), asyncio.current_task()
    if simulation is not None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, simulation.cancel)
    clock = VirtualClock()
    first = plan.nodes[0]
    charter = read_or_found_charter(first.config, first.identity, clock.now_ms())
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(open_host(first.config, charter))
        require_fit(host)
        swarm = _Swarm(charter, host, MemoryNetwork(plan.options.seed, LINKS["home"], clock), stack, show)
        nodes = [await swarm.add(planned, clock) for planned in (*plan.honest, *plan.followers)]
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(node.run(), name=node.config.name)
            group.create_task(_stop_all(nodes))


async def _stop_all(nodes: list[Node]) -> None:
    for node in nodes:
        if node.config.role == "trainer":
            await node.finished.wait()
    await asyncio.sleep(STOP_AFTER_S)
    for node in nodes:
        node.stop("steps done")


@dataclass(frozen=True)
class _Swarm:
    """What the nodes of a simulation share."""

    charter: Charter
    host: TaskHost
    network: MemoryNetwork
    stack: contextlib.ExitStack
    """Closes what the nodes leave open."""
    show: Callable[[str, Event], None]

    async def add(self, planned: PlannedNode, clock: VirtualClock) -> Node:
        """A node, connected and not running yet."""
        name = planned.config.name
        runtime = Runtime(clock, InlineCompute(COSTS_S), EventBus(), random.Random(planned.config.seed))
        run_dir = planned.home.run(planned.config.run).create()
        sink = self.stack.enter_context(contextlib.closing(JsonlSink(run_dir.metrics)))
        runtime.bus.subscribe(sink)
        runtime.bus.subscribe(lambda event: self.show(name, event))

        def notice(level: NoticeLevel, text: str) -> None:
            if level != NoticeLevel.INFO:  # the memory plan: two runs of one seed need not share it
                runtime.notice(level, text)

        parts = open_parts(planned.config, self.charter, self.host, notice)
        self.stack.callback(parts.engine.close)
        membership = Membership(planned.identity, self.charter, clock, pins=installed_pins(self.charter))
        transport = None
        if parts.config.network.transport != "none":
            validate = record_validator(membership.swarm_id, clock.now_ms)
            transport = self.network.transport(membership.peer_id, validate_record=validate)
            await transport.start()
        stores = memory_stores(clock.now_ms())
        return await open_node(parts, runtime, membership, stores, transport, meter=lambda: (0, 0))
