"""`swarm objectives list`, and the quick form of its bench."""

from __future__ import annotations

import json

import pytest

from swarm_cli.bench.objectives import BAR, QUICK, bench_objectives
from tests.swarm_cli.conftest import Swarm


def test_the_list_says_what_is_reconstructed(swarm: Swarm) -> None:
    ended = swarm("objectives", "list", "--json")
    assert ended.code == 0
    listed = json.loads(ended.out)
    rows = {row["name"]: row for row in listed if row["kind"] == "objective"}
    advantages = {row["name"]: row["evidence"] for row in listed if row["kind"] == "advantage"}
    assert advantages["rloo"] == "EXACT"
    assert advantages["gapo"] == "CORE"
    assert rows["ais"]["evidence"] == "RECONSTRUCTED"
    assert rows["dppo_tv"]["evidence"] == "EXACT"
    assert rows["dppo_tv"]["options"] == {
        "delta_low": 0.2,
        "delta_high": 0.2,
        "cap": 20.0,
        "kl_tau": 0.0,
        "aggregation": "token_mean",
    }
    assert rows["copris"]["needs"] == ["snapshot"]
    assert "2511.05589" in rows["copris"]["source"]
    assert rows["opsm"]["required"] == ["delta"]
    assert "L_t = " in rows["gspo"]["description"] or "L = " in rows["gspo"]["description"]
    assert {row["for"] for row in rows.values()} == {"own groups", "other models"}


def test_the_table_has_a_row_for_each(swarm: Swarm) -> None:
    ended = swarm("objectives", "list")
    assert ended.code == 0
    first_words = [line.split()[0] for line in ended.out.splitlines() if line.split()]
    names = [row["name"] for row in json.loads(swarm("objectives", "list", "--json").out)]
    assert set(names) <= set(first_words)
    assert "option" in ended.out  # opsm must be given one
    assert "RECONSTRUCTED" in ended.out


@pytest.mark.slow
def test_the_bench_measures_every_preset_without_a_policy() -> None:
    report = bench_objectives(None, QUICK, lambda text: None)
    assert (report["step_s"], report["second_pass_share"], report["passed"]) == (None, None, None)
    assert len(report["objectives"]) >= 40
    assert report["plain_ms"] > 0
    assert all(row["ms"] > 0 and row["share_of_step"] is None for row in report["objectives"].values())
    assert report["worst"] in report["objectives"]


@pytest.mark.slow
def test_the_bench_holds_them_against_a_step(swarm: Swarm) -> None:
    ended = swarm("bench", "objectives", "--quick", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["bar"] == BAR
    assert report["step_s"] > 0
    assert report["second_pass_share"] > 0
    row = report["objectives"]["sat"]
    assert row["share_of_step"] == pytest.approx(row["overhead_ms"] / 1e3 / report["step_s"], rel=1e-2)
    assert row["whole_batch"]
    assert not report["objectives"]["dppo_tv"]["whole_batch"]
