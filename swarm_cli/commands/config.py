"""`swarm config show | schema | path`: what this node would run with, and where it is written."""

from __future__ import annotations

from typing import Annotated

import typer

from node.state.paths import bundled
from swarm_cli.options import ConfigFiles, HomeOption, Settings, resolve
from swarm_cli.output import write_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.command()
def show(config: ConfigFiles = None, setting: Settings = None, home: HomeOption = None) -> None:
    """Print the resolved configuration as JSON: defaults, files, environment and flags together."""
    write_json(resolve(config, setting, home).model_dump(mode="json"), indent=2)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration; editors complete TOML with it."""
    from node.config import NodeConfig

    write_json(NodeConfig.model_json_schema(), indent=2)


@app.command()
def path(
    home: HomeOption = None,
    profiles: Annotated[bool, typer.Option("--profiles", help="The folder of the bundled profiles.")] = False,
) -> None:
    """Print this node's home folder."""
    where = bundled(".") if profiles else resolve(None, None, home).home
    typer.echo(str(where))
