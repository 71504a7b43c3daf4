"""`swarm status [--json]`: what the running nodes of this home are doing, and what each stage waits for.

Reads the same event sockets as the screen, for as long as the history takes; exit code 1 when no node runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from node.peers.twin import TWIN_REASON
from node.state.paths import Home
from swarm_cli.options import HomeOption, JsonOption, resolve
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from node.events import PeerStatus, WeightsSeen

__all__ = ["frozen_lines", "show", "status", "weights_line"]


def status(home: HomeOption = None, json: JsonOption = False) -> None:
    """Show the running nodes: policy version, peers, stages and their waits."""
    import asyncio

    from swarm_cli.snapshot import read_nodes, summary

    folder = Home(resolve(None, None, home).home).sockets
    facts = [summary(view) for view in asyncio.run(read_nodes(sorted(folder.glob("*.sock"))))]
    if json:
        write_json(facts)
    else:
        for each in facts:
            show(each)
    if not facts:
        err.print(f"no node is running here ({folder.parent}); start one with: swarm run")
        raise typer.Exit(1)


def show(facts: dict[str, Any]) -> None:
    """Print what `summary` says about one node."""
    name, peers = facts["name"], facts["peers_connected"]
    if facts["state"] == "starting":
        out.print(f"{name}: still starting")
        return
    reward = "" if facts["reward"] is None else f"  reward {facts['reward']:.2f}"
    out.print(
        f"{name}  v{facts['policy_version']}  {peers} peer{'s' * (peers != 1)}  "
        f"up {facts['uptime_s']:.0f} s{reward}\n{facts['peer_id']}  in {facts['swarm']}",
        soft_wrap=True,
    )
    for line in frozen_lines(facts["peers"], facts["at"]):
        out.print(line, soft_wrap=True)
    if facts["weights"] is not None:
        out.print(weights_line(facts["role"], facts["weights"]), soft_wrap=True)
    out.print(_table(facts))
    health = facts["health"]
    if health is not None and health.not_sharing:
        out.print(f"shares nothing any more: {health.not_sharing}", soft_wrap=True)
    if health is not None and (twins := health.refused.get(TWIN_REASON)):
        out.print(
            f"another node runs with this node's key ({twins} messages of it heard): stop one of the two",
            soft_wrap=True,
        )


def frozen_lines(peers: Sequence[PeerStatus], at: int) -> list[str]:
    """One line a peer whose link stands and whose node does not answer; `at` is now, ms."""
    return [
        f"frozen: {peer.name or peer.peer_id} is linked and "
        + (
            f"answered {max(0, at - peer.answered_at) / 1000:.0f} s ago"
            if peer.answered_at
            else "never answered"
        )
        for peer in peers
        if peer.frozen
    ]


def weights_line(role: str, weights: WeightsSeen) -> str:
    """How the weights travel, in one line."""
    moved = f"in {weights.received_bytes / 1e6:.1f} MB, out {weights.sent_bytes / 1e6:.1f} MB"
    if role == "trainer":
        version = f"v{weights.policy_version}" if weights.policy_version >= 0 else "nothing yet"
        count = weights.followers
        return f"published {version}, {count} follower{'s' * (count != 1)}; weights {moved}"
    if not weights.owner:
        return f"follows nobody; weights {moved}"
    version = "no version yet"
    if weights.policy_version >= 0:
        version = f"v{weights.policy_version}, {max(0, weights.head - weights.policy_version)} behind"
    fetching = "".join(f", fetching {blob.have}/{blob.chunks} chunks" for blob in weights.blobs)
    return f"follows {weights.owner} at {version}{fetching}; weights {moved}"


def _table(facts: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("stage", "queue", "waiting for", "since", box=box.SIMPLE_HEAD, pad_edge=False)
    for stage in facts["stages"]:
        queue = f"{stage.queued}/{stage.capacity}" if stage.capacity else ""
        since = f"{stage.waiting_s:.1f} s" if stage.waiting_for else ""
        doing = stage.waiting_for or "(not waiting)"
        if stage.stalled_s:
            doing, since = f"{doing}: no progress, which is not usual", f"{stage.stalled_s:.1f} s"
        table.add_row(stage.stage, queue, doing, since)
    return table
