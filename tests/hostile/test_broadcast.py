"""Hostile peers in the exchange of chunks, on either side of a stream: each is dropped by rule or deadline,
counted with its reason, and costs the others nothing but time."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from node.clock import VirtualClock, run_virtual
from node.transport.base import Stream
from node.transport.memory import MemoryNetwork
from protocol.chunks import (
    MAX_ASKED,
    Cancel,
    Frame,
    Got,
    Have,
    Piece,
    Pull,
    Tell,
    bitmap_of,
    chunk_hash,
    decode_from_downloader,
    describe,
    encode_frame,
    max_frame_bytes,
)
from protocol.codec import decode, encode
from protocol.errors import DeadlineError, TransportError
from protocol.messages import ChunkedBlob, ChunksReply, ChunksRequest
from protocol.topics import CHUNKS_PROTOCOL
from tests.node.weights.simulation import Node, peer_id_of

KIB = 1 << 10
CHUNK = 16 * KIB
DATA = random.Random(7).randbytes(40 * CHUNK - 100)
CHUNKS = [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)]
BLOB, HASHES = describe(len(DATA), CHUNKS)
COUNT = len(CHUNKS)
ALL = bitmap_of(range(COUNT), COUNT)

Handler = Callable[[Stream], Awaitable[None]]


class Swarm:
    """A source, a victim and a hostile transport; the victim knows both others."""

    def __init__(self, folder, *, mbit: float = 5.0) -> None:
        self.network = MemoryNetwork(seed=1, clock=VirtualClock())
        everybody = [peer_id_of(number) for number in range(3)]
        self.source, self.victim = (Node(self.network, number, folder, everybody) for number in range(2))
        self.hostile = self.network.transport(everybody[2])
        for peer_id in everybody:
            self.network.limit(peer_id, mbit, mbit)

    async def __aenter__(self) -> Swarm:
        for transport in (self.source.transport, self.victim.transport, self.hostile):
            await transport.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in (self.hostile, self.victim.transport, self.source.transport):
            async with asyncio.timeout(5.0):
                await transport.close()

    @property
    def blamed(self) -> dict[str, int]:
        """What the victim holds against the hostile peer; honest ones must not be blamed."""
        assert {peer_id for peer_id, _ in self.victim.failures} <= {self.hostile.peer_id}
        return {reason: count for (_, reason), count in self.victim.failures.items()}


# --- a hostile uploader ---


async def accept(stream: Stream, hashes: bytes = HASHES, have: bytes = ALL) -> None:
    """Answer the request for the blob."""
    decode(await stream.receive(256), ChunksRequest, max_bytes=256)
    await stream.send(encode(ChunksReply(hashes, have)))


async def pulls(stream: Stream):
    """Chunks that are asked for, one by one."""
    while True:
        frame = decode_from_downloader(await stream.receive(max_frame_bytes(BLOB)), BLOB)
        if isinstance(frame, Pull):
            for index in frame.indices:
                yield index


def answering(*frames: Callable[[int], bytes | Frame]) -> Handler:
    """A handler that answers the first pull with these frames, made from the chunk asked for."""

    async def handler(stream: Stream) -> None:
        await accept(stream)
        async for index in pulls(stream):
            for make in frames:
                frame = make(index)
                await stream.send(frame if isinstance(frame, bytes) else encode_frame(frame))

    return handler


def flipped(index: int) -> Frame:
    chunk = bytearray(CHUNKS[index])
    chunk[len(chunk) // 2] ^= 1
    return Piece(index, bytes(chunk))


async def wrong_hashes(stream: Stream) -> None:
    await accept(stream, hashes=bytes(len(HASHES)))


async def too_few_hashes(stream: Stream) -> None:
    await accept(stream, hashes=HASHES[:-32])


async def huge_reply(stream: Stream) -> None:
    await accept(stream, hashes=HASHES * 100)


async def have_beyond_the_end(stream: Stream) -> None:
    await accept(stream, have=b"\xff" * (len(ALL) + 1))


async def offers_twice(stream: Stream) -> None:
    await accept(stream)
    await stream.send(encode_frame(Have([3])))
    await asyncio.sleep(100)


async def alive_and_nothing_else(stream: Stream) -> None:
    await accept(stream)
    while True:
        await stream.send(encode_frame(Have(())))


UPLOADERS: dict[str, tuple[Handler, str]] = {
    "flipped byte": (answering(flipped), "chunk_digest"),
    "another chunk's bytes": (answering(lambda i: Piece(i, CHUNKS[(i + 1) % (COUNT - 1)])), "chunk_digest"),
    "short chunk": (answering(lambda i: Piece(i, CHUNKS[i][:-1])), "chunk_size"),
    "long chunk": (answering(lambda i: Piece(i, CHUNKS[i] + b"x")), "frame_size"),
    "giant frame": (answering(lambda i: Piece(i, bytes(4_000_000))), "frame_size"),
    "index out of range": (answering(lambda i: Piece(COUNT, CHUNKS[0])), "chunk_index"),
    "index of the largest number": (answering(lambda i: b"\x02\xff\xff\xff\xff" + CHUNKS[0]), "chunk_index"),
    "no chunk at all": (answering(lambda i: b"\x02\x00"), "frame_size"),
    "the same chunk twice": (
        answering(lambda i: Piece(i, CHUNKS[i]), lambda i: Piece(i, CHUNKS[i])),
        "unrequested",
    ),
    "unknown kind": (answering(lambda i: b"\x63"), "frame_kind"),
    "a downloader's frame": (answering(lambda i: Pull(0, ())), "frame_kind"),
    "two tells": (answering(lambda i: Tell(), lambda i: Tell()), "frame_kind"),
    "have out of range": (answering(lambda i: Have([COUNT])), "chunk_index"),
    "have cut short": (answering(lambda i: b"\x01\x00\x00"), "frame_size"),
    "have twice": (offers_twice, "have_twice"),
    "flood of signs of life": (alive_and_nothing_else, "flood"),
    "hashes of another blob": (wrong_hashes, "chunk_hashes"),
    "too few hashes": (too_few_hashes, "chunk_hashes"),
    "too many hashes": (huge_reply, "frame_size"),
    "have map too long": (have_beyond_the_end, "have_size"),
}


@pytest.mark.parametrize("name", UPLOADERS)
def test_lying_uploader_is_found_blamed_once_and_not_used_again(tmp_path, name):
    handler, reason = UPLOADERS[name]
    asked = []

    async def count(stream: Stream) -> None:
        asked.append(stream.peer_id)
        await handler(stream)

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.hostile.serve(CHUNKS_PROTOCOL, count, deadline_s=600.0)
            fetch = asyncio.create_task(swarm.victim.exchange.fetch(BLOB, 60.0))
            # Alone at first: a victim that has somebody better might never notice.
            await asyncio.sleep(5.0)
            assert swarm.blamed == {reason: 1}
            swarm.source.store.add(DATA)
            assert bytes((await fetch).data()) == DATA
            assert swarm.blamed == {reason: 1}
            assert asked == [swarm.victim.peer_id]

    run_virtual(main())


def test_bad_chunk_is_found_at_that_chunk_and_the_good_ones_are_kept(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            handler = answering(lambda i: flipped(i) if i == 11 else Piece(i, CHUNKS[i]))
            swarm.hostile.serve(CHUNKS_PROTOCOL, handler, deadline_s=600.0)
            fetch = asyncio.create_task(swarm.victim.exchange.fetch(BLOB, 60.0))
            await asyncio.sleep(10.0)
            kept = swarm.victim.exchange.downloaded[swarm.hostile.peer_id]
            assert swarm.blamed == {"chunk_digest": 1}
            swarm.source.store.add(DATA)
            await fetch
            assert swarm.victim.exchange.downloaded[swarm.source.peer_id] == len(DATA) - kept

    run_virtual(main())


async def never_answers(stream: Stream) -> None:
    await asyncio.sleep(1000)


async def says_it_lives_and_sends_nothing(stream: Stream) -> None:
    await accept(stream)
    while True:
        await stream.send(encode_frame(Have(())))
        await asyncio.sleep(2.0)


async def one_byte_per_ten_seconds(stream: Stream) -> None:
    await accept(stream)
    channel = stream.channel
    frame = encode_frame(Piece(0, CHUNKS[0]))
    for byte in len(frame).to_bytes(4, "big") + frame:
        await channel.write(bytes((byte,)))
        await asyncio.sleep(10.0)


@pytest.mark.parametrize(
    "handler", [never_answers, says_it_lives_and_sends_nothing, one_byte_per_ten_seconds]
)
def test_uploader_that_does_not_deliver_is_not_waited_for(tmp_path, handler):
    """With an honest source beside it; what it was asked for goes there after 5 s."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.hostile.serve(CHUNKS_PROTOCOL, handler, deadline_s=600.0)
            swarm.source.store.add(DATA)
            assert bytes((await swarm.victim.exchange.fetch(BLOB, 60.0)).data()) == DATA
            assert asyncio.get_running_loop().time() < 8.0

    run_virtual(main())


@pytest.mark.parametrize(
    "handler", [never_answers, says_it_lives_and_sends_nothing, one_byte_per_ten_seconds]
)
def test_only_uploader_that_does_not_deliver_is_dropped_by_deadline_and_tried_less_and_less(
    tmp_path, handler
):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.hostile.serve(CHUNKS_PROTOCOL, handler, deadline_s=600.0)
            with pytest.raises(DeadlineError, match="0 of 40 chunks"):
                await swarm.victim.exchange.fetch(BLOB, 200.0)
            assert 4 <= swarm.blamed["deadline"] <= 12
            assert set(swarm.blamed) == {"deadline"}

    run_virtual(main())


# --- a hostile downloader ---


async def opened(swarm: Swarm, blob: ChunkedBlob = BLOB) -> Stream:
    """A stream to the victim, which has the blob, after its reply."""
    stream = await swarm.hostile.open_stream(swarm.victim.peer_id, CHUNKS_PROTOCOL)
    await stream.send(encode(ChunksRequest(blob.root)))
    reply = decode(await stream.receive(100_000), ChunksReply, max_bytes=100_000)
    assert reply.hashes == HASHES
    return stream


DOWNLOADERS: dict[str, tuple[list[bytes | Frame], str]] = {
    "unknown kind": ([b"\x00"], "frame_kind"),
    "an uploader's frame": ([Have([1])], "frame_kind"),
    "index out of range": ([Pull(0, [COUNT])], "chunk_index"),
    "cancel out of range": ([Cancel([2**32 - 1])], "chunk_index"),
    "pull without a count": ([b"\x04\x00"], "frame_size"),
    "pull cut short": ([b"\x04\x00\x00\x00\x00\x01"], "frame_size"),
    "acknowledges what was not sent": ([Pull(5, ())], "ack"),
    "acknowledges less than before": ([Pull(2**32 - 1, ())], "ack"),
    "asks twice in a breath": ([Pull(0, [1, 2, 3, 4, 5, 6, 7, 8, 7])], "asked_twice"),
    "asks for more than allowed": ([Pull(0, [0] * (MAX_ASKED + 1))], "frame_size"),
    "tells without being asked": ([Got([1])], "frame_kind"),
    "giant frame": ([bytes(200_000)], "frame_size"),
    "flood of cancels": ([Cancel([1])] * 300, "flood"),
    "flood of nothing": ([Pull(0, ())] * 300, "flood"),
}


@pytest.mark.parametrize("name", DOWNLOADERS)
def test_lying_downloader_is_refused_and_counted(tmp_path, name):
    frames, reason = DOWNLOADERS[name]

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.victim.store.add(DATA)
            stream = await opened(swarm)
            with pytest.raises(TransportError):
                await _send_all(stream, frames)
            assert swarm.blamed == {reason: 1}
            assert swarm.victim.transport.refusals.counters() == {(swarm.hostile.peer_id, reason): 1}
            # The victim serves others as before.
            fetched = await swarm.source.exchange.fetch(BLOB, 10.0)
            assert bytes(fetched.data()) == DATA

    run_virtual(main())


async def _send_all(stream: Stream, frames: list[bytes | Frame]) -> None:
    for frame in frames:
        await stream.send(frame if isinstance(frame, bytes) else encode_frame(frame))
    while True:
        await stream.receive()


def test_chunk_that_was_not_offered_is_refused(tmp_path):
    """A seeding owner's hidden chunks, or those that it does not have yet."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            stored = swarm.victim.store.open(BLOB, HASHES)
            stored.write(4, CHUNKS[4])
            stream = await opened(swarm)
            with pytest.raises(TransportError):
                await _send_all(stream, [Pull(0, [4, 5])])
            assert swarm.blamed == {"chunk_unknown": 1}

    run_virtual(main())


def test_downloader_that_asks_for_everything_gets_its_share_and_no_more(tmp_path):
    """Eight streams that all ask for everything, against one honest node: half of the uplink each."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.victim.store.add(DATA)

            async def greedy() -> None:
                stream = await opened(swarm)
                await stream.send(encode_frame(Pull(0, range(COUNT))))
                received = 0
                while True:
                    if (await stream.receive())[0] == 2:
                        received += 1
                        await stream.send(encode_frame(Pull(received, ())))
                        if received == COUNT:
                            return

            attack = [asyncio.create_task(greedy()) for _ in range(8)]
            await asyncio.sleep(0.5)
            begun_s = asyncio.get_running_loop().time()
            await swarm.source.exchange.fetch(BLOB, 60.0)
            assert asyncio.get_running_loop().time() - begun_s < 3 * len(DATA) * 8 / 5e6
            for task in attack:
                task.cancel()
            await asyncio.gather(*attack, return_exceptions=True)

    run_virtual(main())


async def _take_again_and_again(stream: Stream, index: int) -> None:
    for received in range(100):
        await stream.send(encode_frame(Pull(received, [index])))
        while (await stream.receive())[0] != 2:
            pass


def test_downloader_that_takes_the_same_again_and_again_is_refused(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, mbit=100.0) as swarm:
            swarm.victim.store.add(DATA)
            stream = await opened(swarm)
            with pytest.raises(TransportError):
                await _take_again_and_again(stream, 1)
            assert swarm.blamed == {"greedy": 1}
            # Over many streams: no more than some copies in all.
            for _ in range(8):
                try:
                    stream = await opened(swarm)
                except TransportError:
                    break
                await stream.send(encode_frame(Pull(0, range(COUNT))))
                for received in range(1, COUNT + 1):
                    while (await stream.receive())[0] != 2:
                        pass
                    await stream.send(encode_frame(Pull(received, ())))
                await stream.close()
            assert swarm.blamed == {"greedy": 2}
            assert swarm.victim.exchange.uploaded[swarm.hostile.peer_id] < 6 * len(DATA)

    run_virtual(main())


def test_downloader_that_never_reads_is_dropped_and_holds_up_nobody(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.victim.store.add(DATA)
            streams = [await opened(swarm) for _ in range(8)]
            for stream in streams:
                await stream.send(encode_frame(Pull(0, range(COUNT))))
            begun_s = asyncio.get_running_loop().time()
            await swarm.source.exchange.fetch(BLOB, 60.0)
            # What they were sent before their windows were full went over the same uplink: 8 of 256 KiB.
            bound_s = (len(DATA) + 8 * 256 * KIB) * 8 / 5e6
            assert asyncio.get_running_loop().time() - begun_s < 1.5 * bound_s
            await asyncio.sleep(45.0)
            assert swarm.blamed == {"deadline": 8}

    run_virtual(main())


def test_silent_downloader_is_dropped(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.victim.store.add(DATA)
            stream = await opened(swarm)
            await asyncio.sleep(30.0)
            assert swarm.blamed == {"deadline": 1}
            silent = await swarm.hostile.open_stream(swarm.victim.peer_id, CHUNKS_PROTOCOL)
            await asyncio.sleep(30.0)
            assert swarm.blamed == {"deadline": 2}
            for each in (stream, silent):
                await each.close()

    run_virtual(main())


def test_unknown_blobs_cost_no_memory(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:

            async def ask(number: int) -> bytes:
                stream = await swarm.hostile.open_stream(swarm.victim.peer_id, CHUNKS_PROTOCOL)
                await stream.send(encode(ChunksRequest(f"{number:064x}")))
                return await stream.receive()

            await ask(0)
            tracemalloc.start()
            for number in range(20):
                reply = decode(await ask(number), ChunksReply, max_bytes=1000)
                assert reply == ChunksReply(b"", b"")
            held_bytes, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held_bytes < 1_000_000
            assert swarm.victim.store.held_bytes == 0

    run_virtual(main())


def test_seeding_owner_is_not_held_up_by_receivers_that_take_and_do_not_pass_on(tmp_path):
    """A hostile receiver is shown chunks and asks for none of them: they go to the honest one."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.source.store.add(DATA)
            swarm.source.exchange.seed(BLOB.root)
            stream = await swarm.hostile.open_stream(swarm.source.peer_id, CHUNKS_PROTOCOL)
            await stream.send(encode(ChunksRequest(BLOB.root)))

            async def linger() -> None:
                while True:
                    await stream.receive()
                    await stream.send(encode_frame(Pull(0, ())))

            lingering = asyncio.create_task(linger())
            await asyncio.sleep(0.5)
            await swarm.victim.exchange.fetch(BLOB, 60.0)
            assert asyncio.get_running_loop().time() < 10.0
            assert chunk_hash(DATA[:CHUNK]) == HASHES[:32]
            lingering.cancel()
            await asyncio.gather(lingering, return_exceptions=True)

    run_virtual(main())
