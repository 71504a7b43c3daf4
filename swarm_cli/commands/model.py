"""`swarm model`: build the tiny policies that the demo and the tests start from.

For: `make-tiny`, with progress on stderr and one line (or one JSON object) per policy on stdout. Not for:
fetching or converting models; any Hugging Face folder is a policy. Torch is imported by the builder, not by
this module, so `swarm --help` stays fast.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from protocol.errors import ConfigError
from swarm_cli.output import err, out, write_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _model() -> None:
    """Policies."""


@app.command("make-tiny")
def make_tiny_command(
    name: Annotated[str, typer.Argument(metavar="[wren|starling|rook|all]", help="Which policy.")] = "all",
    folder: Annotated[
        Path, typer.Option("--out", help="Receives one folder per policy.", file_okay=False)
    ] = Path("configs/models"),
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes on one machine.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per policy on stdout.")] = False,
) -> None:
    """Build Llama-type policies of 0.3, 0.6 and 1.2 M parameters: one to five minutes each on one core.

    Exit codes: 0 built, 2 unknown name.
    """
    from node.rollout.tiny import TINY_POLICIES, make_tiny

    known = [spec.name for spec in TINY_POLICIES]
    if name not in [*known, "all"]:
        raise ConfigError(f"unknown tiny policy {name!r}; choose one of {', '.join(known)}, all")
    for policy in known if name == "all" else [name]:
        with _progress() as bar:
            task = bar.add_task(policy, total=None)
            show = functools.partial(_show, bar, task, policy)
            report = make_tiny(policy, folder, seed, show)
        if as_json:
            write_json(report)
        else:
            mean = sum(share for _, share in report.start_accuracy) / len(report.start_accuracy)
            out.print(
                f"{report.folder}: {report.parameters:,} parameters, {report.bytes / 1e6:.1f} MB, "
                f"held-out accuracy {mean:.2f}"
            )


def _show(bar: Progress, task: TaskID, policy: str, stage: str, done: int, total: int) -> None:
    bar.update(task, description=f"{policy}: {stage}", completed=done, total=total)


def _progress() -> Progress:
    """A bar on stderr; silent where stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=not err.is_terminal,
    )
