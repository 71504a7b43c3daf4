"""The demo's result: what each node's `metrics.jsonl` says, as one JSON object and as a table.

Reads only the event stream, like every other viewer. Field names are the command's contract; means over a run
are means over its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.table import Table

from node.events import Evaluated, Event, Health, NodeStarted, PeersSeen, StepDone, decode_event

__all__ = ["node_report", "read_events", "result_table"]


def read_events(metrics: Path) -> list[Event]:
    """Events of a run in order; a torn last line of a killed node is left out."""
    if not metrics.exists():
        return []
    events = []
    for line in metrics.read_bytes().splitlines():
        try:
            events.append(decode_event(line))
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
    return events


def node_report(name: str, events: Iterable[Event]) -> dict[str, Any]:
    """One entry of `nodes` in the demo's JSON."""
    of_type: dict[type, list[Any]] = {}
    for event in events:
        of_type.setdefault(type(event), []).append(event)
    started: NodeStarted | None = next(iter(of_type.get(NodeStarted, [])), None)
    steps: list[StepDone] = of_type.get(StepDone, [])
    evaluations: list[Evaluated] = of_type.get(Evaluated, [])
    peers: list[PeersSeen] = of_type.get(PeersSeen, [])
    health: list[Health] = of_type.get(Health, [])
    first = next((e for e in evaluations if e.moment == "before"), None)
    last = next((e for e in reversed(evaluations) if e.moment == "after"), None)
    return {
        "name": name,
        "peer_id": started.peer_id if started else "",
        "model": Path(started.model).name if started else "",
        "params": started.params if started else 0,
        "steps": sum(not step.skipped for step in steps),
        "eval_first": first.sampled if first else None,
        "eval_last": last.sampled if last else None,
        "eval_tasks": {
            task: [value, last.sampled_tasks[task] if last else None]
            for task, value in (first.sampled_tasks if first else {}).items()
        },
        "greedy_first": first.greedy if first else None,
        "greedy_last": last.greedy if last else None,
        "groups_local": sum(step.groups_local for step in steps),
        "groups_external": sum(step.groups_external for step in steps),
        "prompts_shared": sum(step.prompts_shared for step in steps),
        "hacpo_groups": sum(step.hacpo_groups for step in steps),
        "graft_groups": sum(step.graft_groups for step in steps),
        "by_peer": {
            peer.peer_id: {
                "name": peer.name,
                "accepted": peer.accepted,
                "rejected": peer.rejected,
                "trained": sum(s.groups for step in steps for s in step.sources if s.source == peer.peer_id),
                "trust": peer.trust,
            }
            for peer in (peers[-1].peers if peers else ())
        },
        "staleness_mean": fmean(step.staleness for step in steps) if steps else 0.0,
        "loop_lag_p99_s": health[-1].loop_lag_p99_s if health else 0.0,
        "rss_bytes": max((each.rss_bytes for each in health), default=0),
    }


def result_table(nodes: Sequence[dict[str, Any]], wall_s: float) -> Table:
    """The table at the end of `swarm demo`."""
    table = Table(
        "node", "params", "steps", "held-out before", "after", "gain", "own", "peers'", "shared", "staleness",
        "refused", title=f"swarm demo, {wall_s:.0f} s", title_justify="left",
    )  # fmt: skip
    names = {node["peer_id"]: node["name"] for node in nodes}
    for node in nodes:
        before, after = node["eval_first"], node["eval_last"]
        refused = [
            f"{names.get(peer, counts['name'])} {sum(counts['rejected'].values())} "
            f"({', '.join(sorted(counts['rejected'], key=counts['rejected'].get, reverse=True)[:3])})"
            for peer, counts in node["by_peer"].items()
            if sum(counts["rejected"].values())
        ]
        table.add_row(
            node["name"],
            f"{node['params'] / 1e6:.2f} M",
            str(node["steps"]),
            "-" if before is None else f"{before:.3f}",
            "-" if after is None else f"{after:.3f}",
            "-" if before is None or after is None else f"{after - before:+.3f}",
            str(node["groups_local"]),
            str(node["groups_external"]),
            str(node["prompts_shared"]),
            f"{node['staleness_mean']:.1f}",
            "; ".join(refused) or "-",
        )
    return table
