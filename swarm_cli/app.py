"""The `swarm` command: names every verb and turns errors into one sentence and an exit code.

Heavy imports sit inside the functions that need them, so `swarm --help` starts without torch, pydantic or the
screen. Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 wrong input (config, key, path,
address, charter), 130 interrupted.
"""

from __future__ import annotations

import sys

import typer

from protocol.errors import SwarmError
from swarm_cli.commands import (
    bench,
    charter,
    config,
    demo,
    doctor,
    env,
    join,
    key,
    model,
    monitor,
    objectives,
    plan,
    run,
    serve,
    status,
)

__all__ = ["app", "main"]

INTERRUPTED = 130
DEVELOPERS = "Measuring and planning"
"""Panel of `swarm --help` that comes after the commands of a user."""

app = typer.Typer(
    name="swarm",
    help="Train language models by reinforcement learning on a swarm of unequal machines.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What a user does, in the order of a first week.
app.command()(demo.demo)
app.command()(join.join)
app.command()(run.run)
app.command()(monitor.monitor)
app.command()(status.status)
app.command()(doctor.doctor)
app.command()(serve.serve)
app.add_typer(model.app, name="model", help="Policies: get, build.")
app.add_typer(env.app, name="env", help="Tasks of your own: new, check, list.")
app.add_typer(charter.app, name="charter", help="The rules of a swarm: new, check, show.")
app.add_typer(config.app, name="config", help="Configuration: show, schema, path.")
app.add_typer(key.app, name="key", help="This node's identity.")

# What those need who work on the code, or tune a swarm.
app.command(rich_help_panel=DEVELOPERS)(plan.plan)
app.add_typer(
    objectives.app, name="objectives", help="What a node can train with: list.", rich_help_panel=DEVELOPERS
)
app.add_typer(
    bench.app, name="bench", help="Measure, against a baseline in the same run.", rich_help_panel=DEVELOPERS
)


def main() -> None:
    """Entry point. Returns through `sys.exit`."""
    try:
        app(prog_name="swarm")
    except SwarmError as error:
        from node.events import inert

        # One line, whatever the network's daemon wrote, and harmless, whatever a peer wrote.
        sys.stderr.write(f"swarm: {inert(' '.join(str(error).split()))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _leave_interrupted()
    except Exception as error:
        _leave_with_story(error)
    except SystemExit as end:  # typer makes one of a KeyboardInterrupt, without a word
        if end.code == INTERRUPTED:
            _leave_interrupted()
        raise


def _leave_with_story(error: Exception) -> None:
    """One line for the user, and everything that we need to mend it in a file."""
    import tempfile
    import traceback

    from node.events import inert

    words = inert(" ".join(f"{type(error).__name__}: {error}".split()), 500)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="swarm-bug-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        story = f"the whole story is in {file.name}"
    except OSError as full:
        story = f"and its story could not be written ({full.strerror})"
    sys.stderr.write(f"swarm: {words}. This is a bug of ours, or a fault that we did not think of; {story}\n")
    sys.exit(1)


def _leave_interrupted() -> None:
    sys.stderr.write("swarm: interrupted\n")
    sys.exit(INTERRUPTED)
