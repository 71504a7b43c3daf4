"""Sinks of the event stream, with real files and real Unix sockets in a temporary folder (no network)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from node.events import (
    Evaluated,
    Event,
    EventBus,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    StagesSeen,
    decode_event,
    encode_event,
)
from node.telemetry import HISTORY_LINES, MAX_READERS, JsonlSink, SocketSink
from protocol.errors import AddressError

STARTED = NodeStarted(
    at=1,
    name="alice",
    peer_id="12D3KooWx",
    swarm="demo",
    swarm_id="ab",
    addresses=(),
    model="tiny",
    params=1,
    engine="transformers",
    sandbox="strong",
    run_dir="/run",
)


def notice(text: str, at: int = 1) -> Notice:
    return Notice(at=at, level="info", text=text)


def evaluated(version: int, moment: str) -> Evaluated:
    return Evaluated(
        at=version,
        policy_version=version,
        moment=moment,
        prompts=1,
        sampled=0.5,
        greedy=0.5,
        sampled_tasks={},
        greedy_tasks={},
        evaluate_s=0.0,
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 - a real socket tells nobody when it has been read
            await asyncio.sleep(0.001)


async def lines_from(reader: asyncio.StreamReader, count: int) -> list[Event]:
    async with asyncio.timeout(5.0):
        return [decode_event(await reader.readline()) for _ in range(count)]


# --- file ---------------------------------------------------------------------------------------------------


def test_a_file_gets_one_line_per_event_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "metrics.jsonl"
    bus = EventBus()
    sink = JsonlSink(path)
    bus.subscribe(sink)
    bus.emit(STARTED)
    bus.emit(notice("a\nb"))
    assert [decode_event(line) for line in path.read_bytes().splitlines()] == [STARTED, notice("a\nb")]
    sink.close()


def test_a_file_is_continued_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_event(STARTED) + b'{"type":"Not')
    sink = JsonlSink(path)
    sink(notice("after"))
    sink.close()
    assert path.read_bytes() == encode_event(STARTED) + b'{"type":"Not\n' + encode_event(notice("after"))


def test_a_full_file_is_set_aside_and_the_new_one_says_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, max_bytes=len(encode_event(STARTED)) + 120)
    sink(STARTED)
    for number in range(20):
        sink(notice(f"number {number}"))
    sink.close()
    assert {found.name for found in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.jsonl.1"}
    new = [decode_event(line) for line in path.read_bytes().splitlines()]
    old = [decode_event(line) for line in path.with_name("metrics.jsonl.1").read_bytes().splitlines()]
    assert new[0] == old[0] == STARTED
    assert new[-1] == notice("number 19")
    assert len(encode_event(STARTED)) + 120 >= path.stat().st_size


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    sink = JsonlSink(Path("/dev/full"))
    sink(STARTED)
    sink(notice("x"))
    assert sink.lost_lines == 2
    sink.close()


def test_a_file_that_cannot_be_opened_anew_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, max_bytes=len(encode_event(STARTED)))
    sink(STARTED)
    with monkeypatch.context() as none_left:

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        none_left.setattr(Path, "open", refuse)
        sink(notice("no descriptor is left"))
        assert sink.lost_lines == 1
    sink(notice("now there is"))
    sink.close()
    assert [decode_event(line) for line in path.read_bytes().splitlines()] == [notice("now there is")]


# --- socket -------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "alice.sock"


async def test_only_this_user_can_open_the_socket(path: Path) -> None:
    sink = SocketSink(path)
    await sink.start()
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    await sink.close()
    assert os.listdir(path.parent) == []


async def test_a_folder_open_to_others_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)
    with pytest.raises(AddressError, match=r"0755.*chmod 700"):
        await SocketSink(path).start()


async def test_a_dead_socket_is_replaced_a_living_one_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = SocketSink(path)
    await first.start()
    with pytest.raises(AddressError, match="already serves"):
        await SocketSink(path).start()
    await first.close()


def test_a_file_in_the_way_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    with pytest.raises(AddressError, match="not a socket"):
        asyncio.run(SocketSink(path).start())
    assert path.read_text() == "mine"


async def test_a_path_too_long_for_the_kernel_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"x\.sock"):
        await SocketSink(tmp_path / ("d" * 120) / "x.sock").start()


async def test_history_then_live_for_two_readers(path: Path) -> None:
    sink = SocketSink(path)
    sink(STARTED)
    sink(notice("early"))
    await sink.start()
    first, first_writer = await asyncio.open_unix_connection(path)
    assert await lines_from(first, 2) == [STARTED, notice("early")]
    sink(notice("between"))
    second, second_writer = await asyncio.open_unix_connection(path)
    assert await lines_from(second, 3) == [STARTED, notice("early"), notice("between")]
    assert sink.readers == 2
    sink(notice("live"))
    assert await lines_from(first, 2) == [notice("between"), notice("live")]
    assert await lines_from(second, 1) == [notice("live")]
    for writer in (first_writer, second_writer):
        writer.close()
    await until(lambda: sink.readers == 0)
    await sink.close()


async def test_history_keeps_the_last_of_each_snapshot_and_never_loses_the_start(path: Path) -> None:
    sink = SocketSink(path)
    sink(STARTED)
    sink(evaluated(0, "before"))
    for number in range(2000):
        sink(StagesSeen(at=number, stages=()))
        sink(PeersSeen(at=number, peers=()))
        sink(evaluated(number, "during"))
        sink(notice(str(number)))
    await sink.start()
    reader, writer = await asyncio.open_unix_connection(path)
    wanted = 1 + 1 + 1 + 1 + HISTORY_LINES["Evaluated"] + HISTORY_LINES["Notice"]
    history = await lines_from(reader, wanted)
    assert history[:2] == [STARTED, evaluated(0, "before")]
    assert history[-4:] == [
        StagesSeen(at=1999, stages=()),
        PeersSeen(at=1999, peers=()),
        evaluated(1999, "during"),
        notice("1999"),
    ]
    writer.close()
    await sink.close()


async def test_history_is_bounded_in_bytes(path: Path) -> None:
    sink = SocketSink(path)
    for number in range(40):
        sink(notice(f"{number:03d}" + "x" * 100_000))
    await sink.start()
    reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
    first = (await lines_from(reader, 1))[0]
    assert first.text.startswith("030"), "10 lines of 100 kB stay below one MiB"
    writer.close()
    await sink.close()


async def test_a_reader_that_does_not_keep_up_is_dropped_alone(path: Path) -> None:
    sink = SocketSink(path, max_unread_bytes=100_000)
    await sink.start()
    good, good_writer = await asyncio.open_unix_connection(path)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        await until(lambda: sink.readers == 2)
        for number in range(80):
            sink(notice("x" * 10_000, at=number))
            assert (await lines_from(good, 1))[0].at == number
        await until(lambda: sink.readers == 1)
    assert sink.dropped_readers == 1
    good_writer.close()
    await sink.close()


async def test_what_a_client_says_only_ends_its_own_connection(path: Path) -> None:
    sink = SocketSink(path)
    sink(STARTED)
    await sink.start()
    good, good_writer = await asyncio.open_unix_connection(path)
    _, bad_writer = await asyncio.open_unix_connection(path)
    await until(lambda: sink.readers == 2)
    bad_writer.write(os.urandom(5000) + b'\n{"type":"NodeStopped"}\n')
    await until(lambda: sink.readers == 1)
    sink(notice("still here"))
    assert await lines_from(good, 2) == [STARTED, notice("still here")]
    for writer in (good_writer, bad_writer):
        writer.close()
    await sink.close()


async def test_the_number_of_readers_is_bounded(path: Path) -> None:
    sink = SocketSink(path)
    await sink.start()
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(MAX_READERS + 1)]
    for client in sockets:
        client.connect(str(path))
    await until(lambda: sink.dropped_readers == 1)
    assert sink.readers == MAX_READERS
    for client in sockets:
        client.close()
    await sink.close()


async def test_closing_delivers_the_last_event(path: Path) -> None:
    sink = SocketSink(path)
    await sink.start()
    reader, writer = await asyncio.open_unix_connection(path)
    await until(lambda: sink.readers == 1)
    last = NodeStopped(at=9, reason="done", steps=3, wall_s=1.0)
    sink(last)
    await sink.close()
    assert await lines_from(reader, 1) == [last]
    assert await reader.read() == b""
    writer.close()


async def test_closing_does_not_wait_for_a_stuck_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.telemetry.CLOSE_TIMEOUT_S", 0.02)
    sink = SocketSink(path)
    await sink.start()
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.connect(str(path))
        await until(lambda: sink.readers == 1)
        for _ in range(40):
            sink(notice("x" * 50_000))
        await sink.close()
        await until(lambda: sink.readers == 0)
    await sink.close()
