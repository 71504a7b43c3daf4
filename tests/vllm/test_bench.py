"""`swarm bench rollout --quick` from end to end, with a bundled policy."""

from __future__ import annotations

import json
import math

import typer
from typer.testing import CliRunner

from swarm_cli.commands import bench

SAID = (
    "engine",
    "model",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "ratio",
    "partial_speedup",
    "update_stall_s",
    "parity_max_abs",
)


def test_quick_rollout_bench_is_one_json_object() -> None:
    app = typer.Typer()
    app.add_typer(bench.app, name="bench")
    result = CliRunner().invoke(app, ["bench", "rollout", "--quick", "--json", "--model", "models/starling"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert all(name in report for name in SAID)
    assert report["engine"] == "vllm"
    assert report["ratio"] > 0
    assert report["partial_speedup"] > 0
    assert 0 < report["update_stall_s"] < 2
    assert report["parity_max_abs"] < 1e-3 < report["update_moves"], "the patch arrived"
    assert set(report["in_flight_cost_s"]) == {"continue", "recompute", "recycle"}
    assert all(math.isfinite(cost_s) for cost_s in report["in_flight_cost_s"].values())
    assert "starting bare vLLM" in result.stderr
