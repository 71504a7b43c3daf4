"""`swarm plan --model M --gpu GIB`: how a model would be trained on a GPU, without the GPU or its weights.

The planner is the one of a run (`node/open/memory.py`), with the profile that belongs to such a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm_cli.output import out, write_json

__all__ = ["facts_and_plan", "plan_model"]

SMALL_GIB = 16
"""GPUs below this have the profile of 8 GB."""


def plan_model(model: str, gpu_gib: float, tokens: int, *, json: bool) -> bool:
    """Print the plan; whether there is one. Raises ModelError."""
    from node.open.memory import BudgetError

    try:
        facts, plan = facts_and_plan(model, gpu_gib, tokens)
    except BudgetError as error:
        said, *table = str(error).splitlines()
        if json:
            write_json({"model": model, "gpu_gib": gpu_gib, "fits": False, "why": said})
        else:
            out.print("\n".join([f"{model} does not fit: {said}", *table]), soft_wrap=True)
        return False
    way = plan.way
    if json:
        parts = [{"owner": part.owner, "name": part.name, "bytes": part.size_bytes} for part in plan.parts]
        write_json(
            {"model": model, "gpu_gib": gpu_gib, "fits": True, "params": facts.params}
            | {"tuning": way.tuning, "optimiser": way.optimiser, "sharing": way.sharing}
            | {"recompute": way.recompute, "tokens_a_pass": way.micro_batch_tokens}
            | {"rollouts": way.rollouts, "total_bytes": plan.total_bytes, "parts": parts}
        )
    else:
        out.print(f"{model}: {facts.params / 1e6:.0f} M parameters, answers of up to {tokens} tokens")
        out.print("\n".join(plan.lines()), soft_wrap=True)
    return True


def facts_and_plan(model: str, gpu_gib: float, tokens: int) -> tuple[Any, Any]:
    """`ModelFacts` and `MemoryPlan` by the profile of such a GPU, in a swarm with groups of eight and answers
    of `tokens`. Raises ModelError, BudgetError."""
    from node.config import load_config
    from node.open.architectures import facts_of
    from node.open.charter import inspect_charter
    from node.open.estimate import GIB, Wishes
    from node.open.machine import Machine
    from node.open.memory import plan_memory
    from node.train.objectives import open_objective

    profile = "gpu-8gb.toml" if gpu_gib < SMALL_GIB else "gpu-24gb.toml"
    config = load_config([Path(profile)])
    _, charter = inspect_charter(config)
    facts = facts_of(model)
    needs = open_objective(config.train.objective, config.train.objective_options).needs
    wishes = Wishes.of(config, charter, facts, "cuda", frozenset(needs))
    row_tokens = wishes.row_tokens - charter.max_new_tokens + tokens
    rows = wishes.step_tokens // wishes.row_tokens
    wishes = replace(wishes, row_tokens=row_tokens, step_tokens=rows * row_tokens)
    size = int(gpu_gib * GIB)
    return facts, plan_memory(facts, Machine("cuda", f"a GPU of {gpu_gib:g} GiB", size, size), wishes)
