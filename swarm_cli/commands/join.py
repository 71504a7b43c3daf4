"""`swarm join <address>`: fetch the charter from a node of a swarm, check it, and run a node in it."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from protocol.errors import ConfigError
from swarm_cli.commands.consent import agree
from swarm_cli.commands.model import fetch_missing
from swarm_cli.commands.run import (
    Joining,
    NameOption,
    StepsOption,
    TrustOption,
    YesOption,
    run_here,
)
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import err

__all__ = ["join"]


def join(
    address: Annotated[str, typer.Argument(help="Multiaddr of any node: /ip4/…/tcp/…/p2p/12D3KooW…")],
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    name: NameOption = None,
    steps: StepsOption = None,
    yes: YesOption = False,
    trust: TrustOption = None,
    json: JsonOption = False,
) -> None:
    """Run a node in the swarm that the node at ADDRESS belongs to. Shows what that means, and asks."""
    resolved = resolve(config, setting, home, name=name, train__steps=steps)
    if resolved.network.transport != "hivemind":
        raise ConfigError(f"network.transport is {resolved.network.transport!r}; joining needs 'hivemind'")
    from node.transport import peer_id_of

    peer_id_of(address)
    fetch_missing(resolved)
    err.print(f"asking {address} for its charter")
    bootstraps = tuple(dict.fromkeys((address, *resolved.network.bootstraps)))
    network = resolved.network.model_copy(update={"bootstraps": bootstraps})
    agreed = functools.partial(agree, trusted=trust or (), yes=yes)
    run_here(resolved.model_copy(update={"network": network}), json=json, join=Joining(address, agreed))
