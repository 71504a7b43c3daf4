"""The demo's result, from events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from node.events import (
    NodeStarted,
    PeersSeen,
    PeerStatus,
    StepDone,
    VersionReached,
    WeightsSeen,
    encode_event,
)
from swarm_cli.demo.report import follower_report, node_report, print_result, read_events, refusal_lines

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


def step(followers: int, staleness: float) -> StepDone:
    numbers = dict.fromkeys((f.name for f in msgspec.structs.fields(StepDone) if f.type in (int, float)), 0)
    numbers |= {"skipped": False, "sources": ()}
    return StepDone(**(numbers | {"groups_followers": followers, "staleness_followers": staleness}))


def test_staleness_of_followers_is_a_mean_over_their_groups() -> None:
    """(3 * 2 + 1 * 6) / 4."""
    facts = node_report("wren", [step(3, 2.0), step(0, 0.0), step(1, 6.0)])
    assert (facts["groups_followers"], facts["staleness_followers"]) == (4, 3.0)
    assert node_report("wren", [])["staleness_followers"] == 0.0


def test_a_follower_is_shown_with_what_became_of_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    peer = {"name": "f", "accepted": 5, "rejected": {}, "trained": 4, "trust": 0.5}
    owner = report("wren", by_peer={"id of f": peer}, groups_followers=4, staleness_followers=2.25)
    events = [
        started("f"),
        VersionReached(at=1, owner="id of wren", policy_version=7, digest="a" * 64, apply_s=0.1),
        WeightsSeen(
            at=2,
            owner="id of wren",
            policy_version=7,
            head=8,
            followers=2,
            sent_bytes=1_000_000,
            received_bytes=2_500_000,
        ),
    ]
    facts = follower_report("f", events, [owner])
    assert (facts["version"], facts["accepted"], facts["trained"], facts["digest"]) == (7, 5, 4, "a" * 64)
    print_result(Console(width=100), [owner], 1.0, [facts])
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.strip().startswith("f "))
    assert row.split() == ["f", "wren", "v7", "0", "5", "4", "2.5", "MB", "1.0", "MB"]
    assert "wren trained on 4 groups of its followers, 2.2 versions behind on average" in out


def test_a_follower_that_reached_nothing() -> None:
    facts = follower_report("f", [], [report("wren")])
    assert (facts["version"], facts["owner"], facts["groups_generated"]) == (-1, "", 0)


def started(name: str) -> NodeStarted:
    return NodeStarted(
        at=0,
        name=name,
        peer_id=f"id of {name}",
        role="follower",
        swarm="s",
        swarm_id="0" * 64,
        addresses=(),
        model="m",
        params=1,
        engine="toy",
        sandbox="",
        run_dir="",
    )
