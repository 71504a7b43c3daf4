"""One node's process: it does what the bench tells it over a pipe, and ends with the pipe.

Forked from a server that has imported the heavy libraries, moved into its namespace before it has a second
thread, and leader of its own process group, so that killing the group takes its network daemon with it.
Messages are JSON objects: `{"do": name, ...}` in, one answer each out, `{"error": text}` when it failed. What
is done here is in `swarm.py` and `torrent.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from node.sandbox.linux import set_parent_death_signal
from swarm_cli.bench.broadcast.member import Member, Place
from swarm_cli.bench.broadcast.networks import enter

__all__ = ["main"]

_CLOSE_S = 8.0


def main(connection: Connection, method: str, place: Place) -> None:
    """The process. `method`: exchange, unicast or libtorrent."""
    os.setsid()
    # What the server has imported lives for ever: without this every full collection walks through all of it.
    gc.freeze()
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place.site.namespace is not None:
        enter(place.site.namespace)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_live(connection, _member(method, place)))


def _member(method: str, place: Place) -> Member:
    if method == "libtorrent":
        from swarm_cli.bench.broadcast.torrent import TorrentMember

        return TorrentMember(place)
    from swarm_cli.bench.broadcast.swarm import ExchangeMember, UnicastMember

    return ExchangeMember(place) if method == "exchange" else UnicastMember(place)


async def _live(connection: Connection, member: Member) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    living = asyncio.current_task()

    def read() -> None:
        try:
            orders.put_nowait(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            if living is not None:
                living.cancel()

    loop.add_reader(connection.fileno(), read)
    try:
        while True:
            order = await orders.get()
            try:
                answer = await _obey(member, order)
            except Exception as error:
                # Whatever it is, it is the bench that tells the person.
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send_bytes(json.dumps(answer).encode())
    finally:
        async with asyncio.timeout(_CLOSE_S):
            await member.close()


async def _obey(member: Member, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "open":
            return await member.open()
        case "join":
            await member.join(order["others"], order["timeout_s"])
            return {}
        case "start":
            path = await member.start(order["timeout_s"])
            # The same clock in all processes of a machine.
            return {"at_s": time.monotonic(), "path": None if path is None else str(path)}
        case "report":
            return await member.report()
    raise ValueError(f"unknown order {order['do']!r}")
