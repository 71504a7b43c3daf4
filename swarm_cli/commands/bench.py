"""`swarm bench`: measurements that anybody can repeat, as one JSON object or a table.

Each bench is a module of `swarm_cli/bench`, whose docstring says how it measures. Progress goes to stderr.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from swarm_cli.commands.model import fetch_missing
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err, out, write_json

__all__ = ["app"]

TINY_POLICY = "models/wren"

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measurements."""


@app.command()
def rollout(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    model: Annotated[str, typer.Option(help="Policy, looked up like policy.path.")] = "smollm2-135m",
    engine: Annotated[str, typer.Option(metavar="[vllm|transformers]", help="What generates.")] = "vllm",
    quick: Annotated[bool, typer.Option("--quick", help="Little work: only shows that it runs.")] = False,
    json: JsonOption = False,
) -> None:
    """Tokens a second against bare vLLM, partial rollouts, weight updates, parity: about seven minutes.

    Exit codes: 0 measured, 1 an engine failed, 2 wrong input, among it vLLM not installed.
    """
    settings = resolve(config, setting, home, policy__path=model, rollout__engine=engine)
    fetch_missing(settings)

    from node.rollout.policy import Policy
    from swarm_cli.bench.rollout import FULL, QUICK, bench_rollout

    policy = Policy.open(settings.policy.folder(settings.home))
    report = bench_rollout(settings, policy, QUICK if quick else FULL, _say)
    if json:
        write_json(report)
    else:
        out.print(_table(report))


@app.command()
def codec(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    model: Annotated[
        str | None, typer.Option(help="Policy, looked up like policy.path.", show_default="smollm2-135m")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny policy, few steps: only shows that it runs.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Size of a real policy update and speed of its coding: eleven minutes, one when its updates are there.

    Exit codes: 0 measured, 1 an engine failed, 2 wrong input, among it the extra 'bench' not installed.
    """
    policy_path = model or (TINY_POLICY if quick else "smollm2-135m")
    settings = resolve(config, setting, home, policy__path=policy_path)
    fetch_missing(settings)

    from node.paths import Home
    from node.rollout.policy import Policy
    from swarm_cli.bench.codec import FULL, QUICK, bench_codec

    policy = Policy.open(settings.policy.folder(settings.home))
    report = bench_codec(policy, Home(settings.home).bench / "codec", QUICK if quick else FULL, _say)
    if json:
        write_json(report)
    else:
        out.print(_table(report))


@app.command()
def broadcast(
    mbit: Annotated[
        float | None, typer.Option(help="Megabits a second of each node, up and down.", show_default="20")
    ] = None,
    size_mb: Annotated[
        float | None, typer.Option(help="Megabytes that travel, of a million bytes.", show_default="32")
    ] = None,
    receivers: Annotated[
        list[int] | None, typer.Option(help="How many nodes get them; repeatable.", show_default="8, 16")
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Unicast and libtorrent as well.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few nodes, little data: only shows that it runs.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """From one node to n over home uplinks, against unicast and libtorrent: nine minutes. Best as root.

    Root may make network namespaces, where the kernel limits every link; others share one unlimited device
    and limit themselves. Exit codes: 0 measured, 1 a node failed, 2 wrong input.
    """
    import dataclasses

    from swarm_cli.bench.broadcast.bench import FULL, QUICK, bench_broadcast

    size = QUICK if quick else FULL
    size = dataclasses.replace(
        size,
        mbit=size.mbit if mbit is None else mbit,
        size_bytes=size.size_bytes if size_mb is None else round(size_mb * 1e6),
        receivers=tuple(receivers) if receivers else size.receivers,
        baselines=baselines,
    )
    report = bench_broadcast(size, _say)
    if json:
        write_json(report)
    else:
        out.print(_table(report))


def _say(text: str) -> None:
    err.print(text)


def _table(report: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    for name, value in report.items():
        table.add_row(name, _cell(value))
    return table


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case dict():
            return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
        case list():
            return " ".join(map(_cell, value))
    return str(value)
