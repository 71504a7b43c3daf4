"""`swarm objectives list`: the published objectives and advantages a node can train with, and how well each
is known here."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from swarm_cli.options import JsonOption
from swarm_cli.output import out, write_json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _objectives() -> None:
    """Training objectives."""


@app.command("list")
def list_objectives(json: JsonOption = False) -> None:
    """Objectives, then advantages: name, evidence, needs, source, one line. With --json formulas and options.

    EXACT: checked against paper or code. CORE: the formula is known, some constants are ours. RECONSTRUCTED:
    from an abstract or a summary, no claim of fidelity. Names go into train.objective and weight.advantage.
    """
    from node.train.objectives import all_presets
    from node.weight.advantage.registry import ALL_ADVANTAGES

    rows: list[dict[str, Any]] = [
        {
            "kind": "objective",
            "name": each.name,
            "evidence": each.evidence.value,
            "needs": sorted(each.needs),
            "source": each.source,
            "summary": each.summary,
            "description": each.description,
            "options": each.options,
            "required": each.required,
            "peers": each.for_peers,
            "for": "other models" if each.foreign else "own groups",
        }
        for each in all_presets()
    ]
    rows += [
        {
            "kind": "advantage",
            "name": each.name,
            "evidence": each.evidence,
            "needs": [each.needs] if each.needs else [],
            "source": each.source,
            "summary": each.summary,
        }
        for each in ALL_ADVANTAGES
    ]
    if json:
        write_json(rows)
    else:
        out.print(_table(rows))


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich import box

    table = Table("name", "evidence", "needs", "source", "what it is", box=box.SIMPLE_HEAD, pad_edge=False)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        needs = ", ".join([*row["needs"], *(f"option {name}" for name in row.get("required", ()))])
        where = f"{row['source']} (other models)" if row.get("for") == "other models" else row["source"]
        ends = after is not None and after["kind"] != row["kind"]
        table.add_row(row["name"], row["evidence"], needs or "-", where, row["summary"], end_section=ends)
    return table
