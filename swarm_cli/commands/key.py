"""`swarm key new | show | export | import`: the one key that is this node's identity. The private part is
never printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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


@app.command("export")
def export_key(
    file: Annotated[Path, typer.Argument(help="A file that is not there yet.")],
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the identity key into FILE (mode 0600): whoever has it is this node."""
    from node.state.keys import create_key, load_key

    _tell(create_key(file, load_key(_home(home).key)).peer_id, str(file), json)


@app.command("import")
def import_key(
    file: Annotated[Path, typer.Argument(help="A key that `swarm key export` made.")],
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Make the key in FILE this home's identity; refuses to overwrite one."""
    from node.state.keys import create_key, load_key

    identity = load_key(file)
    place = _home(home).create()
    _tell(create_key(place.key, identity).peer_id, str(place.key), json)


def _home(home: HomeOption) -> Home:
    from node.state.paths import Home

    return Home(resolve(None, None, home).home)


def _tell(peer_id: str, path: str, json: bool) -> None:
    if json:
        write_json({"peer_id": peer_id, "path": path})
    else:
        typer.echo(f"{peer_id}  ({path})")
