"""`swarm run`: one node in the foreground, until its steps are done or Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.state.paths import Home
from protocol.errors import AddressError
from swarm_cli.commands.consent import agree
from swarm_cli.commands.model import fetch_missing
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err, write_json

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.events import Event
    from protocol.messages import Charter

__all__ = ["Joining", "NameOption", "StepsOption", "TrustOption", "YesOption", "run", "run_here"]

NameOption = Annotated[str | None, typer.Option("--name", help="Name shown to others.", show_default=False)]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Optimiser steps.", show_default=False)]
YesOption = Annotated[bool, typer.Option("--yes", help="Take part in a swarm without being asked.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-environment",
        help="A task of another package that may run here; repeatable.",
        show_default=False,
    ),
]


def run(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    name: NameOption = None,
    steps: StepsOption = None,
    yes: YesOption = False,
    trust: TrustOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run a node: generate, verify, share, train. Trains alone until a peer is found. Without a charter it
    joins the swarm of its bootstraps, or founds the one that `swarm charter new` wrote the rules of last."""
    resolved = resolve(config, setting, home, name=name, train__steps=steps)
    if not config and (rules := _drafted(resolved)) is not None:
        err.print(f"founding the swarm of {rules}")
        resolved = resolve([rules], setting, home, name=name, train__steps=steps)
    if dry_run:
        write_json(resolved.model_dump(mode="json"), indent=2)
        return
    fetch_missing(resolved)
    if resolved.charter or not resolved.network.bootstraps or Home(resolved.home).charter.exists():
        run_here(resolved, json=json)
        return
    for address in resolved.network.bootstraps:
        err.print(f"asking {address} for its charter")
        joining = Joining(address, functools.partial(agree, trusted=trust or (), yes=yes))
        try:
            run_here(resolved, json=json, join=joining)
        except AddressError as error:
            err.print(str(error))
        else:
            return
    raise AddressError("no bootstrap answers, and there is no charter of a swarm here yet; try again later")


def _drafted(config: NodeConfig) -> Path | None:
    """The rules that were written last, for a home that is in no swarm and was told of none."""
    home = Home(config.home)
    if config.charter or config.network.bootstraps or home.charter.exists():
        return None
    try:
        rules = Path(home.rules.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return rules if rules.is_file() else None


@dataclass(frozen=True, slots=True)
class Joining:
    """The swarm of the node at `address`, once `agree` has raised nothing for its charter."""

    address: str
    agree: Callable[[Charter], None]


def run_here(config: NodeConfig, *, json: bool, join: Joining | None = None) -> None:
    """Run a node in this process and print its progress; its first and last events as JSON with `json`. With
    `join` in another node's swarm."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from node.main import join_node, run_node
    from swarm_cli.progress import progress_line

    last: dict[str, Any] = {}

    def show(event: Event) -> None:
        line = progress_line(event)
        if line:
            last[type(event).__name__] = event
            with contextlib.suppress(OSError):  # a closed terminal, a full disk behind `2> log`
                err.print(line)

    err.print(f"starting {config.name}: loading torch, policy and sandbox takes some seconds")
    done = join_node(config, join.address, join.agree, show) if join is not None else run_node(config, show)
    last.pop("Notice", None)
    if json:
        write_json(last)
    if not done:
        raise KeyboardInterrupt
