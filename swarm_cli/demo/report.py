"""The demo's result: what each node's `metrics.jsonl` says, as one JSON object and as a table.

Reads only the event stream, like every other viewer. Field names are the command's contract; means over a run
are means over its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from node.events import (
    Evaluated,
    Event,
    GroupJudged,
    Health,
    NodeStarted,
    PeersSeen,
    StepDone,
    VersionPublished,
    VersionReached,
    WeightsSeen,
    decode_event,
    inert,
)

__all__ = ["follower_report", "node_report", "print_result", "read_events", "refusal_lines"]

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
        "steps": sum(not (step.skipped or step.rolled_back) for step in steps),
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
        "groups_followers": _followers_groups(steps),
        "staleness_followers": _followers_staleness(steps),
        "versions_published": len(of_type.get(VersionPublished, [])),
        "published_bytes": sum(each.blob_bytes for each in of_type.get(VersionPublished, [])),
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


def follower_report(name: str, events: Iterable[Event], nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One entry of `followers` in the demo's JSON. What became of its groups is in the reports of `nodes`."""
    peer_id, owner, version, digest, received, sent = "", "", -1, "", 0, 0
    generated = 0
    for event in events:
        match event:
            case NodeStarted():
                peer_id = event.peer_id
            case VersionReached():
                owner, version, digest = event.owner, event.policy_version, event.digest
            case WeightsSeen():
                received, sent = event.received_bytes, event.sent_bytes
            case GroupJudged():
                generated += event.own
    of_owner = next((node for node in nodes if node["peer_id"] == owner), None)
    there = of_owner["by_peer"].get(peer_id, {}) if of_owner is not None else {}
    return {
        "name": name,
        "peer_id": peer_id,
        "owner": owner,
        "version": version,
        "digest": digest,
        "groups_generated": generated,
        "accepted": there.get("accepted", 0),
        "trained": there.get("trained", 0),
        "received_bytes": received,
        "sent_bytes": sent,
    }


def _followers_groups(steps: Sequence[StepDone]) -> int:
    return sum(step.groups_followers for step in steps)


def _followers_staleness(steps: Sequence[StepDone]) -> float:
    """Mean over the groups, not over the steps."""
    lags = sum(step.groups_followers * step.staleness_followers for step in steps)
    return lags / max(1, _followers_groups(steps))


def print_result(
    out: Console,
    nodes: Sequence[dict[str, Any]],
    wall_s: float,
    followers: Sequence[dict[str, Any]] = (),
) -> None:
    """The end of `swarm demo`: one row a node, one a follower, then who refused what of whom."""
    out.print(f"swarm demo, {wall_s:.0f} s")
    out.print(_table(nodes))
    out.print(LEGEND)
    if followers:
        names = {node["peer_id"]: node["name"] for node in nodes}
        out.print(_followers_table(followers, names))
        for node in nodes:
            if node["groups_followers"]:
                out.print(
                    f"{node['name']} trained on {node['groups_followers']} groups of its followers, "
                    f"{node['staleness_followers']:.1f} versions behind on average",
                    soft_wrap=True,
                )
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


def _followers_table(followers: Sequence[dict[str, Any]], names: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("follower")
    table.add_column("of")
    for name in ("version", "made", "accepted", "trained on", "weights in", "out"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in followers:
        table.add_row(
            each["name"],
            names.get(each["owner"], "-"),
            f"v{each['version']}" if each["version"] >= 0 else "-",
            str(each["groups_generated"]),
            str(each["accepted"]),
            str(each["trained"]),
            f"{each['received_bytes'] / 1e6:.1f} MB",
            f"{each['sent_bytes'] / 1e6:.1f} MB",
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
