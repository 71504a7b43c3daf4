"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from node.config import NodeConfig

__all__ = ["ConfigFiles", "HomeOption", "JsonOption", "Settings", "parse_settings", "resolve"]

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="TOML file or profile of configs/; later ones win.", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="One key, e.g. train.learning_rate=1e-4.", show_default=False),
]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of key, charter and runs [SWARM_HOME].", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def parse_settings(settings: list[str] | None) -> dict[str, str]:
    """The `--set key=value` options by dotted key. Raises ConfigError."""
    values: dict[str, str] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} is not of the form key=value")
        values[key.strip()] = value
    return values


def resolve(
    files: list[Path] | None, settings: list[str] | None, home: Path | None = None, **flags: Any
) -> NodeConfig:
    """The configuration from `--config`, `--set` and flags given as dotted keys (`train__steps=3`)."""
    from node.config import load_config

    overrides: dict[str, Any] = dict(parse_settings(settings))
    if home is not None:
        overrides["home"] = home
    overrides.update({key.replace("__", "."): value for key, value in flags.items() if value is not None})
    return load_config(files or [], overrides)
