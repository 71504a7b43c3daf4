"""`swarm status [--json]`: what the running nodes of this home are doing, and what each stage waits for.

Reads the same event sockets as the screen, for as long as the history takes; exit code 1 when no node runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from node.paths import Home
from swarm_cli.dashboard.feed import SocketFeed
from swarm_cli.dashboard.view import Link, NodeView
from swarm_cli.options import HomeOption, JsonOption, resolve
from swarm_cli.output import err, out, write_json

__all__ = ["status", "summary"]

READ_S = 2.0
POLL_S = 0.02


def status(home: HomeOption = None, json: JsonOption = False) -> None:
    """Show the running nodes: policy version, peers, stages and their waits."""
    sockets = sorted(Home(resolve(None, None, home).home).sockets.glob("*.sock"))
    views = [view for socket in sockets if (view := asyncio.run(_read(socket))) is not None]
    if json:
        write_json([summary(view) for view in views])
    else:
        for view in views:
            out.print(_table(summary(view)))
    if not views:
        err.print("no node is running here; start one with: swarm run")
        raise typer.Exit(1)


async def _read(socket: Path) -> NodeView | None:
    """The node's view once its history has arrived, None when nobody serves the socket."""
    feed = SocketFeed(socket)
    reading = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(READ_S):
            while not (feed.view.started and feed.view.stages):
                if feed.view.link is Link.GONE:
                    return None
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return feed.view if feed.view.started else None
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    return feed.view


def summary(view: NodeView) -> dict[str, Any]:
    """What `--json` prints for one node."""
    started, last = view.started, view.steps[-1] if view.steps else None
    return {
        "name": view.name,
        "peer_id": view.peer_id,
        "swarm": started.swarm if started else "",
        "swarm_id": started.swarm_id if started else "",
        "addresses": started.addresses if started else (),
        "model": started.model if started else "",
        "policy_version": view.policy_version,
        "uptime_s": view.uptime_s,
        "peers_connected": view.connected,
        "reward": last.reward if last else None,
        "staleness": last.staleness if last else None,
        "stages": view.stages,
        "peers": view.peers,
        "health": view.health,
    }


def _table(facts: dict[str, Any]) -> Table:
    title = (
        f"{facts['name']}  v{facts['policy_version']}  {facts['peers_connected']} peers  {facts['peer_id']}"
    )
    table = Table("stage", "queue", "waiting for", "since", title=title, title_justify="left")
    for stage in facts["stages"]:
        queue = f"{stage.queued}/{stage.capacity}" if stage.capacity else ""
        since = f"{stage.waiting_s:.1f} s" if stage.waiting_for else ""
        table.add_row(stage.stage, queue, stage.waiting_for or "working", since)
    return table
