"""A small network of either kind, whose nodes are closed after the test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from node.transport.base import RecordValidator, Transport, TransportLimits
from node.transport.memory import MemoryNetwork
from protocol.identity import Identity

DEADLINE_S = 20.0


class Nodes:
    """Opens nodes of one kind. Seeds make identities; a node may be connected to an earlier one."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._network = MemoryNetwork(seed=1)
        self._opened: list[Transport] = []

    async def open(
        self,
        seed: int,
        connect_to: Transport | None = None,
        *,
        validate_record: RecordValidator | None = None,
        limits: TransportLimits | None = None,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        prepare: Callable[[Transport], None] = lambda transport: None,
    ) -> Transport:
        identity = Identity.from_seed(bytes([seed]) * 32)
        if self.kind == "memory":
            transport: Transport = self._network.transport(
                identity.peer_id, validate_record=validate_record, limits=limits
            )
        else:
            from node.transport.hivemind import HivemindTransport

            path = self._folder / f"{seed}.key"
            path.write_bytes(identity.to_libp2p())
            path.chmod(0o600)
            transport = HivemindTransport(path, listen=listen, validate_record=validate_record, limits=limits)
        prepare(transport)
        self._opened.append(transport)
        await transport.start()
        if connect_to is not None:
            await transport.connect(connect_to.addresses()[0])
        return transport

    def crash(self, transport: Transport) -> None:
        """The network stack dies; the hivemind one comes back by itself."""
        if self.kind == "memory":
            self._network.kill(transport.peer_id)
        else:
            os.kill(transport.daemon_process_id, 9)

    async def recovered(self, transport: Transport) -> None:
        if self.kind == "memory":
            self._network.restart(transport.peer_id)
        await self.eventually(lambda: transport.restarts == 1)

    async def eventually(
        self, condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait for what no event announces."""
        async with asyncio.timeout(deadline_s):
            while True:
                outcome = condition()
                if outcome if isinstance(outcome, bool) else await outcome:
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for transport in reversed(self._opened):
            async with asyncio.timeout(5.0):
                await transport.close()


@pytest.fixture(params=["memory", pytest.param("hivemind", marks=[pytest.mark.net, pytest.mark.slow])])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes of each kind of transport."""
    nodes = Nodes(request.param, tmp_path)
    yield nodes
    await nodes.close()


@pytest.fixture
async def real_nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes with real daemons."""
    nodes = Nodes("hivemind", tmp_path)
    yield nodes
    await nodes.close()
