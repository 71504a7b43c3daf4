"""`swarm plan --model`: the page that shows plans is what the planner says."""

from __future__ import annotations

import json
from pathlib import Path

from node.open.memory import BudgetError
from swarm_cli.commands.plan_model import facts_and_plan
from tests.swarm_cli.conftest import Swarm

PAGE = Path(__file__).parents[3] / "docs/your-model.md"
GPUS = (8, 12, 24, 80)


def cell(model: str, gib: int) -> str:
    try:
        way = facts_and_plan(model, gib, 1024)[1].way
    except BudgetError:
        return "–"
    tuned = "all weights" if way.tuning == "full" else "LoRA"
    eight = ", 8-bit" if way.optimiser == "adamw_8bit" else ""
    turns = ", by turns" if way.sharing == "sequential" else ""
    return f"{tuned}{eight}{turns}, {way.rollouts} at a time"


def test_the_page_says_what_the_planner_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("<!-- begin plans -->") : page.index("<!-- end plans -->")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "`qwen" in line]
    assert [row[0] for row in rows] == [f"`qwen2.5-{size}`" for size in ("0.5b", "1.5b", "3b", "7b")]
    for name, *cells in rows:
        assert cells == [cell(name.strip("`"), gib) for gib in GPUS]


def test_a_plan_for_a_gpu_that_is_not_here(swarm: Swarm) -> None:
    ended = swarm("plan", "--model", "qwen2.5-1.5b", "--gpu", "8", "--json")
    facts = json.loads(ended.out)
    assert (ended.code, facts["fits"], facts["params"]) == (0, True, 1_543_714_304)
    assert facts["total_bytes"] <= 0.9 * 8 * 2**30
    assert sum(part["bytes"] for part in facts["parts"]) >= facts["total_bytes"]
    ended = swarm("plan", "--model", "qwen2.5-7b", "--gpu", "8")
    assert ended.code == 1
    assert ended.out.startswith("qwen2.5-7b does not fit: this policy needs")
    ended = swarm("plan", "--model", "nothing")
    assert (ended.code, ended.out) == (2, "")
    assert "is none of smollm2-135m" in ended.err
