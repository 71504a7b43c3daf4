"""`swarm status` against sockets that are served, dead, or silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from node.events import BlobStatus, NodeStarted, PeersSeen, PeerStatus, StagesSeen, StageStatus, WeightsSeen
from node.state.paths import Home
from node.telemetry import SocketSink
from swarm_cli import snapshot
from swarm_cli.commands import status
from swarm_cli.commands.status import weights_line
from swarm_cli.snapshot import read_nodes, summary
from tests.swarm_cli.conftest import Swarm

STAGES = ("rollout", "verify", "share", "weight", "train", "broadcast")
WAITS = tuple(
    StageStatus(stage=stage, queued=1, capacity=4, waiting_for=f"wait of {stage}", waiting_s=1.5)
    for stage in STAGES
)

PEERS = tuple(
    PeerStatus(
        peer_id=f"12D3KooW{name}", name=name, connected=name == "bob", accepted=0, rejected={}, trust=0.5,
        policy_version=0, lag=0.0, age_windows=0.0, last_seen_at=0, same_tokenizer=True,
        frozen=name == "eve", answered_at=5000,
    )
    for name in ("bob", "eve", "zoe")
)  # fmt: skip


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    return Home(tmp_path / "home").create().sockets


def dead(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


@contextlib.asynccontextmanager
async def served(path: Path, *, waits: bool = True) -> AsyncIterator[Path]:
    sink = SocketSink(path)
    await sink.start()
    if waits:
        sink(
            NodeStarted(
                at=1000,
                name=path.stem,
                peer_id="12D3KooWx",
                swarm="demo",
                swarm_id="a" * 64,
                addresses=(),
                model="/m/wren",
                params=1,
                engine="transformers",
                sandbox="strong",
                run_dir="/r",
            )
        )
        sink(PeersSeen(at=50_000, peers=PEERS))
        sink(StagesSeen(at=50_000, stages=WAITS))
    try:
        yield path
    finally:
        await sink.close()


async def test_every_wait_is_told_with_its_name(sockets: Path) -> None:
    async with served(sockets / "ada.sock") as path:
        (view,) = await read_nodes([path])
    facts = summary(view)
    assert (facts["name"], facts["state"], facts["uptime_s"]) == ("ada", "running", 49.0)
    assert [(wait.stage, wait.waiting_for) for wait in facts["stages"]] == [
        (stage, f"wait of {stage}") for stage in STAGES
    ]


async def test_dead_sockets_cost_no_time(sockets: Path) -> None:
    paths = [dead(sockets / f"dead{number}.sock") for number in range(20)]
    began_s = time.monotonic()
    async with served(sockets / "ada.sock") as path:
        views = await read_nodes([*paths, path, sockets / "never.sock"])
    assert [view.name for view in views] == ["ada"]
    assert time.monotonic() - began_s < snapshot.READ_S / 2


async def test_a_node_that_says_nothing_yet_is_starting(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "READ_S", 0.05)
    async with served(sockets / "ada.sock", waits=False) as path:
        (view,) = await read_nodes([path])
    assert (summary(view)["name"], summary(view)["state"]) == ("ada", "starting")


async def test_bytes_that_are_no_events_are_skipped(sockets: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no event\n" + b"\xff" * 100)
        writer.close()

    path = sockets / "odd.sock"
    async with await asyncio.start_unix_server(answer, str(path)):
        (view,) = await read_nodes([path])
    assert view.malformed == 1


def test_without_a_node_status_says_how_to_start_one(swarm: Swarm, sockets: Path) -> None:
    dead(sockets / "gone.sock")
    ended = swarm("status")
    assert (ended.code, ended.out) == (1, "")
    assert "start one with: swarm run" in ended.err
    ended = swarm("status", "--json")
    assert (ended.code, json.loads(ended.out)) == (1, [])


async def test_the_table_shows_stages_and_waits(sockets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(sockets / "ada.sock") as path:
        (view,) = await read_nodes([path])
    status.show(summary(view))
    shown = capsys.readouterr().out
    assert "ada  v0  1 peer  up 49 s" in shown
    assert "frozen: eve is linked and answered 45 s ago" in shown
    assert summary(view)["peers_frozen"] == 1
    for stage in STAGES:
        assert f"wait of {stage}" in shown


@pytest.mark.parametrize(
    ("role", "changes", "line"),
    [
        ("trainer", {}, "published v7, 2 followers; weights in 0.0 MB, out 2.5 MB"),
        (
            "trainer",
            {"policy_version": -1, "followers": 1},
            "published nothing yet, 1 follower; weights in 0.0 MB, out 2.5 MB",
        ),
        ("follower", {}, "follows 12D3KooWx at v7, 2 behind; weights in 0.0 MB, out 2.5 MB"),
        (
            "follower",
            {"policy_version": -1, "blobs": (BlobStatus(chunks=9, have=4, peers=1, bytes_per_s=1.0),)},
            "follows 12D3KooWx at no version yet, fetching 4/9 chunks; weights in 0.0 MB, out 2.5 MB",
        ),
        ("follower", {"owner": ""}, "follows nobody; weights in 0.0 MB, out 2.5 MB"),
    ],
)
def test_how_weights_travel_in_one_line(role: str, changes: dict[str, Any], line: str) -> None:
    fields: dict[str, Any] = {
        "at": 1,
        "owner": "12D3KooWx",
        "policy_version": 7,
        "head": 9,
        "followers": 2,
        "sent_bytes": 2_500_000,
        "received_bytes": 0,
    }
    assert weights_line(role, WeightsSeen(**(fields | changes))) == line
