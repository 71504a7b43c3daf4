"""From the command line to a running node: checks, opens the real parts, runs the loop, ends cleanly.

    home lock -> key -> charter (`join`: the network starts here and asks a node for it)
              -> sandbox starts beside the imports -> torch, policy, engine -> network -> node

What a person can get wrong is refused before torch is loaded. The first SIGINT or SIGTERM ends the node in
order (a step under way is finished, rollouts under way are dropped, the network is closed); a second one ends
the process at once. The event stream goes to `metrics.jsonl`, to the local socket and to whatever sink the
caller gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import logging.handlers
import multiprocessing
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from node.clock import SystemClock
from node.compute import ThreadCompute
from node.config import NodeConfig
from node.events import Event, EventBus, Notice, NoticeLevel
from node.membership import Membership
from node.open.charter import open_membership, read_or_found_charter
from node.open.parts import Parts, open_parts
from node.open.policy import open_host, require_fit
from node.open.stores import open_stores
from node.peers.presence import ask_clock, fetch_charter
from node.peers.tasks import fetch_task
from node.runtime import Runtime
from node.signals import EndSignals
from node.state.keys import create_key, load_or_create_key
from node.state.lock import hold
from node.state.paths import Home, RunDir
from node.state.stores import remove_leftovers, write_atomically
from node.state.tasks import keep_blob, missing_blobs
from node.telemetry import JsonlSink, SocketSink
from node.transport import open_transport, peer_id_of, require_free
from node.transport.base import Transport
from protocol.charter import charter_bytes
from protocol.errors import ConfigError, KeyFileError
from protocol.identity import Identity
from protocol.messages import Charter, Digest
from protocol.records import record_validator

__all__ = [
    "EngineNotices",
    "join_node",
    "measure_skew_s",
    "open_alone",
    "require_shared_memory",
    "run_loop",
    "run_node",
]

SWITCH_INTERVAL_S = 0.001
"""A worker thread gives the interpreter back this soon; with the default of 5 ms the event loop waits
longer."""
LOG_BYTES = 10 * 2**20


def run_node(config: NodeConfig, show: Callable[[Event], None]) -> bool:
    """Run a node until its steps are done (True) or a signal ends it (False), as it always does a follower;
    `show` gets every event. Raises SwarmError."""
    with _started(config) as identity:
        warn = functools.partial(EngineNotices(show), NoticeLevel.WARNING)
        charter = read_or_found_charter(config, identity, SystemClock().now_ms(), warn)
        membership = open_membership(Home(config.home), identity, charter, SystemClock())
        with asyncio.Runner() as loop, _Network(config, loop) as network:
            return _run(config, membership, loop, network, show)


def join_node(
    config: NodeConfig, address: str, agree: Callable[[Charter], None], show: Callable[[Event], None]
) -> bool:
    """As `run_node`, in the swarm of the node at `address`. That node is asked for the charter; a new one is
    kept at home once `agree` has raised nothing. Raises AddressError and CharterError, too."""
    peer_id_of(address)
    kept = Home(config.home).charter
    with _started(config) as identity, asyncio.Runner() as loop, _Network(config, loop) as network:
        charter = loop.run(network.ask_charter(address))
        data = charter_bytes(charter)
        known = kept.is_file() and kept.read_bytes() == data  # this home is in that swarm already
        if not known:
            agree(charter)
        loop.run(network.fetch_tasks(address, charter, show))
        if not known:
            write_atomically(kept, data)
        membership = open_membership(Home(config.home), identity, charter, SystemClock())
        config = config.model_copy(update={"charter": str(kept)})
        return _run(config, membership, loop, network, show)


@contextlib.contextmanager
def _started(config: NodeConfig) -> Iterator[Identity]:
    """The key of this node, with its home locked and its run's log open; refuses what needs no torch to be
    seen."""
    if config.network.transport == "memory":
        raise ConfigError("network.transport 'memory' is for `swarm demo`; a node needs 'hivemind' or 'none'")
    if config.role == "follower" and config.network.transport == "none":
        raise ConfigError("role 'follower' has nobody to follow with network.transport 'none'")
    home = Home(config.home)
    home.socket(config.name)
    with hold(home.create().lock):
        config.policy.folder(config.home)
        identity = _key_of(home)
        if config.network.transport == "hivemind":
            require_shared_memory()
            require_free(config.network.listen)
        try:
            remove_leftovers(home.state)
            _log_to(home.run(config.run).create())
        except OSError as error:
            raise _unwritable(error, home) from None
        yield identity


def _key_of(home: Home) -> Identity:
    """This home's key, a new one for a new home. Raises KeyFileError where the state is another key's: its
    numbers and windows would be taken for this one's."""
    owner = home.owner.read_text().strip() if home.owner.is_file() else ""
    if owner and not home.key.exists():
        raise KeyFileError(
            f"this home belonged to {owner}, and its key {home.key} is gone; put the key back, or start with "
            "a new --home"
        )
    identity = load_or_create_key(home.key)
    if owner and owner != identity.peer_id:
        raise KeyFileError(
            f"the state in {home.state} is of {owner}, the key {home.key} of {identity.peer_id}; put the key "
            f"back, or start with a new --home"
        )
    if not owner:
        try:
            write_atomically(home.owner, f"{identity.peer_id}\n".encode())
        except OSError as error:
            raise _unwritable(error, home) from None
    return identity


def require_shared_memory() -> None:
    """Raise ConfigError where this process gets no semaphore, without which the network's libraries do not
    even load."""
    try:
        multiprocessing.get_context("spawn").Semaphore(1)
    except (OSError, ImportError) as error:
        raise ConfigError(
            f"this system gives no semaphore ({error}): /dev/shm must be writable; docker run "
            "--shm-size=64m, or mount a tmpfs there"
        ) from None


def _unwritable(error: OSError, home: Home) -> ConfigError:
    return ConfigError(f"cannot write in {error.filename or home.root}: {error.strerror}")


def _run(
    config: NodeConfig,
    membership: Membership,
    loop: asyncio.Runner,
    network: _Network,
    show: Callable[[Event], None],
) -> bool:
    """Open everything, record the configuration that came of it, and run."""
    home = Home(config.home)
    with contextlib.ExitStack() as stack:
        starter = stack.enter_context(ThreadPoolExecutor(1))
        host = stack.enter_context(contextlib.closing(open_host(config, membership.charter)))
        report = starter.submit(host.start)  # a process of its own, which starts while this one imports
        notices = EngineNotices(show)
        parts = open_parts(config, membership.charter, host, notices, membership.peer_id)
        stack.callback(parts.engine.close)
        report.result()
        require_fit(host)
        try:
            write_atomically(home.run(config.run).config, parts.config.model_dump_json(indent=2).encode())
        except OSError as error:
            raise _unwritable(error, home) from None
        gc.freeze()  # what is loaded stays, and is not looked through again and again
        stack.callback(gc.unfreeze)  # else extension modules complain at the exit of what they leak
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return loop.run(run_loop(parts, membership, network.start, notices, show))


async def run_loop(
    parts: Parts,
    membership: Membership,
    start_network: Callable[[Membership], Awaitable[Transport | None]],
    notices: EngineNotices,
    show: Callable[[Event], None],
) -> bool:
    """Run the node of `parts` in this event loop, with what it needs for as long: threads, stores, sinks of
    its events, and the network. False if a signal ended it."""
    from node.node import open_node  # imports torch

    config, clock = parts.config, SystemClock()
    home = Home(config.home)
    async with contextlib.AsyncExitStack() as stack:
        compute = ThreadCompute()
        signals = stack.enter_context(EndSignals(compute))
        stack.callback(compute.close)
        stack.callback(parts.engine.close)  # before: it ends what the threads wait for
        stores = stack.enter_context(open_stores(home, membership.swarm_id, clock.now_ms))
        runtime = Runtime(clock, compute, EventBus(), random.Random(config.seed))
        notices.through(runtime)
        metrics = stack.enter_context(contextlib.closing(JsonlSink(home.run(config.run).metrics)))
        socket = SocketSink(home.socket(config.name))
        await socket.start()
        stack.push_async_callback(socket.close)
        transport = await start_network(membership)
        if transport is not None:
            stack.push_async_callback(transport.close)
        for sink in (metrics, socket, show):
            runtime.bus.subscribe(sink)
        node = await open_node(parts, runtime, membership, stores, transport)

        def stop(reason: str) -> None:
            runtime.notice(NoticeLevel.WARNING, "stopping after the work in flight; again to stop at once")
            node.stop(reason)

        signals.then(stop)
        await node.run()
    return signals.received is None


class _Network:
    """This node's network, which starts when it is first needed: to ask for a charter, or for the node."""

    def __init__(self, config: NodeConfig, loop: asyncio.Runner) -> None:
        self._config = config
        self._loop = loop
        self._swarm_id: Digest = ""
        """Records of this swarm are stored for others; of none before it is known."""
        self._transport: Transport | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._transport is not None:
            self._loop.run(self._transport.close())

    async def ask_charter(self, address: str) -> Charter:
        """The charter of the node at `address`, its signature checked. Raises AddressError, CharterError,
        TransportError."""
        transport = self._transport = await self._open()
        return await fetch_charter(transport, await transport.connect(address))

    async def fetch_tasks(self, address: str, charter: Charter, show: Callable[[Event], None]) -> None:
        """Have all tasks in files of the charter here, from the node at `address`. Raises AddressError,
        TransportError, ConfigError."""
        home = Home(self._config.home)
        missing = missing_blobs(home, charter.environments)
        if not missing:
            return
        transport = self._transport = self._transport or await self._open()
        peer_id = await transport.connect(address)
        for task, name in missing.items():
            tell = Progress(f"fetching the task {task}", show)
            keep_blob(home, await fetch_task(transport, peer_id, name, tell))

    async def start(self, membership: Membership) -> Transport | None:
        """The started network for a node of this swarm; None where the configuration wants none."""
        self._swarm_id = membership.swarm_id
        if self._transport is None and self._config.network.transport != "none":
            self._transport = await self._open()
        return self._transport

    async def _open(self) -> Transport:
        network = self._config.network
        return await open_transport(
            Home(self._config.home).key,
            listen=network.listen,
            validate_record=self._validate_record,
            max_daemon_bytes=network.max_daemon_bytes,
        )

    def _validate_record(self, key: str, value: bytes, expires_at: int) -> None:
        record_validator(self._swarm_id, SystemClock().now_ms)(key, value, expires_at)


class Progress:
    """Tells how much of something came, each tenth of it."""

    def __init__(self, what: str, show: Callable[[Event], None]) -> None:
        self._what = what
        self._show = show
        self._told = -1

    def __call__(self, done: int, size: int) -> None:
        tenth = 10 * done // size
        if tenth > self._told:
            self._told = tenth
            text = f"{self._what}: {done / 2**20:.1f} of {size / 2**20:.1f} MiB"
            self._show(Notice(at=SystemClock().now_ms(), level=NoticeLevel.INFO, text=text))


class EngineNotices:
    """What an engine says, on any thread: shown at once while there is no event stream, then part of it."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self._emit = show

    def __call__(self, level: NoticeLevel, text: str) -> None:
        self._emit(Notice(at=SystemClock().now_ms(), level=level, text=text))

    def through(self, runtime: Runtime) -> None:
        """From now on, through the running loop."""
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(runtime.emit, event)

        self._emit = emit


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
