"""`swarm key new | show`: the one key that is this node's identity. The private part is never printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from swarm_cli.options import HomeOption, JsonOption, resolve
from swarm_cli.output import write_json

if TYPE_CHECKING:
    from node.state.paths import Home

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.command()
def new(home: HomeOption = None, json: JsonOption = False) -> None:
    """Create the identity key (mode 0600); refuses to overwrite one."""
    from node.state.keys import create_key

    place = _home(home).create()
    _tell(create_key(place.key).peer_id, str(place.key), json)


@app.command()
def show(home: HomeOption = None, json: JsonOption = False) -> None:
    """Show the peer id of this node's key."""
    from node.state.keys import load_key

    place = _home(home)
    _tell(load_key(place.key).peer_id, str(place.key), json)


def _home(home: HomeOption) -> Home:
    from node.state.paths import Home

    return Home(resolve(None, None, home).home)


def _tell(peer_id: str, path: str, json: bool) -> None:
    if json:
        write_json({"peer_id": peer_id, "path": path})
    else:
        typer.echo(f"{peer_id}  ({path})")
