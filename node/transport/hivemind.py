"""The real transport: libp2p's Go daemon and hivemind's DHT, supervised, in our own event loop.

    calls   --> session (daemon + DHT node) --> network
    network --> stream gate, DHT guard --> node
    the daemon dies --> pending calls fail at once --> back-off --> a new session: same identity and port,
    handlers, records, dialled peers

Never `hivemind.DHT`: it forks a process whose pipe dies on values near 100 KB. TCP only. Calls made while the
stack is being rebuilt (0.2 s) wait for it within their own deadline. Not for what travels: frames, envelopes
and records are checked by `streams`, `node/share/gossip.py` and the record validator.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto import p2pd_pb2

from node.transport._addresses import may_dial, parse_address, require_free, tcp_port, with_port
from node.transport._control import read_message
from node.transport._daemon import STACK_ERRORS, Session
from node.transport._dht import DhtGuard, open_dht, unwrap, wrap
from node.transport._dials import DialGuard
from node.transport._neighbours import Neighbours
from node.transport._sockets import SocketChannel
from node.transport.base import (
    ConnectedPeer,
    RecordValidator,
    Stream,
    StreamHandler,
    Transport,
    TransportLimits,
    require_storable,
)
from node.transport.limits import Refusals
from node.transport.streams import StreamGate
from protocol.errors import AddressError, DeadlineError, KeyFileError, TransportError
from protocol.identity import Identity
from protocol.messages import PeerId

__all__ = ["HivemindTransport"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STREAM_HEADER_TIMEOUT_S = 5.0
_HEALTHY_AFTER_S = 60.0
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 30.0


class HivemindTransport(Transport):
    """A node's network over `p2pd`. `identity_path` is a libp2p private key file (`node/state/keys.py`)."""

    def __init__(
        self,
        identity_path: Path,
        *,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        validate_record: RecordValidator | None = None,
        limits: TransportLimits | None = None,
        rng: random.Random | None = None,
        max_daemon_bytes: int = 512 * 1024 * 1024,
    ) -> None:
        try:
            key = identity_path.read_bytes()
        except OSError as error:
            raise KeyFileError(f"the identity key {identity_path} cannot be read: {error.strerror}") from None
        self.peer_id = Identity.from_libp2p(key).peer_id
        self._identity_path = identity_path
        self._listen = listen
        self._validate_record = validate_record
        self._limits = limits or TransportLimits()
        self._rng = rng or random.Random()
        self._max_daemon_bytes = max_daemon_bytes
        self.refusals = Refusals()
        self._gate = StreamGate(self._limits, self.refusals)
        self._dht_guard = DhtGuard(self._limits, self.refusals)
        self._session: Session | None = None
        self._session_changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._addresses: tuple[str, ...] = ()
        self._handlers: dict[str, tuple[StreamHandler, float | None]] = {}
        self._neighbours = Neighbours(self._limits, self._delay_s)
        self.restarts = 0
        self._closed = False

    # --- life ---

    async def start(self) -> None:
        require_free(self._listen)
        self._use(await self._open_session())
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._session_changed.set()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._gate.close()
        if self._session is not None:
            await self._session.stop()

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def dials_unguarded(self) -> str:  # type: ignore[override]
        return self._session.dials.missing if self._session is not None else ""

    @property
    def dials(self) -> DialGuard | None:
        """What the running daemon may dial; None while there is none."""
        return self._session.dials if self._session is not None else None

    @property
    def control_path(self) -> str | None:
        """Where the running daemon takes requests; None while there is none."""
        return self._session.control.path if self._session is not None else None

    @property
    def daemon_process_id(self) -> int | None:
        """Of the running daemon; None while there is none."""
        return self._session.process_id if self._session is not None else None

    async def _supervise(self) -> None:
        failures = 0
        while True:
            session = self._session
            if session is None:
                return
            started_s = time.monotonic()
            try:
                reason = await session.died(self._max_daemon_bytes)
            except Exception as error:  # no thread to look from, no descriptor: not known to live is dead
                reason = f"the daemon cannot be watched ({error!r})"
            logger.warning("%s: rebuilding the network stack", reason)
            self._session = None
            self._session_changed.clear()
            for step in (self._gate.reset, session.stop):
                try:
                    await step()
                except Exception as error:
                    logger.warning("what was left of the network stack did not end: %r", error)
            if time.monotonic() - started_s > _HEALTHY_AFTER_S:
                failures = 0
            while self._session is None:
                await asyncio.sleep(self._delay_s(failures))
                failures += 1
                try:
                    self._use(await self._open_session())
                except Exception as error:
                    # Whatever a foreign stack raises: a supervisor that dies is a node that hangs.
                    logger.warning("the network stack is still down after %d tries: %r", failures, error)
            self.restarts += 1

    def _delay_s(self, failures: int) -> float:
        """Exponential back-off with jitter: 0.05 to 0.15 s at first, at most 15 to 45 s."""
        return min(_FIRST_DELAY_S * 2.0 ** min(failures, 20), _MAX_DELAY_S) * self._rng.uniform(0.5, 1.5)

    def _use(self, session: Session) -> None:
        self._session = session
        self._session_changed.set()
        session.spawn(self._neighbours.maintain(session, self._read_addresses), endless=True)

    async def _open_session(self) -> Session:
        """A session with the port of the first one, and our handlers."""

        async def dht(p2p: P2P) -> DHTNode:
            return await open_dht(
                p2p, self.peer_id, self._validate_record, self._dht_guard, self._limits, self.refusals
            )

        session = await Session.open(
            self.peer_id, self._identity_path, self._listen, dht, lambda: self._addresses or (self._listen,)
        )
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._read_addresses(session)
                server = await asyncio.start_unix_server(
                    functools.partial(self._incoming, session), path=session.listener_path
                )
                session.spawn(_serve(server), endless=True)
                for protocol in self._handlers:
                    await session.control.handle(protocol, session.listener_path)
        except BaseException as error:
            await session.stop()
            if isinstance(error, TimeoutError):
                raise DeadlineError("setting up the network daemon", self._limits.connect_timeout_s) from None
            if isinstance(error, STACK_ERRORS):
                raise TransportError(f"the network daemon refused to be set up: {error}") from error
            raise
        return session

    async def _read_addresses(self, session: Session) -> None:
        addresses = await session.control.addresses()
        self._addresses = tuple(f"{address}/p2p/{self.peer_id}" for address in addresses)
        if tcp_port(self._listen) == "0":
            ports = [port for address in addresses if (port := tcp_port(address)) is not None]
            if ports:
                self._listen = with_port(self._listen, ports[0])

    async def _call(
        self, waiting_for: str, timeout_s: float, operation: Callable[[Session], Awaitable[T]]
    ) -> T:
        """Run an operation on the running session, within a deadline, and fail with it."""
        session: Session | None = None
        try:
            async with asyncio.timeout(timeout_s) as scope:
                session = await self._running_session()
                session.scopes.add(scope)
                try:
                    return await operation(session)
                finally:
                    session.scopes.discard(scope)
        except TimeoutError:
            if self._closed:
                raise TransportError(f"{waiting_for}: the network was closed") from None
            if session is not None and session.dead:
                raise TransportError(
                    f"{waiting_for}: the network daemon died; it is being restarted"
                ) from None
            raise DeadlineError(waiting_for, timeout_s) from None
        except STACK_ERRORS as error:
            raise TransportError(f"{waiting_for} failed: {error}") from None

    async def _running_session(self) -> Session:
        while self._session is None or self._closed:
            if self._closed:
                raise TransportError("the network is closed")
            if self._supervisor is None:
                raise TransportError("the network is not started")
            await self._session_changed.wait()
        return self._session

    # --- peers ---

    def may_dial(self, address: str) -> bool:
        return may_dial(address, self.addresses())

    async def connect(self, address: str) -> PeerId:
        peer_id = parse_address(address)
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this node itself; give the address of another one")

        async def connect(session: Session) -> None:
            await self._neighbours.dial(session, address)
            await self._neighbours.store_all(session)

        try:
            await self._call(f"connecting to {address}", self._limits.connect_timeout_s, connect)
        except DeadlineError as error:
            raise AddressError(f"{address} does not answer within {error.timeout_s:g} s") from None
        self._neighbours.keep(peer_id, address)
        return peer_id

    async def peers(self) -> tuple[ConnectedPeer, ...]:
        return await self._call(
            "listing peers", self._limits.connect_timeout_s, lambda session: session.control.peers()
        )

    # --- DHT ---

    async def store(self, key: str, value: bytes, expires_at: int) -> None:
        require_storable(self._validate_record, key, value, expires_at)
        self._neighbours.records[key] = (value, expires_at)
        await self._call(
            f"storing the DHT record {key}",
            self._limits.dht_timeout_s,
            lambda session: session.dht.store(key, wrap(key, value), expires_at / 1000),
        )

    async def get(self, key: str) -> bytes | None:
        found = await self._call(
            f"reading the DHT record {key}",
            self._limits.dht_timeout_s,
            lambda session: session.dht.get(key, latest=True),
        )
        return unwrap(found.value)[1] if found is not None and isinstance(found.value, bytes) else None

    # --- streams ---

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        async def open_stream(session: Session) -> Stream:
            pair = await session.control.open_stream(
                PeerID.from_base58(peer_id), protocol, self._limits.connect_timeout_s
            )
            channel = SocketChannel(pair, session.channels)
            return Stream(peer_id, channel, self._limits.stream_timeout_s)

        return await self._call(
            f"opening {protocol} at {peer_id}", self._limits.connect_timeout_s, open_stream
        )

    def serve(self, protocol: str, handler: StreamHandler, *, deadline_s: float | None = None) -> None:
        known = protocol in self._handlers
        self._handlers[protocol] = (handler, deadline_s)
        if self._session is not None and not known:
            self._session.spawn(self._handle(self._session, protocol))

    async def _handle(self, session: Session, protocol: str) -> None:
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await session.control.handle(protocol, session.listener_path)
        except (*STACK_ERRORS, TimeoutError) as error:
            session.break_down(f"the daemon did not take the handler of {protocol}: {error!r}")

    async def _incoming(
        self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The daemon hands over a stream: who, which protocol, then the peer's bytes."""
        channel = SocketChannel((reader, writer), session.channels)
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(_STREAM_HEADER_TIMEOUT_S):
                await read_message(reader, info, 4096)
        except (*STACK_ERRORS, TimeoutError, ValueError):
            channel.abort()
            return
        served = self._handlers.get(info.proto)
        if served is None:
            channel.abort()
            return
        self._gate.accept(PeerID(info.peer).to_base58(), channel, *served)


async def _serve(server: asyncio.Server) -> None:
    async with server:
        await server.serve_forever()
