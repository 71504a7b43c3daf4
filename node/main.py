"""From the command line to a running node: builds the real parts, runs the loop, ends cleanly.

Signals stop the node within seconds; the event stream goes to `metrics.jsonl`, to the local socket and to
whatever sink the caller gives. Not imported by anything but the command line: it pulls torch in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import torch

from node.build import (
    load_charter,
    open_decoders,
    open_engine,
    open_environments,
    open_policy,
    open_sandbox,
    train_settings,
)
from node.clock import Clock, SystemClock
from node.compute import ThreadCompute
from node.config import NodeConfig
from node.events import Event, EventBus, Notice
from node.keys import create_key, load_or_create_key
from node.node import Node, NodeParts
from node.paths import Home, RunDir
from node.sandbox.scorer import Scorer
from node.share.presence import ask_clock, fetch_charter
from node.state import ReplayStore, SequenceStore, WindowStore, write_atomically
from node.telemetry import JsonlSink, SocketSink
from node.train.step import Trainer
from node.transport import open_transport
from node.transport.base import Transport
from protocol.charter import charter_bytes, swarm_id
from protocol.identity import Identity
from protocol.messages import Charter
from protocol.records import record_validator
from protocol.replay import ReplayCache

__all__ = ["fetch_charter_from", "measure_skew_s", "open_alone", "run_node"]

LOG_BYTES = 10 * 2**20


def run_node(config: NodeConfig, show: Callable[[Event], None]) -> None:
    """Run a node until its steps are done or a signal comes; `show` gets every event. Raises SwarmError."""
    home = Home(config.home).create()
    run_dir = home.run(config.run).create()
    _log_to(run_dir)
    write_atomically(run_dir.config, config.model_dump_json(indent=2).encode())
    identity = load_or_create_key(home.key)
    clock = SystemClock()
    charter = load_charter(config, identity, clock.now_ms())
    environments = open_environments(charter)
    torch.manual_seed(config.seed)
    with open_sandbox(config, charter, environments) as sandbox:
        asyncio.run(_run(config, home, identity, charter, sandbox, clock, show))


async def _run(
    config: NodeConfig,
    home: Home,
    identity: Identity,
    charter: Charter,
    sandbox: Scorer,
    clock: Clock,
    show: Callable[[Event], None],
) -> None:
    policy = open_policy(config, charter)
    settings = train_settings(config, charter)
    compute = ThreadCompute()
    bus = EventBus()
    replay = ReplayStore(home.state, ReplayCache(), clock.now_ms())
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(replay.close)
        stack.callback(compute.close)
        metrics = JsonlSink(home.run(config.run).metrics)
        stack.callback(metrics.close)
        bus.subscribe(metrics)
        socket = SocketSink(home.socket(config.name))
        await socket.start()
        stack.push_async_callback(socket.close)
        bus.subscribe(socket)
        bus.subscribe(show)
        loop = asyncio.get_running_loop()

        def notice(level: str, text: str) -> None:
            happened = Notice(at=clock.now_ms(), level=level, text=text)
            loop.call_soon_threadsafe(bus.emit, happened)

        # Before the network starts, which would not wait for a model to load.
        engine = await compute.run("generate", open_engine, config, policy, notice)
        stack.callback(engine.close)
        transport: Transport | None = None
        if config.network.transport != "none":
            transport = await open_transport(
                home.key,
                listen=config.network.listen,
                validate_record=record_validator(swarm_id(charter), clock.now_ms),
                max_daemon_bytes=config.network.max_daemon_bytes,
            )
            stack.push_async_callback(transport.close)
        node = Node(
            config,
            NodeParts(
                identity=identity,
                charter=charter,
                policy=policy,
                settings=settings,
                trainer=Trainer(policy, settings),
                engine=engine,
                environments=open_environments(charter),
                sandbox=sandbox,
                decoders=open_decoders(policy, charter),
                transport=transport,
                sequence=SequenceStore(home.state / "sequence", clock.now_ms()),
                replay=replay,
                windows=WindowStore(home.state / "window"),
                clock=clock,
                compute=compute,
                bus=bus,
                rss_bytes=lambda: psutil.Process().memory_info().rss,
            ),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, node.stop, f"signal {signal.Signals(number).name}")
        await node.run()


def fetch_charter_from(address: str, config: NodeConfig) -> Path:
    """Connect to `address`, fetch and check its swarm's charter, store it at home. Raises AddressError,
    CharterError."""
    home = Home(config.home).create()
    load_or_create_key(home.key)

    async def fetch() -> Charter:
        transport = await open_transport(home.key)
        try:
            return await fetch_charter(transport, await transport.connect(address))
        finally:
            await transport.close()

    write_atomically(home.charter, charter_bytes(asyncio.run(fetch())))
    return home.charter


@contextlib.asynccontextmanager
async def open_alone(folder: Path) -> AsyncIterator[Transport]:
    """A started network with a throw-away identity, on loopback: for `swarm doctor`."""
    key = folder / "identity.key"
    create_key(key)
    transport = await open_transport(key)
    try:
        yield transport
    finally:
        await transport.close()


async def measure_skew_s(transport: Transport, address: str) -> float:
    """The clock of the node at `address` minus ours, seconds. Raises AddressError or TransportError."""
    clock = SystemClock()
    return await ask_clock(transport, await transport.connect(address), clock) / 1000


def _log_to(run_dir: RunDir) -> None:
    """This process's log: a rotated file, warnings and above."""
    handler = logging.handlers.RotatingFileHandler(run_dir.log, maxBytes=LOG_BYTES, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
