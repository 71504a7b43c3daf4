"""One look at running nodes through their event sockets: what `swarm status` shows.

A node sends its recent history to whoever attaches, so one look needs no waiting. A socket that nobody serves
is refused by the kernel at once; a node that accepts and stays silent is still starting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm_cli.dashboard.feed import READ_BYTES, LineSplitter, read_event
from swarm_cli.dashboard.view import Link, NodeView, fold, lose_line

__all__ = ["read_nodes", "summary"]

READ_S = 2.0


async def read_nodes(sockets: Sequence[Path]) -> list[NodeView]:
    """The views of the nodes behind those of `sockets` that are served; all are read at once."""
    views = await asyncio.gather(*(_read(socket) for socket in sockets))
    return [view for view in views if view is not None]


async def _read(socket: Path) -> NodeView | None:
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return None
    view, splitter = NodeView(label=socket.stem, link=Link.LIVE), LineSplitter()
    try:
        async with asyncio.timeout(READ_S):
            while not (view.started and view.stages):
                chunk = await reader.read(READ_BYTES)
                if not chunk:
                    break
                for line in splitter.split(chunk):
                    event = read_event(line)
                    view = lose_line(view) if event is None else fold(view, event)
    except (TimeoutError, OSError):
        return view
    finally:
        writer.close()
    return view


def summary(view: NodeView) -> dict[str, Any]:
    """What `--json` prints for one node. `stages` holds every wait with its name and age."""
    started, last = view.started, view.steps[-1] if view.steps else None
    return {
        "name": view.name,
        "role": view.role,
        "state": "starting" if started is None else "running",
        "peer_id": view.peer_id,
        "swarm": started.swarm if started else "",
        "swarm_id": started.swarm_id if started else "",
        "addresses": started.addresses if started else (),
        "model": started.model if started else "",
        "run_dir": started.run_dir if started else "",
        "policy_version": max(0, view.policy_version),
        "at": view.at,
        "uptime_s": view.uptime_s,
        "peers_connected": view.connected,
        "peers_frozen": view.frozen,
        "reward": last.reward if last else None,
        "staleness": last.staleness if last else None,
        "weights": view.weights,
        "stages": view.stages,
        "peers": view.peers,
        "health": view.health,
        "notices": view.notices[-5:],
    }
