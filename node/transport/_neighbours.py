"""What a node keeps up over all restarts of its stack: connections it has dialled, and its own DHT records.

libp2p dials nobody again by itself, and whoever was connected to a daemon that died must dial it (its port
stays the same). So each side keeps the connections it made; and a new neighbour gets our records, because the
ones that held them may be the ones that left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable

from cachetools import FIFOCache
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from node.transport._addresses import parse_address, resolve
from node.transport._control import ControlError
from node.transport._daemon import STACK_ERRORS, Session
from node.transport._dht import wrap
from node.transport.base import TransportLimits
from protocol.errors import AddressError, TransportError
from protocol.messages import PeerId

__all__ = ["Neighbours"]

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_MAX_KNOWN = 256
_FAILURES_BEFORE_FIRST_TRY = 3
"""Counts into the back-off, so that the second try comes after about a second, not 0.1 s."""


class Neighbours:
    """Dialled peers and own records. `delay_s(failures)` is the transport's back-off."""

    def __init__(self, limits: TransportLimits, delay_s: Callable[[int], float]) -> None:
        self.records: dict[str, tuple[bytes, int]] = {}
        """Value and expiry (ms) by key."""
        self._limits = limits
        self._delay_s = delay_s
        self._known: FIFOCache[PeerId, str] = FIFOCache(_MAX_KNOWN)
        """Address of each peer that was dialled."""

    def keep(self, peer_id: PeerId, address: str) -> None:
        """From now on dial this peer again whenever it is lost."""
        self._known[peer_id] = address

    async def dial(self, session: Session, address: str) -> None:
        """Connect, and join the peer's DHT: before its ping is answered a DHT read finds nothing."""
        peer = PeerID.from_base58(parse_address(address))
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                resolved = await resolve(address)
                for each in resolved:
                    _, host, _, port = str(each).strip("/").split("/")[:4]
                    session.dials.permit(host, int(port))
                await session.control.connect(peer, resolved, self._limits.connect_timeout_s)
                if await session.dht.protocol.call_ping(peer) is None:
                    raise AddressError(
                        f"{address} is connected but answers no DHT ping; is it a node of a swarm?"
                    )
                await session.dht.find_nearest_nodes([session.dht.node_id])
        except ControlError as error:
            raise AddressError(f"{address} cannot be reached: {error}") from None
        except TimeoutError:
            raise AddressError(f"{address} does not answer") from None

    async def store_all(self, session: Session) -> None:
        """Put our unexpired records where they belong now."""
        # hivemind judges expiry by the machine's time (`get_dht_time`), whatever clock this node was given.
        now_ms = round(get_dht_time() * 1000)
        self.records = {key: record for key, record in self.records.items() if record[1] > now_ms}
        for key, (value, expires_at) in list(self.records.items()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.dht_timeout_s):
                    await session.dht.store(key, wrap(key, value), expires_at / 1000)

    async def maintain(self, session: Session, refresh: Callable[[Session], Awaitable[None]]) -> None:
        """Work until the session ends. `refresh` runs with every look at the connections."""
        connected: set[PeerId] = set()
        dialling: dict[PeerId, asyncio.Task[None]] = {}
        while True:
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s):
                    before, connected = connected, {peer.peer_id for peer in await session.control.peers()}
                    await refresh(session)
            except (*STACK_ERRORS, TimeoutError) as error:
                session.break_down(f"the daemon does not answer: {error!r}")
                return
            dialling = {peer_id: task for peer_id, task in dialling.items() if not task.done()}
            for peer_id, address in self._known.items():
                if peer_id not in connected and peer_id not in dialling:
                    dialling[peer_id] = session.spawn(self._dial_again(session, peer_id, address))
            if connected - before:
                await self.store_all(session)
            await asyncio.sleep(_EVERY_S)

    async def _dial_again(self, session: Session, peer_id: PeerId, address: str) -> None:
        """Until it answers, ever more rarely."""
        for failures in itertools.count(_FAILURES_BEFORE_FIRST_TRY):
            try:
                await self.dial(session, address)
                break
            except (TransportError, *STACK_ERRORS) as error:
                logger.debug("cannot reach %s again: %s", peer_id, error)
            await asyncio.sleep(self._delay_s(failures))
