"""`swarm bench`: measurements that anybody can repeat, as one JSON object or a table.

Each bench is a module of `swarm_cli/bench`, whose docstring says how it measures. Progress goes to stderr.
`broadcast`, `soak` and `staleness` are not part of the wheel: they need a source checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from swarm_cli.checkout import require_checkout
from swarm_cli.commands.model import fetch_missing
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from swarm_cli.bench.staleness.bench import Size

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
    report = bench_rollout(settings, policy, QUICK if quick else FULL, err.print)
    _print(report, json)


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

    from node.rollout.policy import Policy
    from node.state.paths import Home
    from swarm_cli.bench.codec import FULL, QUICK, bench_codec

    policy = Policy.open(settings.policy.folder(settings.home))
    report = bench_codec(policy, Home(settings.home).bench / "codec", QUICK if quick else FULL, err.print)
    _print(report, json)


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
    require_checkout("bench broadcast", "swarm_cli.bench.broadcast")
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
    report = bench_broadcast(size, err.print)
    _print(report, json)


@app.command()
def staleness(
    presets: Annotated[
        list[str] | None,
        typer.Option(
            help="Objective, as in `swarm objectives list`, with options as in opsm:delta=0.5, or with +ess; "
            "repeatable.",
            show_default="a dozen",
        ),
    ] = None,
    lags: Annotated[
        list[str] | None,
        typer.Option(help="Versions, or a mixture like 0+16+64; repeatable.", show_default="0 1 16 64 256"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Paired runs of each.", min=1, show_default="5")] = None,
    rates: Annotated[
        list[float] | None,
        typer.Option(help="Learning rates to choose from; repeatable.", show_default="1e-4 2e-4 4e-4"),
    ] = None,
    mismatch: Annotated[
        str, typer.Option(metavar="[none|bf16|int8|noise]", help="How the engine differs from the trainer.")
    ] = "none",
    only: Annotated[
        str | None, typer.Option(metavar="[lags|swarm]", help="One experiment.", show_default="both")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Little work: only shows that it runs.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All of it; the default.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture there.", show_default=False)] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """What stale and foreign rollouts cost, and which objective copes: two hours on two cores.

    Finished runs are kept in the home: a second start does what is missing. Exit codes: 0 measured, 1 a run
    failed, 2 wrong input.
    """
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    require_checkout("bench staleness", "swarm_cli.bench.staleness")
    settings = resolve(None, None, home)

    from node.state.paths import Home
    from swarm_cli.bench.staleness import plot
    from swarm_cli.bench.staleness.bench import FULL, QUICK, bench_staleness

    size = _cut(QUICK if quick else FULL, presets, lags, seeds, rates, mismatch, only)
    report = bench_staleness(size, Home(settings.home).bench / "staleness" / "runs.jsonl", err.print)
    if svg is not None and report["lags"] is not None:
        svg.write_text(plot.svg(report["lags"]), encoding="utf-8")
    if json:
        write_json(report)
    else:
        if report["lags"] is not None:
            out.print(plot.terminal(report["lags"]))
        out.print(_table(plot.summary(report)))
    if report["failures"]:
        raise typer.Exit(1)


def _cut(
    size: Size,
    presets: list[str] | None,
    lags: list[str] | None,
    seeds: int | None,
    rates: list[float] | None,
    mismatch: str,
    only: str | None,
) -> Size:
    """What of the lab is to be done. Raises ConfigError."""
    import dataclasses

    from protocol.errors import ConfigError
    from swarm_cli.bench.staleness.bench import Size
    from swarm_cli.bench.staleness.lags import parse_lag
    from swarm_cli.bench.staleness.mismatch import Mismatch

    if only not in (None, "lags", "swarm"):
        raise ConfigError(f"--only {only!r} is unknown; it is lags or swarm")
    if mismatch not in list(Mismatch):
        raise ConfigError(f"--mismatch {mismatch!r} is unknown; it is one of {', '.join(Mismatch)}")
    cut = size.lags
    if cut is not None:
        cut = dataclasses.replace(
            cut,
            presets=tuple(presets) if presets else cut.presets,
            lags=tuple(map(parse_lag, lags)) if lags else cut.lags,
            seeds=cut.seeds if seeds is None else seeds,
            learning_rates=tuple(rates) if rates else cut.learning_rates,
            mismatch=Mismatch(mismatch),
        )
    swarm = size.swarm
    if swarm is not None and seeds is not None:
        swarm = dataclasses.replace(swarm, seeds=seeds)
    return Size(cut if only != "swarm" else None, swarm if only != "lags" else None)


@app.command()
def objectives(
    home: HomeOption = None,
    model: Annotated[
        str, typer.Option(help="Policy whose training step is the measure, looked up like policy.path.")
    ] = "smollm2-135m",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny policy, few tokens: only shows that it runs.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """What each objective costs, against a training step: two minutes.

    Without that policy on this machine (`swarm model get`), milliseconds alone. Exit codes: 0 measured, 1 one
    costs more than a tenth of a step, 2 wrong input.
    """
    from node.rollout.policy import Policy
    from protocol.errors import ConfigError
    from swarm_cli.bench.objectives import FULL, QUICK, bench_objectives

    settings = resolve(None, None, home, policy__path=TINY_POLICY if quick else model)
    try:
        policy = Policy.open(settings.policy.folder(settings.home))
    except ConfigError as error:
        err.print(f"{error}; objectives are not held against a step")
        policy = None
    report = bench_objectives(policy, QUICK if quick else FULL, err.print)
    if json:
        write_json(report)
    else:
        rows = report.pop("objectives")
        out.print(_table(report | rows))
    if report["passed"] is False and not quick:
        raise typer.Exit(1)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long, once all nodes train.", min=1.0)] = 30.0,
    json: JsonOption = False,
) -> None:
    """Real nodes through kills, a full disk and a wrong clock: what is lost, and what of them grows.

    Exit codes: 0 all was kept, 1 a node ended by itself, lost or did twice what it must not, or grows,
    2 wrong input.
    """
    require_checkout("bench soak", "swarm_cli.bench.soak")
    from swarm_cli.bench.soak.bench import bench_soak
    from swarm_cli.demo.processes import signals_interrupt

    with signals_interrupt():
        report = bench_soak(60.0 * minutes, err.print)
    _print(report, json)
    if not report["passed"]:
        raise typer.Exit(1)


def _print(report: dict[str, Any], json: bool) -> None:
    if json:
        write_json(report)
    else:
        out.print(_table(report))


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
