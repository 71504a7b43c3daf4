"""The simulated demo: the real command, twice, with equal metrics; timings (`*_s`) aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.charter import swarm_id
from swarm_cli.demo.plan import DemoOptions, make_plan

pytestmark = pytest.mark.slow

STEPS = 15
DEADLINE_S = 110.0


def simulate(folder: Path, seed: int, *options: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The JSON of `swarm demo --transport memory`, and the events of each node."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "swarm_cli", "demo", "--transport", "memory", "--json"),
            *("--steps", str(STEPS), "--seed", str(seed), "--keep", str(folder)),
            *("--set", "evaluate.prompts_per_task=4", *options),
        ],
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    metrics = {
        node["name"]: [
            json.loads(line)
            for line in (folder / node["name"] / "runs/latest/metrics.jsonl").read_bytes().splitlines()
        ]
        for node in (*result["nodes"], *result["followers"])
    }
    return result, metrics


def without_timings(value: Any) -> Any:
    """The value without what may differ: measured seconds, and the folder of the run."""
    if isinstance(value, dict):
        return {k: without_timings(v) for k, v in value.items() if not k.endswith("_s") and k != "run_dir"}
    return [without_timings(item) for item in value] if isinstance(value, list) else value


@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_metrics_of_nodes_and_followers(tmp_path: Path) -> None:
    """In two processes: nothing hangs on a hash, a clock or an address."""
    options = ("--nodes", "2", "--followers", "2")
    first, first_metrics = simulate(tmp_path / "a", 1, *options)
    again, again_metrics = simulate(tmp_path / "b", 1, *options)
    assert without_timings(again) == without_timings(first)
    assert without_timings(again_metrics) == without_timings(first_metrics)
    for node in first["nodes"]:
        assert node["steps"] == STEPS
        assert node["groups_local"] == 4 * STEPS
    assert any(node["groups_external"] for node in first["nodes"])

    owner = next(node for node in first["nodes"] if node["name"] == "wren")
    assert owner["groups_followers"] > 0
    assert owner["staleness_followers"] > 0
    published = {
        event["policy_version"]: event["digest"]
        for event in first_metrics["wren"]
        if event["type"] == "VersionPublished"
    }
    for follower in first["followers"]:
        assert follower["version"] == STEPS
        assert follower["digest"] == published[STEPS]
        assert follower["accepted"] > 0


def test_another_seed_is_another_swarm(tmp_path: Path) -> None:
    first, second = (make_plan(DemoOptions(seed=seed), tmp_path / str(seed), {}) for seed in (1, 2))
    assert swarm_id(first.charter) != swarm_id(second.charter)
    assert {node.identity.peer_id for node in first.nodes}.isdisjoint(
        node.identity.peer_id for node in second.nodes
    )
    assert {node.config.seed for node in first.nodes}.isdisjoint(node.config.seed for node in second.nodes)
