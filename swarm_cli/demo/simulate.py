"""The demo in one process: the same nodes on the in-memory transport, a virtual clock and one torch thread.

Work is done inline and costs a fixed virtual time per lane, so two runs with the same seed give the same
events, measured seconds aside. Not a benchmark: virtual time says nothing about speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

import torch

from node.build import (
    load_charter,
    load_role,
    open_environments,
    open_node,
    open_sandbox,
    require_strength,
)
from node.clock import VirtualClock, run_virtual
from node.compute import InlineCompute, Lane
from node.core import NodeCore
from node.events import Event, EventBus, Notice, NoticeLevel
from node.node import Node
from node.sandbox.scorer import Scorer
from node.state.stores import MemorySequence, MemoryWindows
from node.supervise import sole_cause
from node.telemetry import JsonlSink
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork
from protocol.charter import swarm_id
from protocol.messages import Charter
from protocol.records import record_validator
from protocol.replay import ReplayCache
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
    network = MemoryNetwork(plan.options.seed, LINKS["home"], clock)
    charter = load_charter(plan.nodes[0].config, plan.nodes[0].identity, clock.now_ms())
    sandbox = open_sandbox(plan.nodes[0].config, charter)
    with contextlib.ExitStack() as stack:
        stack.callback(sandbox.close)
        sandbox.start()
        require_strength(sandbox, open_environments(charter))
        nodes = [
            await _build(planned, charter, sandbox, network, clock, show, stack)
            for planned in (*plan.honest, *plan.followers)
        ]
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(node.run(), name=node.config.name)
            group.create_task(_stop_all(nodes))


async def _stop_all(nodes: list[NodeCore]) -> None:
    for node in nodes:
        if isinstance(node, Node):
            await node.finished.wait()
    await asyncio.sleep(STOP_AFTER_S)
    for node in nodes:
        node.stop("steps done")


async def _build(
    planned: PlannedNode,
    charter: Charter,
    sandbox: Scorer,
    network: MemoryNetwork,
    clock: VirtualClock,
    show: Callable[[str, Event], None],
    stack: contextlib.ExitStack,
) -> NodeCore:
    """A node; what must be closed goes on `stack`."""
    run_dir = planned.home.run(planned.config.run).create()
    bus = EventBus()
    sink = JsonlSink(run_dir.metrics)
    stack.callback(sink.close)
    bus.subscribe(sink)
    bus.subscribe(lambda event: show(planned.config.name, event))

    def notice(level: NoticeLevel, text: str) -> None:
        if (
            level == NoticeLevel.INFO
        ):  # such as the memory plan, which two runs of the same seed need not share
            return
        bus.emit(Notice(at=clock.now_ms(), level=level, text=text))

    config, loaded = load_role(planned.config, charter, notice)
    stack.callback(loaded.engine.close)
    transport = None
    if config.network.transport != "none":
        transport = network.transport(
            planned.identity.peer_id, validate_record=record_validator(swarm_id(charter), clock.now_ms)
        )
        await transport.start()
    rest = {
        "identity": planned.identity,
        "charter": charter,
        "sandbox": sandbox,
        "transport": transport,
        "sequence": MemorySequence(clock.now_ms()),
        "replay": ReplayCache(),
        "windows": MemoryWindows(),
        "standings": (),
        "clock": clock,
        "compute": InlineCompute(COSTS_S),
        "bus": bus,
        "rss_bytes": lambda: 0,
    }
    return open_node(config, loaded, rest)
