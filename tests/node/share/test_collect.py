"""Others' groups come in: who is chosen, what a fetch may cost, and that the loop always goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from node.clock import VirtualClock, run_virtual
from node.share import collect
from node.share.collect import Collector, Fetched, fetch_body
from node.share.gossip import Gossip, Heard
from node.supervise import StageGauge
from node.transport.base import Stream, StreamHandler
from node.transport.memory import MemoryNetwork, MemoryTransport
from protocol.codec import decode, digest, encode
from protocol.constants import MAX_BLOB_BYTES, MAX_FRAME_BYTES
from protocol.errors import DecodeError, LimitError, TransportError
from protocol.messages import Announcement, BlobRef, BlobReply, BlobRequest, Lineage, PromptRef
from protocol.topics import BLOB_PROTOCOL
from tests.node.verify.world import identity

NODE = identity("node").peer_id
TIMEOUT_S = 10.0


class Announced:
    """Stands for gossip: hands over what a test puts in."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Heard] = asyncio.Queue()

    def put(self, heard: Heard) -> None:
        self._queue.put_nowait(heard)

    async def heard(self) -> AsyncIterator[Heard]:
        while True:
            yield await self._queue.get()


class Desk:
    """A running collector, and authors that serve what they announce or something else."""

    def __init__(self, *, parallel: int = 1, queue: int = 1000) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.gossip = Announced()
        self.queue: asyncio.Queue[Fetched] = asyncio.Queue(queue)
        self.gauge = StageGauge("share", self.clock, "offers")
        self.wanted = 1000
        self.waiting: Counter[str] = Counter()
        self.answered: set[int] = set()
        self.unwelcome: set[str] = set()
        self.stale: set[int] = set()
        self.failed: list[tuple[str, str]] = []
        self.bodies: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.transport: MemoryTransport = self.network.transport(NODE)
        self.collector = Collector(
            self.transport,
            cast("Gossip", self.gossip),
            queue=self.queue,
            gauge=self.gauge,
            parallel=parallel,
            timeout_s=TIMEOUT_S,
            clock=self.clock,
            wanted=lambda: self.wanted,
            waiting_of=lambda author: self.waiting[author],
            answered=lambda prompt: prompt.index in self.answered,
            worth_keeping=lambda heard: heard.sender not in self.unwelcome,
            still_fresh=lambda heard: heard.announcement.prompt.slot not in self.stale,
            failed=lambda author, reason: self.failed.append((author, reason)),
        )

    async def author(self, name: str, handler: StreamHandler | None = None) -> str:
        """A peer that serves honestly, or with `handler`."""
        transport = self.network.transport(identity(name).peer_id)
        await transport.start()
        transport.serve(BLOB_PROTOCOL, handler or self.serve)
        return transport.peer_id

    async def serve(self, stream: Stream) -> None:
        request = decode(await stream.receive(), BlobRequest, max_bytes=1024)
        self.asked.append(request.digest)
        body = self.bodies.get(request.digest, b"")
        await stream.send(encode(BlobReply(len(body))))
        for start in range(0, len(body), MAX_FRAME_BYTES):
            await stream.send(body[start : start + MAX_FRAME_BYTES])

    def offer(
        self,
        author: str,
        slot: int,
        *,
        index: int = 0,
        body: bytes = b"",
        size: int | None = None,
        rewards: tuple[float, ...] = (0.0, 1.0),
    ) -> Heard:
        """An announcement of `author`, later than the one before."""
        body = body or f"body {author} {slot}".encode()
        self.bodies[digest(body)] = body
        said = Announcement(
            Lineage(author, "a" * 64, "b" * 64),
            policy_version=0,
            mean_version=0.0,
            oldest_version=0,
            prompt=PromptRef(0, slot, index),
            completions="c" * 64,
            rewards=rewards,
            body=BlobRef(digest(body), len(body) if size is None else size),
        )
        self.arrivals = getattr(self, "arrivals", 0) + 1
        heard = Heard(author, said, self.arrivals, "d" * 64)
        self.gossip.put(heard)
        return heard

    def fetched(self) -> list[tuple[str, int]]:
        """(author, slot) in the order of fetching."""
        found = []
        while not self.queue.empty():
            heard = self.queue.get_nowait().heard
            found.append((heard.sender, heard.announcement.prompt.slot))
        return found


def desk(test: Callable[[Desk], Awaitable[None]], **options: Any) -> None:
    """Run `test` with a running collector, and end it."""

    async def main() -> None:
        made = Desk(**options)
        await made.transport.start()
        running = asyncio.create_task(made.collector.run())
        try:
            await test(made)
            assert not running.done(), "the collector ended"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


# --- choosing ----------------------------------------------------------------------------------------------


def test_shared_prompts_come_first_then_the_shortest_author_then_the_newest() -> None:
    async def test(desk: Desk) -> None:
        desk.wanted = 0
        alice, bob = await desk.author("alice"), await desk.author("bob")
        desk.waiting[bob] = 1
        desk.answered = {7}
        desk.offer(alice, 0)
        desk.offer(bob, 0)
        desk.offer(bob, 1, index=7)
        desk.offer(alice, 1)
        desk.offer(bob, 2)
        await asyncio.sleep(1)
        assert desk.fetched() == []  # no need
        desk.wanted = 1000
        desk.collector.nudge()
        await asyncio.sleep(1)
        assert desk.fetched() == [(bob, 1), (alice, 1), (alice, 0), (bob, 2), (bob, 0)]

    desk(test)


def test_no_more_is_fetched_than_the_pool_needs() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        desk.wanted = 3
        for slot in range(10):
            desk.offer(alice, slot)
        await asyncio.sleep(5)
        assert desk.queue.qsize() == 3  # what waits for verification counts
        assert desk.gauge.status().waiting_for == "need"
        desk.wanted = 1
        desk.fetched()
        desk.collector.nudge()
        await asyncio.sleep(5)
        assert len(desk.fetched()) == 1
        assert desk.collector.bodies_fetched == 4

    desk(test, parallel=4)


def test_receipts_unwelcome_authors_and_stale_offers_are_never_fetched() -> None:
    async def test(desk: Desk) -> None:
        desk.wanted = 0
        alice, quarantined = await desk.author("alice"), await desk.author("quarantined")
        desk.unwelcome = {quarantined}
        desk.offer(quarantined, 0)
        desk.offer(alice, 1, rewards=(1.0, 1.0))
        desk.offer(alice, 2)
        desk.offer(alice, 3)
        await asyncio.sleep(1)
        desk.stale = {2}  # meanwhile
        desk.wanted = 9
        desk.collector.nudge()
        await asyncio.sleep(1)
        assert desk.fetched() == [(alice, 3)]
        assert desk.gauge.status().waiting_for == "offers"
        assert desk.failed == []

    desk(test)


def test_offers_are_bounded_per_author_and_in_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "AUTHORS", 3)

    async def test(desk: Desk) -> None:
        desk.wanted = 0
        names = [await desk.author(f"author{number}") for number in range(5)]
        for slot in range(collect.OFFERS_PER_AUTHOR + 5):
            desk.offer(names[0], slot)
        await asyncio.sleep(1)
        for name in names[1:3]:
            desk.offer(name, 0)
        desk.offer(names[0], 1000)  # heard again: the one not heard for longest leaves
        desk.offer(names[3], 0)
        await asyncio.sleep(1)
        desk.wanted = 1000
        desk.collector.nudge()
        await asyncio.sleep(60)
        got = desk.fetched()
        assert Counter(author for author, _ in got) == {
            names[0]: collect.OFFERS_PER_AUTHOR,
            names[2]: 1,
            names[3]: 1,
        }
        assert min(slot for author, slot in got if author == names[0]) == 6  # the oldest went

    desk(test)


# --- what a fetch may cost ---------------------------------------------------------------------------------


async def stalls(stream: Stream) -> None:
    await stream.receive()
    await asyncio.Event().wait()


async def stalls_in_the_body(stream: Stream) -> None:
    request = decode(await stream.receive(), BlobRequest, max_bytes=1024)
    del request
    await stream.send(encode(BlobReply(20)))
    await asyncio.Event().wait()


async def has_nothing(stream: Stream) -> None:
    await stream.receive()
    await stream.send(encode(BlobReply(0)))


async def hangs_up(stream: Stream) -> None:
    await stream.receive()


async def offers_another_size(stream: Stream) -> None:
    await stream.receive()
    await stream.send(encode(BlobReply(21)))
    await stream.send(b"x" * 21)


async def sends_more(stream: Stream) -> None:
    await stream.receive()
    await stream.send(encode(BlobReply(20)))
    await stream.send(b"x" * 1000)


async def sends_crumbs(stream: Stream) -> None:
    await stream.receive()
    await stream.send(encode(BlobReply(20)))
    for _ in range(20):
        await stream.send(b"x")


async def sends_garbage(stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\xc1\xc1\xc1")


async def sends_a_long_reply(stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\x00" * 5000)


FAULTS: list[tuple[StreamHandler, type[Exception], str, float]] = [
    (stalls, TimeoutError, "deadline", TIMEOUT_S),
    (stalls_in_the_body, TimeoutError, "deadline", TIMEOUT_S),
    (has_nothing, TransportError, "", 0.0),
    (hangs_up, TransportError, "", 0.0),
    (offers_another_size, DecodeError, "size", 0.0),
    (sends_more, LimitError, "frame_size", 0.0),
    (sends_crumbs, DecodeError, "frame_size", 0.0),
    (sends_garbage, DecodeError, "decode", 0.0),
    (sends_a_long_reply, LimitError, "frame_size", 0.0),
]


@pytest.mark.parametrize(
    ("handler", "error", "reason", "takes_s"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS]
)
def test_a_bad_author_is_dropped_in_time_and_counted(
    handler: StreamHandler, error: type[Exception], reason: str, takes_s: float
) -> None:
    async def test(desk: Desk) -> None:
        mallory, alice = await desk.author("mallory", handler), await desk.author("alice")
        heard = desk.offer(mallory, 0, body=b"y" * 20)
        await asyncio.sleep(TIMEOUT_S + 1)
        assert desk.fetched() == []
        assert desk.failed == ([(mallory, reason)] if reason else [])
        desk.offer(alice, 0)  # and the loop goes on
        await asyncio.sleep(1)
        assert desk.fetched() == [(alice, 0)]
        began_s = desk.clock.monotonic_s()
        with pytest.raises(error):
            await fetch_body(desk.transport, mallory, heard, TIMEOUT_S)
        assert desk.clock.monotonic_s() - began_s == pytest.approx(takes_s, abs=0.01)

    desk(test)


def test_an_author_that_is_gone_or_serves_nothing_is_left_alone() -> None:
    async def test(desk: Desk) -> None:
        gone = identity("gone").peer_id
        silent = desk.network.transport(identity("silent").peer_id)
        await silent.start()
        desk.offer(gone, 0)
        desk.offer(silent.peer_id, 0)
        await asyncio.sleep(1)
        assert (desk.fetched(), desk.failed) == ([], [])

    desk(test)


@pytest.mark.parametrize("size", [1, MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1])
def test_bodies_of_every_size_arrive_whole(size: int) -> None:
    async def test(desk: Desk) -> None:
        alice, body = await desk.author("alice"), bytes([7]) * size
        heard = desk.offer(alice, 0, body=body)
        assert await fetch_body(desk.transport, alice, heard, TIMEOUT_S) == body

    desk(test)


def test_a_huge_announced_body_costs_nothing_until_it_comes() -> None:
    async def test(desk: Desk) -> None:
        mallory = await desk.author("mallory", stalls_in_the_body)
        desk.offer(mallory, 0, body=b"y" * 20, size=MAX_BLOB_BYTES)
        await asyncio.sleep(1)
        assert desk.failed == [(mallory, "size")]

    desk(test)


def test_authors_that_stall_cannot_keep_the_others_out() -> None:
    async def test(desk: Desk) -> None:
        honest = await desk.author("honest")
        stallers = [await desk.author(f"staller{number}", stalls) for number in range(8)]
        for slot in range(30):  # a minute and a half, a new offer of everybody every three seconds
            for staller in stallers:
                desk.offer(staller, slot)
            desk.offer(honest, slot)
            desk.waiting[honest] = 1  # and the honest one is never the shortest
            await asyncio.sleep(3)
        got = Counter(author for author, _ in desk.fetched())
        assert got[honest] >= 20
        assert set(got) == {honest}
        tries = Counter(author for author, reason in desk.failed if reason == "deadline")
        assert all(count <= 6 for count in tries.values())  # 2, 4, 8, 16, 30 s of rest between them

    desk(test, parallel=4)


def test_a_resting_author_gets_another_chance_by_itself() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        desk.network.partition([[alice]])
        desk.offer(alice, 0)
        await asyncio.sleep(0.5)
        desk.network.heal()
        desk.offer(alice, 1)
        await asyncio.sleep(1)
        assert desk.fetched() == []
        await asyncio.sleep(1)  # two seconds after the failure, and nobody nudged
        assert desk.fetched() == [(alice, 1)]
        desk.offer(alice, 2)
        await asyncio.sleep(0.1)
        assert desk.fetched() == [(alice, 2)]  # forgiven

    desk(test)


def test_a_full_verify_queue_holds_the_fetching_back() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        for slot in range(5):
            desk.offer(alice, slot)
        await asyncio.sleep(1)
        assert desk.queue.qsize() == 2
        assert desk.collector.bodies_fetched == 3
        assert desk.gauge.status().waiting_for == "room in verify"
        desk.queue.get_nowait()
        await asyncio.sleep(1)
        assert desk.collector.bodies_fetched == 4

    desk(test, queue=2)
