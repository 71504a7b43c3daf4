"""What a swarm has its members run, shown before anything of it does, and whether this machine takes part.

A charter is a stranger's: its tasks are checked against what they may be, tasks with code that is not this
program's have to be trusted by name, and a person is asked. Nothing is written, fetched, opened or imported
before.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import typer

from protocol.errors import ConfigError
from protocol.tasks import FILE, ROWS
from swarm_cli.output import err

if TYPE_CHECKING:
    from protocol.messages import Charter, EnvironmentSpec

__all__ = ["agree", "described"]

BUILT_IN = "reasoning_gym/"


def agree(charter: Charter, *, trusted: Collection[str], yes: bool) -> None:
    """Show what taking part means, and ask unless `yes`. Raises ConfigError for a task that may not be in a
    charter, one with code of others that is not `trusted` by name, no terminal to answer on, or a no."""
    foreign = [spec.name for spec in charter.environments if not spec.name.startswith((BUILT_IN, ROWS))]
    for spec in charter.environments:
        if spec.name.startswith(BUILT_IN):
            _require_allowed(spec)
    for line in described(charter):
        err.print(line)
    if untrusted := [name for name in foreign if name not in trusted]:
        from node.events import inert

        name = inert(untrusted[0], 64)
        whose = "the founder" if name.startswith(FILE) else "a package"
        raise ConfigError(
            f"the task {name} is code of {whose} that is not part of this program; it would run on this "
            f"machine. If you trust it: --trust-environment {name}"
        )
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on whether to take part; --yes takes part unasked")
    if not typer.confirm("take part?", err=True):
        raise ConfigError("not joined, and nothing was kept")


def described(charter: Charter) -> list[str]:
    """What a charter has its members run, line by line; what its founder wrote is made inert."""
    from node.events import inert
    from protocol.charter import swarm_id

    access = "closed" if charter.closed else "open to everybody"
    lines = [
        f"swarm {inert(charter.name, 64)} ({swarm_id(charter)[:12]}), {access}, founded by {charter.founder}",
        f"  groups of {charter.group_size} answers of at most {charter.max_new_tokens} tokens",
    ]
    for spec in charter.environments:
        kind = "code of the founder, " if spec.name.startswith(FILE) else ""
        kind = "questions in a file, " if spec.name.startswith(ROWS) else kind
        pin = f" ({kind}{inert(spec.pin, 19)})" if kind else ""
        lines.append(f"  task {inert(spec.name, 64)} {inert(spec.config, 200)}{pin}")
    lines += [f"  model {inert(model.name, 64)} ({model.digest[:12]})" for model in charter.models]
    return lines


def _require_allowed(spec: EnvironmentSpec) -> None:
    from node.environment.answers import ANSWER_KEY
    from node.environment.framing import FRAMING_KEY, framing
    from node.environment.schema import checked_config

    try:
        config = msgspec.json.decode(spec.config, type=dict[str, object])
    except msgspec.MsgspecError:
        raise ConfigError(f"the configuration of {spec.name} in the charter is no JSON object") from None
    config.pop(ANSWER_KEY, None)
    config.pop(FRAMING_KEY, None)
    framing(spec)
    checked_config(spec.name.removeprefix(BUILT_IN), config)
