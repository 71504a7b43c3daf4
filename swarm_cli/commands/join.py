"""`swarm join <address>`: fetch the charter from a node of a swarm, check it, and run a node in it."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm_cli.commands.run import run_here
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err

__all__ = ["join"]


def join(
    address: Annotated[str, typer.Argument(help="Multiaddr of any node: /ip4/…/tcp/…/p2p/12D3KooW…")],
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    name: Annotated[str | None, typer.Option(help="Name shown to others.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    json: JsonOption = False,
) -> None:
    """Join the swarm that the node at ADDRESS belongs to."""
    resolved = resolve(config, setting, home, name=name, train__steps=steps)
    err.print(f"asking {address} for its charter")
    from node.main import fetch_charter_from

    path = fetch_charter_from(address, resolved)
    bootstraps = tuple(dict.fromkeys((address, *resolved.network.bootstraps)))
    network = resolved.network.model_copy(update={"bootstraps": bootstraps})
    run_here(resolved.model_copy(update={"network": network, "charter": str(path)}), json=json)
