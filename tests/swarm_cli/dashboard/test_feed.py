"""Feeds: lines to views, from a file, a replay and a real Unix socket; what is no event is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.events import Event, Notice, encode_event
from node.telemetry import SocketSink
from swarm_cli.dashboard.feed import OVERLONG, FileFeed, LineSplitter, ReplayFeed, SocketFeed, read_event
from swarm_cli.dashboard.view import Link, NodeView
from tests.swarm_cli.dashboard.make_sample import SAMPLE, STEPS, sample_bytes, sample_events, stopped_event

SECONDS_TO_WAIT = 5.0


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until `condition` holds; real sockets need a moment."""
    async with asyncio.timeout(SECONDS_TO_WAIT):
        while not condition():  # noqa: ASYNC110 - a real socket tells nobody when it has been read
            await asyncio.sleep(0.001)


@pytest.fixture
def events() -> Iterator[Event]:
    return sample_events()


def notice(text: str, at: int = 1) -> Notice:
    return Notice(at=at, level="info", text=text)


def test_the_stored_sample_is_what_its_generator_makes() -> None:
    assert SAMPLE.read_bytes() == sample_bytes()


def test_lines_come_out_whole_however_they_are_cut() -> None:
    data = b"one\ntwo\n\nthree\nrest"
    for size in range(1, len(data) + 1):
        splitter = LineSplitter()
        lines = [line for at in range(0, len(data), size) for line in splitter.split(data[at : at + size])]
        assert lines == [b"one", b"two", b"three"]
        assert splitter.split(b"\n") == [b"rest"]


def test_a_line_that_is_too_long_is_thrown_away_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_cli.dashboard.feed.MAX_LINE_BYTES", 10)
    splitter = LineSplitter()
    assert splitter.split(b"ok\n" + b"x" * 11) == [b"ok"]
    assert splitter.split(b"y" * 50) == []
    assert splitter.split(b"end of it\nnext\n") == [OVERLONG, b"next"]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        OVERLONG,
        b"null",
        b"[]",
        b"{}",
        b'{"type":"Unknown","at":1}',
        b'{"type":"Notice","at":1}',
        b'{"type":"Notice","at":"1","level":"info","text":"x"}',
        b'{"type":"Notice","at":1,"level":"info","text":"\xff"}',
        b'{"type":"Notice","at":1e999,"level":"info","text":"x"}',
        b'{"type":"Notice","at":1,"level":"info","text":"x","more":' + b"[" * 100_000,
    ],
)
def test_what_is_no_event_is_none(line: bytes) -> None:
    assert read_event(line) is None


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_read_without_an_error(line: bytes) -> None:
    read_event(line)


async def test_a_replay_at_once_shows_its_end() -> None:
    feed = ReplayFeed(SAMPLE)
    await feed.run()
    assert feed.view.link is Link.ENDED
    assert feed.view.policy_version == STEPS
    assert feed.view.malformed == 0


async def test_a_replay_counts_bad_lines_and_reads_a_last_line_without_newline(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b"garbage\n" + encode_event(notice("a")) + b"\xff\n" + encode_event(notice("b")).rstrip()
    )
    for speed in (0.0, 1000.0):
        feed = ReplayFeed(path, speed=speed)
        await feed.run()
        assert [n.text for n in feed.view.notices] == ["a", "b"]
        assert feed.view.malformed == 2


async def test_a_replay_with_a_speed_waits_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(encode_event(notice(str(at), at)) for at in (1000, 3000, 3000, 4000, 900_000)))
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("swarm_cli.dashboard.feed.asyncio.sleep", sleep)
    await ReplayFeed(path, speed=4.0).run()
    assert waits == [0.5, 0.25, 5.0]


async def test_a_growing_file_is_followed_and_a_replaced_one_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    feed = FileFeed(path, follow_s=0.001)
    task = asyncio.create_task(feed.run())
    await asyncio.sleep(0)
    assert feed.view.link is Link.CONNECTING
    path.write_bytes(encode_event(notice("one")) + encode_event(notice("two"))[:10])
    await until(lambda: len(feed.view.notices) == 1)
    assert feed.view.link is Link.LIVE
    with path.open("ab") as file:
        file.write(encode_event(notice("two"))[10:])
    await until(lambda: len(feed.view.notices) == 2)
    path.write_bytes(encode_event(notice("3")))
    await until(lambda: len(feed.view.notices) == 3)
    assert feed.view.malformed == 0
    task.cancel()


async def test_a_file_that_stops_growing_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_cli.dashboard.feed.SILENT_S", 0.005)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_event(notice("one")))
    feed = FileFeed(path, follow_s=0.001)
    task = asyncio.create_task(feed.run())
    await until(lambda: feed.view.link is Link.GONE)
    with path.open("ab") as file:
        file.write(encode_event(notice("two")))
    await until(lambda: feed.view.link is Link.LIVE)
    task.cancel()


async def test_a_socket_gives_history_then_what_happens(tmp_path: Path) -> None:
    sink = SocketSink(tmp_path / "run" / "alice.sock")
    for event in sample_events():
        sink(event)
    await sink.start()
    feed = SocketFeed(sink.path, retry_s=0.001)
    assert feed.view == NodeView(label="alice")
    task = asyncio.create_task(feed.run())
    await until(lambda: feed.view.policy_version == STEPS and len(feed.view.evaluations) == 5)
    assert feed.view.link is Link.LIVE
    sink(notice("live"))
    await until(lambda: feed.view.notices[-1].text == "live")
    task.cancel()
    await sink.close()


async def test_a_lost_node_is_gone_and_attached_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "alice.sock"
    feed = SocketFeed(path, retry_s=0.001)
    task = asyncio.create_task(feed.run())
    first = SocketSink(path)
    for event in sample_events():
        first(event)
    await first.start()
    await until(lambda: feed.view.link is Link.LIVE)
    await first.close()
    await until(lambda: feed.view.link is Link.GONE)
    assert feed.view.policy_version == STEPS, "what was known stays on the screen"

    second = SocketSink(path)
    for event in list(sample_events())[:30]:
        second(event)
    await second.start()
    await until(lambda: feed.view.link is Link.LIVE)
    await until(lambda: 0 < feed.view.policy_version < STEPS)
    second(stopped_event())
    await second.close()
    await until(lambda: feed.view.link is Link.STOPPED)
    await asyncio.sleep(0.005)
    assert feed.view.link is Link.STOPPED, "a node that said goodbye is not reported as lost"
    task.cancel()


async def test_garbage_from_a_socket_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "odd.sock"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff" * 100 + b"\n" + encode_event(notice("fine")) + b"half a li")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    feed = SocketFeed(path, retry_s=60)
    task = asyncio.create_task(feed.run())
    await until(lambda: len(feed.view.notices) == 1 and feed.view.link is Link.GONE)
    assert feed.view.malformed == 1
    task.cancel()
    server.close()
