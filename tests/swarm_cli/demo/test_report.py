"""The demo's result, from events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from node.events import PeersSeen, PeerStatus, encode_event
from swarm_cli.demo.report import node_report, print_result, read_events, refusal_lines

NAMES = ("wren", "starling", "starling16")


def report(name: str, **changes: Any) -> dict[str, Any]:
    facts = node_report(name, [])
    facts |= {"peer_id": f"id of {name}", "params": 1_190_000, "steps": 1000, "staleness_mean": 12.3}
    facts |= {"eval_first": 0.123, "eval_last": 0.987}
    facts |= {"groups_local": 4000, "groups_external": 4000, "prompts_shared": 1234}
    return facts | changes


def test_without_events_everything_is_there_and_empty() -> None:
    facts = node_report("ada", [])
    assert (facts["name"], facts["steps"], facts["eval_last"], facts["by_peer"]) == ("ada", 0, None, {})


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    line = encode_event(PeersSeen(at=1, peers=()))
    (tmp_path / "metrics.jsonl").write_bytes(line + line[:10])
    assert len(read_events(tmp_path / "metrics.jsonl")) == 1
    assert read_events(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("columns", [100, 120])
def test_the_table_fits(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Console(width=columns), [report(name) for name in NAMES], 123.4)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for name in NAMES:  # one row a node, nothing wrapped or cut
        (row,) = [line for line in lines if line.split()[:1] == [name]]
        assert row.split()[1:] == [
            "1.19", "M", "1000", "0.123", "0.987", "+0.864", "4000", "4000", "1234", "12.3"
        ]  # fmt: skip


def test_a_node_that_was_not_evaluated_has_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Console(width=100), [report("wren", eval_last=None)], 1.0)
    assert " 0.123       -      - " in capsys.readouterr().out


def test_refusals_name_the_peer_and_the_reasons_by_count() -> None:
    rejected = {"reward": 5, "copy": 50, "prompt": 1, "stale": 2, "schema": 1}
    liar = PeerStatus(
        peer_id="id of liar", name="li\x1bar", connected=True, accepted=0, rejected=rejected, trust=0.0,
        policy_version=0, lag=0.0, age_windows=0.0, last_seen_at=0, same_tokenizer=True,
    )  # fmt: skip
    wren = node_report("wren", [PeersSeen(at=1, peers=(liar,))])
    (line,) = refusal_lines([wren])
    assert line == "wren refused 59 of li\ufffdar: copy 50, reward 5, stale 2, prompt 1"
    assert refusal_lines([report("starling")]) == []
