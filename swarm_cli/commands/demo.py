"""`swarm demo`: a swarm on this machine that really learns, in about two minutes.

Starts one process per node on loopback (real keys, real network, real verification), shows the screen on a
terminal or plain progress without one, and ends with a table, or with one JSON object as the last line of
stdout. The memory transport runs the same nodes in one process on a virtual clock instead; the same seed then
gives the same metrics.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from node.events import Event, NodeStopped, StepDone
from protocol.errors import ConfigError
from swarm_cli.commands.run import progress_line
from swarm_cli.demo.plan import DemoOptions, DemoPlan, make_plan
from swarm_cli.demo.processes import EventTail, check_alive, running
from swarm_cli.demo.report import node_report, read_events, result_table
from swarm_cli.options import JsonOption, Settings, resolve
from swarm_cli.output import err, out, write_json

__all__ = ["demo"]

POLL_S = 0.25
PROGRESS_EVERY = 10
SECONDS_PER_STEP = 20.0
"""Deadline of the whole demo per step; far above any sound run."""


def demo(
    nodes: Annotated[int, typer.Option(help="Honest nodes, each with its own policy.")] = 3,
    steps: Annotated[int, typer.Option(help="Optimiser steps of each node.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of keys, prompts and sampling.")] = 1,
    transport: Annotated[
        str, typer.Option(help="hivemind (processes and sockets) or memory (simulation).")
    ] = "hivemind",
    with_liar: Annotated[
        bool, typer.Option("--with-liar", help="Add a node that lies in three ways.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Believe peers without checking.")
    ] = True,
    solo: Annotated[bool, typer.Option("--solo", help="Network off: each policy trains alone.")] = False,
    solo_groups: Annotated[
        int | None, typer.Option(help="Own groups of a step with --solo.", show_default=False)
    ] = None,
    setting: Settings = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the run's folder here.", show_default=False)] = None,
    screen: Annotated[
        bool, typer.Option("--screen/--no-screen", help="The live screen, on a terminal.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Three unequal nodes find each other, share verified rollouts, and get better."""
    if transport not in ("hivemind", "memory"):
        raise ConfigError(f"--transport {transport!r} is neither 'hivemind' nor 'memory'")
    if transport == "memory" and with_liar:
        raise ConfigError("--with-liar needs real processes; leave out --transport memory")
    if solo_groups is not None and not solo:
        raise ConfigError("--solo-groups only means something with --solo")
    resolve(None, setting)  # refuse a wrong --set before anything is made
    options = DemoOptions(nodes, steps, seed, transport, with_liar, verify, solo, solo_groups)
    settings = dict(item.partition("=")[::2] for item in setting or [])
    root = keep or Path(tempfile.mkdtemp(prefix="swarm-demo-"))
    began_s = time.perf_counter()
    try:
        plan = make_plan(options, root, _now_ms(options), settings)
        if transport == "memory":
            from swarm_cli.demo.simulate import simulate

            simulate(plan, _progress())
        else:
            _run_processes(plan, screen=screen and not json and sys.stdout.isatty())
        reports = [
            node_report(n.config.name, read_events(n.home.run(n.config.run).metrics)) for n in plan.honest
        ]
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    wall_s = time.perf_counter() - began_s
    if json:
        write_json({"wall_s": round(wall_s, 1), "nodes": reports})
    else:
        out.print(result_table(reports, wall_s))


def _now_ms(options: DemoOptions) -> int:
    from node.clock import VIRTUAL_EPOCH_MS, SystemClock

    return VIRTUAL_EPOCH_MS if options.transport == "memory" else SystemClock().now_ms()


def _progress() -> Callable[[str, Event], None]:
    """Prints the events worth a line, steps only now and then."""

    def show(name: str, event: Event) -> None:
        if isinstance(event, StepDone) and event.policy_version % PROGRESS_EVERY:
            return
        for line in progress_line(event).splitlines()[:1]:
            err.print(f"{name:<9} {line}")

    return show


def _run_processes(plan: DemoPlan, *, screen: bool) -> None:
    tails = {node.config.name: EventTail(node.home.run(node.config.run).metrics) for node in plan.honest}
    done: set[str] = set()
    deadline_s = time.monotonic() + 60 + SECONDS_PER_STEP * plan.options.steps
    show = _progress()
    with running(plan.nodes) as children:

        def poll() -> bool:
            """Read new events; True once every honest node has finished its steps."""
            check_alive(plan.nodes, children)
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"the demo did not finish in time; waiting for {sorted(tails.keys() - done)}"
                )
            for name, tail in tails.items():
                for event in tail.read():
                    if not screen:
                        show(name, event)
                    if _is_last(event):
                        done.add(name)
            return len(done) == len(tails)

        if screen:
            _watch([node.home.socket(node.config.name) for node in plan.honest], poll)
        else:
            err.print(f"starting {len(plan.nodes)} nodes; logs in {plan.root}")
            while not poll():
                time.sleep(POLL_S)


def _is_last(event: Event) -> bool:
    """The held-out evaluation after the last step, or the end of the node."""
    return isinstance(event, NodeStopped) or getattr(event, "moment", "") == "after"


def _watch(sockets: Sequence[Path], finished: Callable[[], bool]) -> None:
    from swarm_cli.dashboard.app import run_dashboard

    run_dashboard(sockets, until=finished)
