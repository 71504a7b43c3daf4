"""`swarm monitor`: watch running nodes, a run directory, or the recording of a run.

Only finds out where the events come from; `swarm_cli.dashboard` does the rest, and is imported when it is
needed.
"""

from __future__ import annotations

import difflib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.state.paths import Home, RunDir, default_home
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from swarm_cli.dashboard.feed import Feed

__all__ = ["choose_feeds", "monitor"]


def monitor(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NODE]...", help="Names of running nodes; all of this home if none."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Follow the metrics.jsonl of a run directory instead.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="Show a recorded metrics.jsonl instead.")
    ] = None,
    speed: Annotated[
        float,
        typer.Option("--speed", min=0.0, help="Replay so many times as fast as it was; 0: its end at once."),
    ] = 0.0,
    home: Annotated[
        Path | None,
        typer.Option("--home", help="Home of the nodes; $SWARM_HOME or the user data directory if none."),
    ] = None,
) -> None:
    """Watch nodes in the terminal: learning, stages, peers, every judged rollout. Read-only; q quits."""
    if not sys.stdout.isatty():
        raise ConfigError("`swarm monitor` draws on a terminal and stdout is none; use `swarm status --json`")
    feeds = choose_feeds(nodes or (), run_dir=run_dir, replay=replay, speed=speed, home=home)
    from swarm_cli.dashboard.app import MonitorApp

    MonitorApp(feeds).run()


def choose_feeds(
    nodes: Sequence[str],
    *,
    run_dir: Path | None = None,
    replay: Path | None = None,
    speed: float = 0.0,
    home: Path | None = None,
) -> list[Feed]:
    """The feeds that the arguments name. Raises ConfigError where they name nothing, or more than one
    source."""
    from swarm_cli.dashboard.feed import FileFeed, ReplayFeed, SocketFeed

    if sum((bool(nodes), run_dir is not None, replay is not None)) > 1:
        raise ConfigError("node names, --run-dir and --replay exclude each other; give one of them")
    if replay is not None:
        return [ReplayFeed(_existing(replay), speed=speed)]
    if run_dir is not None:
        return [FileFeed(_existing(RunDir(run_dir).metrics), label=run_dir.resolve().name)]
    folder = Home(home or default_home()).sockets
    if nodes:
        return [SocketFeed(_named(name, folder)) for name in nodes]
    sockets = [path for path in sorted(folder.glob("*.sock")) if _is_served(path)]
    if not sockets:
        raise ConfigError(
            f"no node is running here (no live socket in {folder}); start one with `swarm run`, "
            "or look at a recording with --replay metrics.jsonl"
        )
    return [SocketFeed(path) for path in sockets]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; a run writes <run directory>/metrics.jsonl")
    return path


def _named(name: str, folder: Path) -> Path:
    """Socket of the node `name`; `name` may also be the path of a socket."""
    path = Path(name) if "/" in name else folder / f"{name}.sock"
    if path.exists():
        return path
    known = sorted(found.stem for found in folder.glob("*.sock"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known) or 'none'}"
    raise ConfigError(f"no node {name!r} has a socket at {path}; {hint}")


def _is_served(path: Path) -> bool:
    """False for the socket of a node that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
