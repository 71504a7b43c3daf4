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
from rich import box
from rich.console import Console
from rich.table import Table

from node.events import Evaluated, Event, Health, NodeStarted, PeersSeen, StepDone, decode_event, inert

__all__ = ["node_report", "print_result", "read_events", "refusal_lines"]

MAX_REASONS = 4
LEGEND = (
    "before, after: held-out accuracy at T = 1. own, peers': groups trained on.\n"
    "shared: prompts that a peer answered too. staleness: versions behind, mean over the groups."
)


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


def print_result(out: Console, nodes: Sequence[dict[str, Any]], wall_s: float) -> None:
    """The end of `swarm demo`: one row a node, then who refused what of whom."""
    out.print(f"swarm demo, {wall_s:.0f} s")
    out.print(_table(nodes))
    out.print(LEGEND)
    for line in refusal_lines(nodes):
        out.print(line, soft_wrap=True)


def _table(nodes: Sequence[dict[str, Any]]) -> Table:
    """At most 90 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node")
    for name in ("params", "steps", "before", "after", "gain", "own", "peers'", "shared", "staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in nodes:
        before, after = node["eval_first"], node["eval_last"]
        table.add_row(
            node["name"],
            f"{node['params'] / 1e6:.2f} M",
            str(node["steps"]),
            _share(before),
            _share(after),
            "-" if before is None or after is None else f"{after - before:+.3f}",
            str(node["groups_local"]),
            str(node["groups_external"]),
            str(node["prompts_shared"]),
            f"{node['staleness_mean']:.1f}",
        )
    return table


def refusal_lines(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Per node, what it refused of whom and why, most frequent reason first."""
    names = {node["peer_id"]: node["name"] for node in nodes}
    lines = []
    for node in nodes:
        for peer, counts in node["by_peer"].items():
            reasons = sorted(counts["rejected"].items(), key=lambda entry: (-entry[1], entry[0]))
            if reasons:
                why = ", ".join(f"{reason} {count}" for reason, count in reasons[:MAX_REASONS])
                name = inert(names.get(peer, counts["name"]))
                lines.append(f"{node['name']} refused {sum(counts['rejected'].values())} of {name}: {why}")
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
