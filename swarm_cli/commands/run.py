"""`swarm run`: one node in the foreground, until its steps are done or Ctrl-C."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from node.config import NodeConfig
from node.events import Evaluated, Event, NodeStarted, NodeStopped, Notice, StepDone
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err, write_json

__all__ = ["progress_line", "run", "run_here"]


def run(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    name: Annotated[str | None, typer.Option(help="Name shown to others.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run this node: generate, verify, share, train. Trains alone until a peer is found."""
    resolved = resolve(config, setting, home, name=name, train__steps=steps)
    if dry_run:
        write_json(resolved.model_dump(mode="json"))
        return
    run_here(resolved, json=json)


def run_here(config: NodeConfig, *, json: bool) -> None:
    """Run a node in this process and print its progress; the summary as JSON with `json`."""
    err.print(f"starting {config.name} (loading torch takes a few seconds)")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from node.main import run_node

    last: dict[str, Any] = {}

    def show(event: Event) -> None:
        if isinstance(event, (NodeStarted, StepDone, Evaluated, NodeStopped)):
            last[type(event).__name__] = event
        line = progress_line(event)
        if line:
            err.print(line)

    code = run_node(config, show)
    if json:
        write_json(last)
    if code:
        sys.exit(code)


def progress_line(event: Event) -> str:
    """One line of progress, "" for events that are not worth one."""
    match event:
        case NodeStarted():
            log = Path(event.run_dir) / "metrics.jsonl"
            return (
                f"{event.name} is {event.peer_id} in swarm {event.swarm} ({event.swarm_id[:12]}), "
                f"model {event.model} ({event.params / 1e6:.2f} M)\n"
                f"  join it:  swarm join {event.addresses[0] if event.addresses else '(no network)'}\n"
                f"  watch it: swarm monitor   or   tail -F {log}\n"
                f"  sandbox:  {event.sandbox}"
            )
        case StepDone():
            return (
                f"v{event.policy_version:<4} reward {event.reward:.2f}  loss {event.loss:+.3f}  "
                f"groups {event.groups_local}+{event.groups_external}  staleness {event.staleness:.1f}  "
                f"entropy {event.entropy:.2f}" + ("  SKIPPED (not finite)" if event.skipped else "")
            )
        case Evaluated():
            tasks = "  ".join(
                f"{task.rpartition('/')[2]} {value:.2f}" for task, value in event.sampled_tasks.items()
            )
            return (
                f"held-out {event.moment}: {event.sampled:.3f} at T=1, {event.greedy:.3f} greedy  ({tasks})"
            )
        case Notice():
            return f"{event.level}: {event.text}"
        case NodeStopped():
            return f"stopped after {event.steps} steps, {event.wall_s:.0f} s: {event.reason}"
    return ""
