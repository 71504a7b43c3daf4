"""Tasks in files from member to member: bounded, checked by their hash, and given a few times only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from node.clock import VirtualClock, run_virtual
from node.peers.tasks import COPIES, fetch_task, serve_tasks
from node.state.paths import Home
from node.state.tasks import blobs_of, keep_blob, kept_blob, missing_blobs
from node.transport.base import Stream, Transport
from node.transport.memory import MemoryNetwork
from protocol.codec import digest, encode
from protocol.constants import MAX_TASK_BYTES
from protocol.errors import ConfigError, TransportError
from protocol.messages import EnvironmentSpec
from protocol.tasks import PIECE_BYTES, TaskReply
from protocol.topics import TASK_PROTOCOL
from tests.node.verify.world import identity

BLOB = bytes(range(256)) * (PIECE_BYTES // 128) + b"end"
NAME = digest(BLOB)
ALICE, BOB = identity("alice"), identity("bob")


def held(blobs: dict[str, bytes]) -> Callable[[str], Awaitable[bytes | None]]:
    async def blob_of(name: str) -> bytes | None:
        return blobs.get(name)

    return blob_of


def between(test: Callable[[Transport, Transport], Awaitable[None]]) -> None:
    """Alice gives, Bob asks."""

    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        alice, bob = network.transport(ALICE.peer_id), network.transport(BOB.peer_id)
        for each in (alice, bob):
            await each.start()
        await test(alice, bob)
        for each in (alice, bob):
            await each.close()

    run_virtual(main())


def test_a_blob_arrives_whole_and_the_progress_is_told() -> None:
    async def test(alice: Transport, bob: Transport) -> None:
        serve_tasks(alice, {"file/t": NAME}, held({NAME: BLOB}))
        told: list[tuple[int, int]] = []
        assert await fetch_task(bob, ALICE.peer_id, NAME, lambda *come: told.append(come)) == BLOB
        assert told == [(PIECE_BYTES, len(BLOB)), (2 * PIECE_BYTES, len(BLOB)), (len(BLOB), len(BLOB))]

    between(test)


def test_only_the_charters_own_is_given_and_not_for_ever() -> None:
    async def test(alice: Transport, bob: Transport) -> None:
        other = b"another blob in the same home"
        serve_tasks(alice, {"file/t": NAME}, held({NAME: BLOB, digest(other): other}))
        with pytest.raises(TransportError, match="it has 0 bytes; 0 is none"):
            await fetch_task(bob, ALICE.peer_id, digest(other), lambda *_: None)
        for _ in range(COPIES):
            await fetch_task(bob, ALICE.peer_id, NAME, lambda *_: None)
        with pytest.raises(TransportError):
            await fetch_task(bob, ALICE.peer_id, NAME, lambda *_: None)
        assert alice.refusals.counters()[BOB.peer_id, "task_copies"] == 1

    between(test)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([encode(TaskReply(5)), b"12345"], "its bytes have another hash than the charter pins"),
        ([encode(TaskReply(MAX_TASK_BYTES + 1))], f"it has {MAX_TASK_BYTES + 1} bytes"),
        ([encode(TaskReply(5)), b"123456"], "does not give the task"),
        ([b"\xc1"], "does not give the task"),
    ],
)
def test_what_a_liar_sends_is_refused(frames: list[bytes], words: str) -> None:
    async def test(alice: Transport, bob: Transport) -> None:
        async def lie(stream: Stream) -> None:
            await stream.receive()
            for each in frames:
                await stream.send(each)

        alice.serve(TASK_PROTOCOL, lie)
        with pytest.raises(TransportError, match=words):
            await fetch_task(bob, ALICE.peer_id, NAME, lambda *_: None)

    between(test)


def test_a_home_keeps_what_is_whole(tmp_path: Path) -> None:
    home = Home(tmp_path)
    spec = EnvironmentSpec("file/t", pin=f"sha256:{NAME}")
    specs = [EnvironmentSpec("reasoning_gym/chain_sum"), spec]
    assert missing_blobs(home, specs) == {"file/t": NAME}
    with pytest.raises(ConfigError, match="the file of the task file/t is not here"):
        blobs_of(home, specs)
    assert keep_blob(home, BLOB) == NAME
    assert missing_blobs(home, specs) == {}
    assert blobs_of(home, specs) == {"file/t": BLOB}
    home.task(NAME).write_bytes(BLOB[:-1])
    assert kept_blob(home, NAME) is None
    assert keep_blob(home, BLOB) == NAME
    assert kept_blob(home, NAME) == BLOB
    with pytest.raises(ConfigError, match="does not say which file the task rows/x is"):
        missing_blobs(home, [EnvironmentSpec("rows/x")])
