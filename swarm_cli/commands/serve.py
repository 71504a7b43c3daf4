"""`swarm serve`: the node's current policy behind an OpenAI-compatible endpoint, until Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_cli.commands.run import NameOption
from swarm_cli.options import ConfigFiles, HomeOption, Settings, resolve
from swarm_cli.output import err

if TYPE_CHECKING:
    from node.config import NodeConfig

__all__ = ["serve"]


def serve(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    name: NameOption = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Run whose checkpoints are served.", show_default=False)
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Serve this folder instead, and follow no run.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key",
            envvar="VLLM_API_KEY",
            help="Clients must send it; needed where others reach the address.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Serve the newest checkpoint of a run to OpenAI clients, and each newer one as it appears.

    Model names: <name> is always the newest, <name>-v<version> exactly that one. Needs vLLM.
    """
    resolved = _of_the_run(config, setting, home, name=name, run=run)
    err.print(
        f"starting to serve {resolved.name}: loading torch, policy and vLLM takes up to a minute on a CPU"
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from node.serve import serve as serve_policy

    serve_policy(
        resolved,
        notice=lambda level, text: err.print(text if level == "info" else f"{level}: {text}"),
        host=host,
        port=port,
        api_key=api_key,
        policy=policy,
    )


def _of_the_run(
    files: list[Path] | None, settings: list[str] | None, home: Path | None, **flags: str | None
) -> NodeConfig:
    """Without `--config`, what the run itself was started with."""
    from node.state.paths import Home

    resolved = resolve(files, settings, home, **flags)
    kept = Home(resolved.home).run(resolved.run).config
    return resolve([kept], settings, resolved.home, **flags) if not files and kept.is_file() else resolved
