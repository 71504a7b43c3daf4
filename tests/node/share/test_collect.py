"""Others' groups come in: who is chosen, what a fetch may cost, and that the loop always goes on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from node.clock import VirtualClock, run_virtual
from node.config import NodeConfig
from node.peers.trust import Hardness
from node.share import collect
from node.share.accepted import Accepted
from node.share.collect import SETTLE_MS, Collector, fetch_body
from node.share.gossip import Gossip
from node.share.heard import Heard
from node.share.pool import ReplayPool
from node.transport.base import Stream, StreamHandler
from node.transport.limits import Refusals
from node.transport.memory import MemoryNetwork, MemoryTransport
from node.verify.base import ACCEPT, Verdict, reject
from protocol.codec import decode, digest, encode
from protocol.constants import MAX_BLOB_BYTES, MAX_FRAME_BYTES
from protocol.errors import DecodeError, LimitError, TransportError
from protocol.messages import Announcement, BlobRef, BlobReply, BlobRequest, Lineage, PromptRef
from protocol.topics import BLOB_PROTOCOL
from tests.node.runtimes import ManualClock, make_links, make_peers, make_runtime
from tests.node.verify.world import World, identity

NODE = identity("node").peer_id
GROUP = World(group_size=2).group(NODE)
TIMEOUT_S = 10.0


class Announced:
    """Stands for gossip: hands over what a test puts in. Its neighbours were there long ago."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.first_neighbour_at: int | None = 0
        self._queue: asyncio.Queue[Heard] = asyncio.Queue()

    def put(self, heard: Heard) -> None:
        self._queue.put_nowait(heard)

    async def heard(self) -> AsyncIterator[Heard]:
        while True:
            yield await self._queue.get()


@dataclass
class Observer:
    """Stands for the verifier: slots are stale and authors refused as told."""

    stale: set[int] = field(default_factory=set)
    refused: dict[str, Verdict] = field(default_factory=dict)

    def observe(self, heard: Heard) -> Verdict:
        return self.refused.get(heard.sender, ACCEPT)

    def is_fresh(self, heard: Heard) -> bool:
        return heard.announcement.prompt.slot not in self.stale


@dataclass
class Sharing:
    not_sharing: str = ""


class Desk:
    """A running collector, and authors that serve what they announce or something else."""

    def __init__(self, *, parallel: int = 1, queue: int = 1000, external_groups: int = 500) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.transport: MemoryTransport = self.network.transport(NODE)
        self.gossip = Announced(self.transport)
        self.observer = Observer()
        self.sharing = Sharing()
        self.refusals = Refusals()
        self.pool = ReplayPool(64, 2, random.Random(0))
        self.bodies: dict[str, bytes] = {}
        self.arrivals = 0
        runtime = make_runtime(self.clock)
        _, self.peers = make_peers(runtime, identity("node"), World().charter, refusals=self.refusals)
        config = NodeConfig.model_validate(
            {
                "share": {"fetch_parallel": parallel, "fetch_timeout_s": TIMEOUT_S},
                "verify": {"queue": queue},
                "train": {"external_groups": external_groups},
            }
        )
        self.collector = Collector(
            runtime,
            self.peers,
            cast("Gossip", self.gossip),
            self.pool,
            self.observer,
            self.sharing,
            config,
        )

    async def author(self, name: str, handler: StreamHandler | None = None) -> str:
        """A peer that serves honestly, or with `handler`."""
        transport = self.network.transport(identity(name).peer_id)
        await transport.start()
        transport.serve(BLOB_PROTOCOL, handler or self.serve)
        return transport.peer_id

    async def serve(self, stream: Stream) -> None:
        request = decode(await stream.receive(), BlobRequest, max_bytes=1024)
        body = self.bodies.get(request.digest, b"")
        await stream.send(encode(BlobReply(len(body))))
        for start in range(0, len(body), MAX_FRAME_BYTES):
            await stream.send(body[start : start + MAX_FRAME_BYTES])

    def offer(
        self,
        author: str,
        slot: int,
        *,
        body: bytes | None = None,
        size: int | None = None,
        rewards: tuple[float, ...] = (0.0, 1.0),
        index: int | None = None,
    ) -> Heard:
        """An announcement of `author`, later than the one before; of a prompt of its own without `index`."""
        body = f"body {author} {slot}".encode() if body is None else body
        self.bodies[digest(body)] = body
        said = Announcement(
            Lineage(author, "a" * 64, "b" * 64),
            0,
            mean_version=0,
            oldest_version=0,
            prompt=PromptRef(0, slot, self.arrivals if index is None else index),
            completions="c" * 64,
            rewards=rewards,
            body=BlobRef(digest(body), len(body) if size is None else size),
        )
        self.arrivals += 1
        heard = Heard(author, said, self.arrivals, "d" * 64)
        self.gossip.put(heard)
        return heard

    def pool_in(self, author: str, number: int = 0) -> None:
        """A group of `author` waits in the pool."""
        group = msgspec.structs.replace(GROUP, author=author)
        self.pool.add(Accepted(f"{author}{number}", group, (), (), 0))

    async def pause(self, *, then: float = 1.0) -> None:
        """Nothing is fetched while what was offered arrives; then it is."""
        self.sharing.not_sharing = "as told"
        await asyncio.sleep(1)
        assert self.fetched() == []
        self.sharing.not_sharing = ""
        self.pool.after_draw()
        await asyncio.sleep(then)

    def fetched(self) -> list[tuple[str, int]]:
        """(author, slot) in the order of fetching."""
        found = []
        while not self.collector.fetched.empty():
            heard = self.collector.fetched.get_nowait().heard
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


def test_the_author_with_the_fewest_groups_waiting_comes_first_then_the_newest() -> None:
    async def test(desk: Desk) -> None:
        alice, bob = await desk.author("alice"), await desk.author("bob")
        desk.pool_in(bob)
        desk.offer(alice, 0)
        desk.offer(bob, 0)
        desk.offer(alice, 1)
        desk.offer(bob, 2)
        await desk.pause()
        assert desk.fetched() == [(alice, 1), (alice, 0), (bob, 2), (bob, 0)]

    desk(test)


@pytest.mark.parametrize("parallel", [1, 4])
def test_whoever_answered_a_prompt_first_is_fetched_before_whoever_may_have_copied_it(parallel: int) -> None:
    async def test(desk: Desk) -> None:
        alice, copier = await desk.author("alice"), await desk.author("copier")
        desk.pool_in(alice)  # else need would choose her by itself
        desk.offer(alice, 0, index=700)
        desk.offer(alice, 1)
        desk.offer(copier, 5, index=700)
        await desk.pause()
        fetched = desk.fetched()
        assert fetched[0] == (alice, 0)
        assert sorted(fetched[1:]) == sorted([(copier, 5), (alice, 1)])

    desk(test, parallel=parallel)


def test_an_author_that_serves_nothing_holds_nobody_up_who_answered_the_same() -> None:
    async def test(desk: Desk) -> None:
        silent, alice = await desk.author("silent", stalls), await desk.author("alice")
        desk.offer(silent, 0, index=700)
        desk.offer(alice, 1, index=700)
        await desk.pause(then=TIMEOUT_S + 1)
        assert desk.fetched() == [(alice, 1)]
        assert desk.refusals.counters() == {(silent, "deadline"): 1}

    desk(test, parallel=4)


def test_no_more_is_fetched_than_the_pool_needs() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        desk.pool_in("somebody")
        for slot in range(10):
            desk.offer(alice, slot)
        await asyncio.sleep(5)
        assert desk.collector.fetched.qsize() == 3  # what waits for verification counts
        assert desk.collector.need == 0
        assert desk.collector.gauge.status().waiting_for == "need"
        desk.fetched()
        desk.pool_in(alice, 1)
        desk.pool_in(alice, 2)
        desk.pool.draw(1)  # leaves two unused ones, of four that are wanted
        await asyncio.sleep(5)
        assert len(desk.fetched()) == 2
        assert desk.collector.bodies_fetched == 5

    desk(test, parallel=4, external_groups=2)


def test_what_teaches_nothing_and_stale_offers_are_never_fetched() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        desk.offer(alice, 1, rewards=(1.0, 1.0))
        desk.offer(alice, 2)
        desk.offer(alice, 3)
        desk.observer.stale = {2}
        await desk.pause()
        assert desk.fetched() == [(alice, 3)]
        assert desk.collector.gauge.status().waiting_for == "offers"
        assert desk.refusals.counters() == {}

    desk(test)


def test_announcements_count_for_and_against_their_authors() -> None:
    async def test(desk: Desk) -> None:
        names = ("honest", "late", "liar", "quarantined")
        honest, late, liar, quarantined = [await desk.author(name) for name in names]
        desk.observer.refused = {late: reject("stale"), liar: reject("tampered_prompt")}
        desk.peers.judged(quarantined, Hardness.HARD)
        for author in (honest, late, liar, quarantined):
            desk.offer(author, 0)
        await asyncio.sleep(1)
        assert desk.fetched() == [(honest, 0)]
        rows = {row.peer_id: row for row in desk.peers.table(make_links(ManualClock()), {}, "")}
        assert rows[late].rejected == {"stale": 1}
        assert rows[liar].rejected == {"tampered_prompt": 1}
        assert (rows[late].trust, rows[liar].trust) == (0.5, 0.0)
        assert rows[quarantined].policy_version == 0  # heard all the same
        assert desk.peers.active() == (honest,)

    desk(test)


def test_what_is_heard_until_the_past_has_settled_is_not_fetched() -> None:
    async def test(desk: Desk) -> None:
        alice = await desk.author("alice")
        desk.gossip.first_neighbour_at = None
        desk.offer(alice, 0)
        await asyncio.sleep(1)
        desk.gossip.first_neighbour_at = desk.clock.now_ms()
        desk.offer(alice, 1)
        await asyncio.sleep(SETTLE_MS / 1000)
        desk.offer(alice, 2)
        await asyncio.sleep(1)
        assert desk.fetched() == [(alice, 2)]
        assert desk.peers.active() == (alice,)

    desk(test)


def test_offers_are_bounded_per_author_and_in_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "AUTHORS", 3)

    async def test(desk: Desk) -> None:
        names = [await desk.author(f"author{number}") for number in range(5)]
        desk.sharing.not_sharing = "as told"
        for slot in range(collect.OFFERS_PER_AUTHOR + 5):
            desk.offer(names[0], slot)
        for name in names[1:3]:
            desk.offer(name, 0)
        await asyncio.sleep(1)
        desk.offer(names[0], 1000)  # heard again: the one not heard for longest leaves
        desk.offer(names[3], 0)
        await desk.pause(then=60)
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
        assert desk.refusals.counters() == ({(mallory, reason): 1} if reason else {})
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
        assert (desk.fetched(), desk.refusals.counters()) == ([], {})

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
        assert desk.refusals.counters() == {(mallory, "size"): 1}

    desk(test)


def test_authors_that_stall_cannot_keep_the_others_out() -> None:
    async def test(desk: Desk) -> None:
        honest = await desk.author("honest")
        desk.pool_in(honest)  # it is never the shortest
        stallers = [await desk.author(f"staller{number}", stalls) for number in range(8)]
        for slot in range(30):  # a minute and a half, a new offer of everybody every three seconds
            for staller in stallers:
                desk.offer(staller, slot)
            desk.offer(honest, slot)
            await asyncio.sleep(3)
        got = Counter(author for author, _ in desk.fetched())
        assert got[honest] >= 20
        assert set(got) == {honest}
        tries = desk.refusals.counters()
        assert {reason for _, reason in tries} == {"deadline"}
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
        assert desk.collector.fetched.qsize() == 2
        assert desk.collector.bodies_fetched == 3
        assert desk.collector.gauge.status().waiting_for == "room in verify"
        desk.collector.fetched.get_nowait()
        await asyncio.sleep(1)
        assert desk.collector.bodies_fetched == 4

    desk(test, queue=2)
