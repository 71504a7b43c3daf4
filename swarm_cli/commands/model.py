"""`swarm model`: get a policy to train, or build the tiny ones of the demo.

`get` fetches or copies a model into the home, where `policy.path` finds it by name; `make-tiny` builds the
bundled policies anew. Progress on stderr, one line (or one JSON object) per policy on stdout. The work itself
is `node.models` and `node.rollout.tiny`, imported by the commands, so `swarm --help` stays fast.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from protocol.errors import ConfigError
from swarm_cli.checkout import require_checkout
from swarm_cli.options import HomeOption, JsonOption, resolve
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.models import ModelReport

__all__ = ["app", "fetch_missing"]

DOWNLOAD_S = 3600.0
"""93 MB need 220 kbit/s, a model of 5 GB 11 Mbit/s."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _model() -> None:
    """Policies."""


@app.command("get")
def get_command(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FOLDER|ORG/NAME", help="smollm2-135m, a folder, or a hub id.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Name to keep it under.", show_default=False)
    ] = None,
    home: HomeOption = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=1, help="Seconds that a download may take.")
    ] = DOWNLOAD_S,
    json: JsonOption = False,
) -> None:
    """Fetch a model, check it, and keep it in the home; `policy.path = NAME` then finds it.

    A folder is copied, so that what it becomes later changes nothing here; to use one where it is, give its
    path as policy.path. Only safetensors weights, no code, with a chat template. What is there is not fetched
    again.

    Exit codes: 0 there, 2 it cannot be had or is refused.
    """
    report = _get(what, resolve(None, None, home).home, name=name, deadline_s=deadline_s)
    if json:
        write_json(report)
    else:
        size = f"{report.params:,} parameters, {report.bytes / 1e6:.1f} MB"
        out.print(f"{report.path}: {size}", soft_wrap=True)
        err.print(f"train it with policy.path = {report.name!r}")


def fetch_missing(config: NodeConfig) -> None:
    """Get the configured policy when it is one whose bytes are pinned here and it is not on this machine.
    Raises ConfigError, ModelError."""
    from node.known_models import KNOWN_MODELS

    try:
        config.policy.folder(config.home)
    except ConfigError:
        if config.policy.path not in KNOWN_MODELS:
            raise
        err.print(f"{config.policy.path} is not on this machine yet")
        _get(config.policy.path, config.home)


def _get(what: str, home: Path, *, name: str | None = None, deadline_s: float = DOWNLOAD_S) -> ModelReport:
    from node.models import get_model
    from node.state.paths import Home

    with _progress(SpinnerColumn(), TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=None)

        def notice(text: str) -> None:
            bar.update(task, description=text)
            if bar.disable:
                err.print(text)

        return get_model(what, Home(home), notice, name=name, deadline_s=deadline_s)


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
    require_checkout("model make-tiny", "node.rollout.tiny")
    from node.rollout.tiny import TINY_POLICIES, make_tiny

    known = [spec.name for spec in TINY_POLICIES]
    if name not in [*known, "all"]:
        raise ConfigError(f"unknown tiny policy {name!r}; choose one of {', '.join(known)}, all")
    for policy in known if name == "all" else [name]:
        with _progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar:
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


def _progress(*columns: ProgressColumn) -> Progress:
    """A bar on stderr; silent where stderr is not a terminal."""
    return Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal)
