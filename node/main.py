"""From the command line to a running node: checks, builds the real parts, runs the loop, ends cleanly.

    home lock -> key, charter, policy folder, port -> sandbox starts beside the imports -> torch -> network

What a person can get wrong is refused before torch is loaded. The first SIGINT or SIGTERM ends the node in
order (a step under way is finished, rollouts under way are dropped, the network is closed); a second one ends
the process at once. The event stream goes to `metrics.jsonl`, to the local socket and to whatever sink the
caller gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from node.build import (
    Loaded,
    LoadedFollower,
    load_charter,
    load_role,
    open_node,
    open_sandbox,
    require_strength,
)
from node.clock import Clock, SystemClock
from node.compute import ThreadCompute
from node.config import NodeConfig
from node.events import Event, EventBus, Notice, NoticeLevel
from node.peers.presence import ask_clock, fetch_charter
from node.peers.trust import load_standings
from node.sandbox.scorer import Scorer
from node.state.keys import create_key, load_or_create_key
from node.state.lock import hold
from node.state.paths import Home, RunDir
from node.state.stores import ReplayStore, SequenceStore, WindowStore, remove_leftovers, write_atomically
from node.telemetry import JsonlSink, SocketSink
from node.transport import open_transport, peer_id_of, require_free
from node.transport.base import Transport
from protocol.charter import charter_bytes, swarm_id
from protocol.errors import ConfigError
from protocol.identity import Identity
from protocol.messages import Charter
from protocol.records import record_validator
from protocol.replay import ReplayCache

__all__ = ["fetch_charter_from", "measure_skew_s", "open_alone", "run_node"]

SWITCH_INTERVAL_S = 0.001
"""A worker thread gives the interpreter back this soon; with the default of 5 ms the event loop waits
longer."""
LOG_BYTES = 10 * 2**20
INTERRUPTED = 130


def run_node(config: NodeConfig, show: Callable[[Event], None]) -> bool:
    """Run a node until its steps are done (True) or a signal ends it (False), as it always does a follower;
    `show` gets every event. Raises SwarmError."""
    home = Home(config.home)
    home.socket(config.name)
    with hold(home.create().lock), contextlib.ExitStack() as stack:
        remove_leftovers(home.state)
        identity, charter = _prepare(config, home)
        starter = stack.enter_context(ThreadPoolExecutor(1))
        sandbox = stack.enter_context(contextlib.closing(open_sandbox(config, charter)))
        report = starter.submit(sandbox.start)  # a process of its own, which starts while this one imports
        notices = _EngineNotices(show)
        config, loaded = load_role(config, charter, notices, identity.peer_id)
        stack.callback(loaded.engine.close)
        report.result()
        require_strength(sandbox, loaded.environments)
        gc.freeze()  # what is loaded stays, and is not looked through again and again
        stack.callback(gc.unfreeze)  # else extension modules complain at the exit of what they leak
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return asyncio.run(_run(config, home, identity, charter, loaded, sandbox, notices, show))


def _prepare(config: NodeConfig, home: Home) -> tuple[Identity, Charter]:
    """Key and charter of this node, and its run's folder; refuses what needs no torch to be seen."""
    if config.network.transport == "memory":
        raise ConfigError("network.transport 'memory' is for `swarm demo`; a node needs 'hivemind' or 'none'")
    if config.role == "follower" and config.network.transport == "none":
        raise ConfigError("role 'follower' has nobody to follow with network.transport 'none'")
    config.policy.folder(config.home)
    identity = load_or_create_key(home.key)
    if config.network.transport == "hivemind":
        require_free(config.network.listen)
    try:
        charter = load_charter(config, identity, SystemClock().now_ms())
        run_dir = home.run(config.run).create()
        write_atomically(run_dir.config, config.model_dump_json(indent=2).encode())
        _log_to(run_dir)
    except OSError as error:
        raise ConfigError(f"cannot write in {error.filename or home.root}: {error.strerror}") from None
    return identity, charter


async def _run(
    config: NodeConfig,
    home: Home,
    identity: Identity,
    charter: Charter,
    loaded: Loaded | LoadedFollower,
    sandbox: Scorer,
    notices: _EngineNotices,
    show: Callable[[Event], None],
) -> bool:
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        signals = stack.enter_context(_Signals())
        compute = ThreadCompute()
        stack.callback(compute.close)
        stack.callback(loaded.engine.close)  # before: it ends what the threads wait for
        replay = ReplayStore(home.state, ReplayCache(), clock.now_ms())
        stack.callback(replay.close)
        bus = EventBus()
        notices.through(bus)
        metrics = JsonlSink(home.run(config.run).metrics)
        stack.callback(metrics.close)
        socket = SocketSink(home.socket(config.name))
        await socket.start()
        stack.push_async_callback(socket.close)
        transport: Transport | None = None
        if config.network.transport != "none":
            transport = await open_transport(
                home.key,
                listen=config.network.listen,
                validate_record=record_validator(swarm_id(charter), clock.now_ms),
                max_daemon_bytes=config.network.max_daemon_bytes,
            )
            stack.push_async_callback(transport.close)
        for sink in (metrics, socket, show):
            bus.subscribe(sink)
        rest = {
            "identity": identity,
            "charter": charter,
            "sandbox": sandbox,
            "transport": transport,
            "sequence": SequenceStore(home.state / "sequence", clock.now_ms()),
            "replay": replay,
            "windows": WindowStore(home.state / "window"),
            "standings": load_standings(home.state / "trust.json", swarm_id(charter)),
            "clock": clock,
            "compute": compute,
            "bus": bus,
            "rss_bytes": lambda: psutil.Process().memory_info().rss,
        }
        node = open_node(config, loaded, rest)

        def stop(reason: str) -> None:
            bus.emit(_warning(clock, "stopping after the work in flight; again to stop at once"))
            node.stop(reason)

        signals.then(stop)
        await node.run()
    return signals.received is None


class _EngineNotices:
    """What an engine says, on any thread: shown at once while there is no event stream, then part of it."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self._emit = show

    def __call__(self, level: NoticeLevel, text: str) -> None:
        self._emit(Notice(at=SystemClock().now_ms(), level=level, text=text))

    def through(self, bus: EventBus) -> None:
        """From now on, through the running loop."""
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(bus.emit, event)

        self._emit = emit


class _Signals:
    """The first SIGINT or SIGTERM ends the node in order, a second one ends the process at once.

    Real signal handlers, not the loop's: they also run while the loop's thread waits for the work in flight.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._stop: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def then(self, stop: Callable[[str], None]) -> None:
        """Call `stop` with the reason at the first signal, also if that came before."""
        self._stop = stop
        self._tell()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(INTERRUPTED)  # the network daemon and the sandbox end when their pipes to us close
        self.received = signal.Signals(number)
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self.received is not None and self._stop is not None:
            self._stop(f"signal {self.received.name}")


def _warning(clock: Clock, text: str) -> Notice:
    return Notice(at=clock.now_ms(), level=NoticeLevel.WARNING, text=text)


def fetch_charter_from(address: str, config: NodeConfig) -> Charter:
    """Connect to `address`, fetch and check its swarm's charter, keep it at home. Raises AddressError,
    CharterError."""
    peer_id_of(address)
    config.policy.folder(config.home)
    home = Home(config.home).create()
    with hold(home.lock):
        load_or_create_key(home.key)

        async def fetch() -> Charter:
            transport = await open_transport(home.key)
            try:
                return await fetch_charter(transport, await transport.connect(address))
            finally:
                await transport.close()

        charter = asyncio.run(fetch())
        write_atomically(home.charter, charter_bytes(charter))
    return charter


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
