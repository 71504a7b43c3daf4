"""`swarm env new | check | list`: a task of one's own, from a commented file to a table of its scores."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from protocol.errors import ConfigError
from swarm_cli.options import JsonOption, parse_settings
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from node.open.check import TaskCheck

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

TEMPLATE = '''\
"""{name}: add two numbers. Questions, and what an answer to them is worth.

Try it with   swarm env check {name}.py
Train on it   swarm charter new --model wren --env ./{name}.py
"""

# May reward() run the answer as code (eval, sympy, ...)? Then each answer gets a process of its own.
evaluates_answers = False

# Where in a completion the answer stands: "whole", "last_number", "choice" (A to J), "tags"
# (<answer>...</answer>), "boxed", or "regex:Answer: (.*)". All but "whole" and "regex" tell the model.
answer = "whole"

# Rows come from a function, as here; or from a list of dictionaries:   rows = [{{"question": ...}}, ...]
# or from a file beside this one (.jsonl, .csv, .parquet):             rows = "questions.jsonl"


def row(rng):
    """A row: any dictionary. `rng` is a random.Random; draw from nothing else, for all members of a swarm
    must get the same question."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return {{"question": f"{{a}} + {{b}} =", "answer": a + b}}


def prompt(row):
    """The question of a row. Without this function it is row["question"]."""
    return row["question"]


def reward(answer, row):
    """A number from 0 to 1; or several by name, {{"right": 1.0, "short": 0.5}}, which add up by `weights`.
    Asked only for completions that ended by themselves. The same answer must always get the same reward."""
    return float(answer == str(row["answer"]))


# reward_range = (0.0, 1.0)              # what lies outside counts as a fault of the task, and as 0
# weights = {{"right": 1.0, "short": 0.1}} # of rewards by name; 1 for the others
# def score(completion, row): ...        # instead of reward(): sees completion.text as a whole, and .finished
'''


@app.command()
def new(name: Annotated[str, typer.Argument(help="Of the task; the file is NAME.py, here.")]) -> None:
    """Write a commented task, which works as it is; refuses to overwrite one."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot name a task: letters, digits and _, and no digit first")
    path = Path(f"{name}.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=name))
    except FileExistsError:
        raise ConfigError(f"{path} is there already; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    out.print(f"{path} written; next: swarm env check {path}", soft_wrap=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A task (.py), or rows (.jsonl, .csv, .parquet, a folder).")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="A key of its config, e.g. answer=boxed.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run a task as a node would, behind walls and twice, and show ten of its questions with scores."""
    from node.open.check import check_task

    err.print(f"asking and scoring {file} in two sandboxes")
    report = check_task(file, parse_settings(setting))
    if json:
        write_json(report)
    else:
        _print(report)
    if report.refused:
        raise typer.Exit(ConfigError.exit_code)


def _print(report: TaskCheck) -> None:
    table = Table("question", "for", "answer", "reward")
    for each in report.table:
        reward = "-" if each.reward is None else f"{each.reward:g}"
        use = "evaluation" if each.held_out else "training"
        table.add_row(_inert(each.question, 300), use, _inert(each.answer, 60), reward)
    out.print(table)
    how = "each answer in a process of its own" if report.evaluates_answers else "answers are compared only"
    out.print(
        f"{report.name} ({report.pin[:19]}, {report.bytes} bytes): {report.distinct} different questions of "
        f"512, {report.held_out} of them for evaluation; {how}; {report.question_ms:.2f} ms a question, "
        f"{report.score_ms:.2f} ms an answer; senseless text pays {report.probe.senseless:.2f}, always "
        f"{report.probe.best!r} {report.probe.constant:.2f}",
        soft_wrap=True,
    )
    for text in report.told:
        out.print(f"note: {text}", soft_wrap=True)
    for text in report.refused:
        out.print(f"FAIL: {text}", soft_wrap=True)
    if not report.refused:
        out.print("ok: a swarm can train on it")


@app.command("list")
def list_tasks(
    folder: Annotated[Path, typer.Argument(help="Where tasks in files are looked for.")] = Path(),
    json: JsonOption = False,
) -> None:
    """List all tasks that are known here: built in, installed, and in files of a folder."""
    from node.environment.installed import REASONING_GYM, registered, verifiers_environments
    from node.environment.pack import pack
    from node.environment.schema import known_tasks
    from node.events import inert

    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.py")):
        try:
            text = path.read_text("utf-8")
            if "def reward(" in text or "def score(" in text:
                found[str(path)] = f"a task in a file, {pack(path)[0]}"
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            found[str(path)] = f"cannot be packed: {error}"
    for name, entry in sorted(registered().items()):
        found[name] = f"of the package {entry.dist.name if entry.dist is not None else entry.module}"
    for name, version in sorted(verifiers_environments().items()):
        found[name] = f"an environment of verifiers, version {version}"
    for task in known_tasks():
        found[REASONING_GYM + task] = "built in"
    if json:
        write_json(found)
        return
    for name, what in found.items():
        out.print(f"{inert(name, 100):48} {inert(what, 200)}", soft_wrap=True)


def _inert(text: str, chars: int) -> str:
    from node.events import inert

    return inert(text, chars)
