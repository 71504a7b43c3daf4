"""`swarm demo`: a swarm on this machine that really learns, in about two minutes.

Starts one process per node on loopback (real keys, real network, real verification), shows the screen on a
terminal or plain progress without one, and ends with a table, or with one JSON object as the last line of
stdout. The memory transport runs the same nodes in one process on a virtual clock instead; the same seed then
gives the same metrics.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import ConfigError
from swarm_cli.options import JsonOption, Settings, parse_settings
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from node.events import Event
    from swarm_cli.demo.plan import DemoPlan
    from swarm_cli.demo.processes import EventTail

__all__ = ["demo"]

POLL_S = 0.25
START_S = {"transformers": 120.0, "vllm": 600.0}
"""Deadline for all processes to load torch and their engines."""
SECONDS_PER_STEP = 20.0
"""Deadline of the whole demo per step; far above any sound run."""


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Honest nodes, each with its own policy.")] = 3,
    followers: Annotated[
        int, typer.Option(min=0, max=16, help="Nodes without a trainer that generate for the first ones.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each node.")] = 100,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of keys, universe of prompts, held-out prompts and sampling.")
    ] = 1,
    transport: Annotated[
        str, typer.Option(help="hivemind (processes and sockets) or memory (simulation).")
    ] = "hivemind",
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm (needs vLLM; one engine process per node).")
    ] = "transformers",
    with_liar: Annotated[
        bool, typer.Option("--with-liar", help="Add a node that lies in four ways.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check what peers send, or believe it.")
    ] = True,
    solo: Annotated[bool, typer.Option("--solo", help="Network off: each policy trains alone.")] = False,
    solo_groups: Annotated[
        int | None, typer.Option(min=1, help="Own groups of a step with --solo.", show_default=False)
    ] = None,
    setting: Settings = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the run in this new folder.", show_default=False)
    ] = None,
    screen: Annotated[
        bool, typer.Option("--screen/--no-screen", help="The live screen, on a terminal.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Three unequal nodes find each other, share verified rollouts, and get better."""
    if transport not in ("hivemind", "memory"):
        raise ConfigError(f"--transport {transport!r} is neither 'hivemind' nor 'memory'")
    if engine not in START_S:
        raise ConfigError(f"--engine {engine!r} is neither 'transformers' nor 'vllm'")
    if transport == "memory" and engine == "vllm":
        raise ConfigError("--engine vllm needs real processes; leave out --transport memory")
    if transport == "memory" and with_liar:
        raise ConfigError("--with-liar needs real processes; leave out --transport memory")
    if solo and followers:
        raise ConfigError("--followers need a network to follow in; leave out --solo")
    if solo and with_liar:
        raise ConfigError("--with-liar needs a network to lie in; leave out --solo")
    if solo_groups is not None and not solo:
        raise ConfigError("--solo-groups only means something with --solo")
    from swarm_cli.demo.folder import demo_folder
    from swarm_cli.demo.plan import DemoOptions, check_settings, make_plan
    from swarm_cli.demo.processes import signals_interrupt
    from swarm_cli.demo.report import follower_report, node_report, print_result, read_events

    options = DemoOptions(
        nodes, steps, seed, transport, engine, with_liar, verify, solo, solo_groups, followers
    )
    settings = parse_settings(setting)
    check_settings(options, settings)
    began_s = time.perf_counter()
    with signals_interrupt(), demo_folder(keep) as root:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(root / "torch"))  # torch makes one on import
        plan = make_plan(options, root, settings)
        show = _progress(plan)
        if transport == "memory":
            err.print(
                f"simulating {nodes + followers} nodes in this process; loading torch takes some seconds"
            )
            from swarm_cli.demo.simulate import simulate

            simulate(plan, show)
        else:
            _run_processes(plan, show, screen=screen and not json and sys.stdout.isatty())
        reports = [
            node_report(n.config.name, read_events(n.home.run(n.config.run).metrics)) for n in plan.honest
        ]
        following = [
            follower_report(n.config.name, read_events(n.home.run(n.config.run).metrics), reports)
            for n in plan.followers
        ]
    wall_s = time.perf_counter() - began_s
    if json:
        write_json({"wall_s": round(wall_s, 1), "nodes": reports, "followers": following})
    else:
        print_result(out, reports, wall_s, following)
        if keep is not None:
            out.print(f"kept in {keep}", soft_wrap=True)


def _progress(plan: DemoPlan) -> Callable[[str, Event], None]:
    """Prints the events worth a line, steps only now and then, names in a column."""
    from swarm_cli.progress import demo_line

    columns = max(len(node.config.name) for node in plan.nodes)

    def show(name: str, event: Event) -> None:
        line = demo_line(event)
        if line:
            err.print(f"{name:<{columns}}  {line}")

    return show


def _run_processes(plan: DemoPlan, show: Callable[[str, Event], None], *, screen: bool) -> None:
    from swarm_cli.demo.processes import DemoError, EventTail, check_alive, running

    shown = (*plan.honest, *plan.followers)
    tails = {node.config.name: EventTail(node.home.run(node.config.run).metrics) for node in shown}
    training = {node.config.name for node in plan.honest}
    done: set[str] = set()
    deadline_s = time.monotonic() + START_S[plan.options.engine] + SECONDS_PER_STEP * plan.options.steps
    with running(plan.nodes) as children:

        def poll() -> bool:
            """Read new events; True once every honest node has finished its steps. Followers have none."""
            check_alive(plan.nodes, children)
            _follow(tails, done, (lambda name, event: None) if screen else show)
            if time.monotonic() > deadline_s:
                waiting = ", ".join(sorted(training - done))
                raise DemoError(f"the demo did not finish in time; waiting for {waiting}")
            return done >= training

        if screen:
            from swarm_cli.dashboard.app import run_dashboard

            sockets = [node.home.socket(node.config.name) for node in shown]
            if run_dashboard(sockets, until=poll) == "quit":
                err.print("left before the end; stopping the nodes")
        else:
            err.print(
                f"starting {len(plan.nodes)} processes; loading torch takes each of them some seconds; "
                f"logs in {plan.root}"
            )
            while not poll():
                time.sleep(POLL_S)


def _follow(tails: dict[str, EventTail], done: set[str], show: Callable[[str, Event], None]) -> None:
    """Hand on the new events of all nodes; a node is done with its evaluation after the last step."""
    from node.events import Evaluated, NodeStopped
    from swarm_cli.demo.processes import DemoError

    for name, tail in tails.items():
        for event in tail.read():
            show(name, event)
            if isinstance(event, Evaluated) and event.moment == "after":
                done.add(name)
            elif isinstance(event, NodeStopped) and name not in done:
                raise DemoError(f"{name} stopped after {event.steps} steps: {event.reason}")
