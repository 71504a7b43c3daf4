"""Announcements reach everybody once: by gossip, by reconciliation, and never from outside the swarm."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from node.clock import VIRTUAL_EPOCH_MS, SystemClock, VirtualClock, run_virtual
from node.membership import Membership
from node.runtime import Runtime
from node.share import push as push_module
from node.share.gossip import Gossip, GossipLimits
from node.share.heard import Heard
from node.share.push import Push
from node.share.store import AnnouncementStore, StoredAnnouncement, short_digest
from node.state.stores import MemorySequence
from node.transport.base import Stream, Transport, TransportLimits
from node.transport.limits import Refusals
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork, MemoryTransport
from protocol.annex import issue_token
from protocol.charter import found, swarm_id
from protocol.codec import decode, digest, encode
from protocol.envelope import seal
from protocol.errors import LocalProtocolError, TransportError
from protocol.identity import Identity
from protocol.messages import (
    Announcement,
    BlobRef,
    Charter,
    Lineage,
    PeerId,
    PromptRef,
    ReconcileReply,
    ReconcileRequest,
)
from protocol.replay import ReplayCache
from protocol.topics import ANNOUNCE_PROTOCOL, RECONCILE_PROTOCOL, announcement_topic
from tests.node.pushing import push
from tests.node.runtimes import make_peers, make_runtime

TTL_MS = 600_000
IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(10)]
STRANGER = Identity.from_seed(bytes([200]) * 32)
RULES = {
    "name": "test",
    "environments": [{"name": "chain_sum"}],
    "tokenizers": [{"name": "letters", "digest": "a" * 64, "vocab_size": 10, "end_token_ids": [1]}],
}


def charter_of(**rules: Any) -> Charter:
    return found(IDENTITIES[0], RULES | rules, created_at=1)


CHARTER = charter_of()
SWARM = swarm_id(CHARTER)
TOPIC = announcement_topic(SWARM)


def announcement(number: int, author: Identity, rewards: int = 2) -> Announcement:
    lineage = Lineage(author.peer_id, "a" * 64, "b" * 64)
    return Announcement(
        lineage,
        number,
        mean_version=number,
        oldest_version=number,
        prompt=PromptRef(0, number, number),
        completions=f"{number:064x}",
        rewards=(1.0,) * rewards,
        body=BlobRef("e" * 64, 1),
    )


def sealed(
    number: int, author: Identity, *, ttl_ms: int = TTL_MS, swarm: str = SWARM, topic: str = TOPIC
) -> bytes:
    return seal(
        author,
        swarm_id=swarm,
        topic=topic,
        sequence=number,
        payload=encode(announcement(number, author)),
        now_ms=VIRTUAL_EPOCH_MS,
        ttl_ms=ttl_ms,
    )


class Swarm:
    """Nodes on one in-memory network, each with a running `Gossip` and a reader of what it hears."""

    def __init__(self, link: str = "lan", seed: int = 0, charter: Charter = CHARTER) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed, LINKS[link], self.clock)
        self.charter = charter
        self.transports: list[MemoryTransport] = []
        self.gossips: list[Gossip] = []
        self.refusals: list[Refusals] = []
        """What each refused by gossip; what their transports refused is counted apart here."""
        self.heard: list[list[Heard]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.memberships: list[Membership] = []

    async def join(
        self,
        identity: Identity,
        *,
        connect_to: int | None = 0,
        reading: bool = True,
        limits: GossipLimits | None = None,
        transport_limits: TransportLimits | None = None,
        replay: ReplayCache | None = None,
    ) -> int:
        number = len(self.gossips)
        transport = self.network.transport(identity.peer_id, limits=transport_limits)
        await transport.start()
        refusals = Refusals()
        runtime = make_runtime(self.clock, seed=number)
        membership, peers = make_peers(runtime, identity, self.charter, refusals=refusals)
        gossip = Gossip(
            runtime,
            membership,
            peers,
            transport,
            MemorySequence(1),
            replay=replay,
            limits=limits or GossipLimits(),
        )
        self.memberships.append(membership)
        self.refusals.append(refusals)
        self.transports.append(transport)
        self.gossips.append(gossip)
        self.heard.append([])
        self.tasks.append(asyncio.create_task(gossip.run()))
        if reading:
            self.read(number)
        await gossip.listening.wait()
        if connect_to is not None and number > 0:
            await transport.connect(self.transports[connect_to].addresses()[0])
        return number

    async def attach(self, identity: Identity) -> MemoryTransport:
        """A node that is connected to the first one but follows its own rules."""
        transport = self.network.transport(identity.peer_id)
        await transport.start()
        await transport.connect(self.transports[0].addresses()[0])
        self.transports.append(transport)
        return transport

    def read(self, number: int) -> None:
        async def read() -> None:
            async for heard in self.gossips[number].heard():
                self.heard[number].append(heard)

        self.tasks.append(asyncio.create_task(read()))

    def completions(self, number: int) -> list[int]:
        return sorted(int(heard.announcement.completions, 16) for heard in self.heard[number])

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        for transport in self.transports:
            await transport.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome


@asynccontextmanager
async def swarm_of(**arguments: Any) -> AsyncIterator[Swarm]:
    swarm = Swarm(**arguments)
    try:
        yield swarm
    finally:
        await swarm.close()


def test_announcement_reaches_everybody_once():
    async def main() -> None:
        async with swarm_of() as swarm:
            for identity in IDENTITIES[:4]:
                await swarm.join(identity)
            await asyncio.sleep(1)
            await swarm.gossips[1].announce(announcement(6, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(1)  # the streams stand
            announced_at = swarm.clock.now_ms()
            envelope = await swarm.gossips[1].announce(announcement(7, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(30)
            assert [swarm.completions(number) for number in range(4)] == [[6, 7], [], [6, 7], [6, 7]]
            heard = swarm.heard[3][1]
            assert (heard.sender, heard.envelope) == (IDENTITIES[1].peer_id, envelope)
            assert 0 < heard.arrived_at - announced_at <= 2  # two hops of at most 1 ms
            assert [refusals.counters() for refusals in swarm.refusals] == [{}] * 4

    run_virtual(main())


@pytest.mark.parametrize("link", ["home", "mobile", "satellite", "lossy"])
def test_every_announcement_arrives_over_bad_links(link):
    async def main() -> None:
        async with swarm_of(link=link, seed=3) as swarm:
            for number, identity in enumerate(IDENTITIES[:6]):
                await swarm.join(identity, connect_to=max(0, (number - 1) // 2))
            for number in range(30):
                await swarm.gossips[number % 6].announce(announcement(number, IDENTITIES[number % 6]), TTL_MS)
            await asyncio.sleep(60)
            for number in range(6):
                assert swarm.completions(number) == [each for each in range(30) if each % 6 != number]

    run_virtual(main())


def test_same_seed_gives_the_same_run():
    async def main() -> list[list[tuple[str, int]]]:
        async with swarm_of(link="lossy", seed=5) as swarm:
            for identity in IDENTITIES[:4]:
                await swarm.join(identity)
            for number in range(20):
                await swarm.gossips[number % 4].announce(announcement(number, IDENTITIES[number % 4]), TTL_MS)
                await asyncio.sleep(0.3)
            await asyncio.sleep(20)
            return [[(heard.envelope, heard.arrived_at) for heard in each] for each in swarm.heard]

    assert run_virtual(main()) == run_virtual(main())


@pytest.mark.slow
def test_stalled_reader_and_late_joiner_get_all_of_2000_announcements():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1], reading=False)
            await asyncio.sleep(1)
            # 2,000 at once is far above an outbox: pushing alone would lose most.
            for number in range(2000):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0], rewards=8), TTL_MS)
            await asyncio.sleep(30)
            late = await swarm.join(IDENTITIES[2], connect_to=1)
            await asyncio.sleep(30)
            swarm.read(1)
            await asyncio.sleep(1)
            assert swarm.completions(1) == list(range(2000))
            assert swarm.completions(late) == list(range(2000))
            assert swarm.gossips[1].store.dropped_unread == 0

    run_virtual(main())


def test_killed_stack_and_partition_cost_no_announcement():
    async def main() -> None:
        async with swarm_of() as swarm:
            for identity in IDENTITIES[:3]:
                await swarm.join(identity)
            swarm.network.kill(IDENTITIES[1].peer_id)
            await swarm.gossips[0].announce(announcement(0, IDENTITIES[0]), TTL_MS)
            await swarm.gossips[1].announce(announcement(1, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(5)
            swarm.network.restart(IDENTITIES[1].peer_id)
            swarm.network.partition([[IDENTITIES[2].peer_id]])
            await swarm.gossips[2].announce(announcement(2, IDENTITIES[2]), TTL_MS)
            await asyncio.sleep(5)
            assert [swarm.completions(number) for number in range(3)] == [[1], [0], [0]]
            swarm.network.heal()
            await asyncio.sleep(15)
            assert [swarm.completions(number) for number in range(3)] == [[1, 2], [0, 2], [0, 1]]
            assert swarm.transports[1].restarts == 1

    run_virtual(main())


def test_new_neighbour_is_asked_at_once():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            for number in range(5):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            late = await swarm.join(IDENTITIES[1])
            await asyncio.sleep(1.5)
            assert swarm.completions(late) == list(range(5))

    run_virtual(main())


def test_replayed_envelope_counts_once_across_two_relaying_peers():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            relays = [await swarm.attach(identity) for identity in IDENTITIES[1:3]]
            envelope = sealed(1, IDENTITIES[5])

            async def offer(stream: Stream) -> None:
                while True:
                    await stream.receive()
                    await stream.send(encode(ReconcileReply(1)))
                    await stream.send(envelope)

            for relay in relays:
                relay.serve(RECONCILE_PROTOCOL, offer)
                await push(relay, IDENTITIES[0].peer_id, envelope)
            await asyncio.sleep(40)
            assert [heard.sender for heard in swarm.heard[0]] == [IDENTITIES[5].peer_id]

    run_virtual(main())


def test_replay_is_refused_after_a_restart_with_the_saved_cache():
    async def main() -> None:
        async with swarm_of() as swarm:
            replay = ReplayCache()
            await swarm.join(IDENTITIES[0], replay=replay)
            author = await swarm.attach(IDENTITIES[1])
            envelope = sealed(1, IDENTITIES[1])
            await push(author, IDENTITIES[0].peer_id, envelope)
            await asyncio.sleep(1)
            restored = ReplayCache()
            restored.restore(replay.snapshot())
            again = await swarm.join(IDENTITIES[2], connect_to=None, replay=restored)
            await author.connect(swarm.transports[-1].addresses()[0])
            await push(author, IDENTITIES[2].peer_id, envelope)
            await asyncio.sleep(1)
            assert (len(swarm.heard[0]), swarm.heard[again]) == (1, [])
            assert swarm.refusals[again].counters() == {}  # whoever pushes it cannot know

    run_virtual(main())


@pytest.mark.parametrize("old", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_what_was_counted_before_a_restart_blames_nobody_and_hides_nothing(old):
    """The replay memory outlives a restart, the held envelopes do not: a neighbour cannot know that."""

    async def main() -> None:
        async with swarm_of() as swarm:
            replay = ReplayCache()
            await swarm.join(IDENTITIES[0])
            before = await swarm.join(IDENTITIES[1], replay=replay)
            for number in range(old):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            await asyncio.sleep(30)
            assert swarm.completions(before) == list(range(old))
            await swarm.transports[before].close()
            missed = range(old, old + 100)
            for number in missed:
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            restored = ReplayCache()
            restored.restore(replay.snapshot())
            again = await swarm.join(IDENTITIES[1], replay=restored)
            await asyncio.sleep(5)
            assert swarm.completions(again) == list(missed)
            assert swarm.refusals[again].counters() == {}
            assert len(swarm.gossips[again].store) == old + 100  # for whoever comes next
            swarm.network.partition([[IDENTITIES[0].peer_id]])
            late = await swarm.join(IDENTITIES[2], connect_to=again)
            await asyncio.sleep(5)
            assert swarm.completions(late) == list(range(old + 100))

    run_virtual(main())


def test_counted_envelopes_beyond_the_room_are_asked_for_no_more():
    """They may not displace one another in a circle, either."""

    async def main() -> None:
        async with swarm_of() as swarm:
            counted = ReplayCache()
            for number in range(1, 101):
                counted.admit(
                    IDENTITIES[0].peer_id,
                    number,
                    VIRTUAL_EPOCH_MS,
                    VIRTUAL_EPOCH_MS + TTL_MS,
                    VIRTUAL_EPOCH_MS,
                )
            await swarm.join(IDENTITIES[0])
            for number in range(103):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            small = await swarm.join(
                IDENTITIES[1], replay=counted, limits=GossipLimits(author_count=10, batch_count=7)
            )
            await asyncio.sleep(5)
            assert swarm.completions(small) == [100, 101, 102]
            assert swarm.refusals[small].counters() == {}
            assert len(swarm.gossips[small].store) == 10
            held = set(swarm.gossips[small].store.short_digests())
            await asyncio.sleep(60)
            assert set(swarm.gossips[small].store.short_digests()) == held

    run_virtual(main())


def test_announcing_waits_for_no_network_and_only_the_newest_wait_for_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_module, "OUTBOX_COUNT", 4)

    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1])
            await asyncio.sleep(8)  # streams without work are closed
            open_stream, dead, opened = swarm.transports[0].open_stream, asyncio.Event(), []

            async def hangs(peer_id: PeerId, protocol: str) -> Stream:
                if protocol == ANNOUNCE_PROTOCOL:
                    opened.append(peer_id)
                    await dead.wait()
                return await open_stream(peer_id, protocol)

            swarm.transports[0].open_stream = hangs  # type: ignore[method-assign]
            async with asyncio.timeout(0.001):
                for number in range(20):
                    await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            await asyncio.sleep(0.5)
            assert opened == [IDENTITIES[1].peer_id]
            dead.set()
            await asyncio.sleep(0.1)
            assert swarm.completions(1) == [16, 17, 18, 19]
            await asyncio.sleep(15)  # meanwhile the neighbour reconciles
            assert swarm.completions(1) == list(range(20))

    run_virtual(main())


def test_a_neighbour_that_cannot_be_reached_is_left_for_a_while_and_reconciles() -> None:
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1])
            await asyncio.sleep(7)  # streams without work are closed
            open_stream, tried = swarm.transports[0].open_stream, []

            async def fails(peer_id: PeerId, protocol: str) -> Stream:
                if protocol == ANNOUNCE_PROTOCOL:
                    tried.append(peer_id)
                    raise TransportError("the network daemon died")
                return await open_stream(peer_id, protocol)

            swarm.transports[0].open_stream = fails  # type: ignore[method-assign]
            for number in range(10):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
                await asyncio.sleep(0.05)
            assert len(tried) == 1
            swarm.transports[0].open_stream = open_stream  # type: ignore[method-assign]
            await asyncio.sleep(1)
            await swarm.gossips[0].announce(announcement(10, IDENTITIES[0]), TTL_MS)
            await asyncio.sleep(0.1)
            assert swarm.completions(1)[-1:] == [10]
            await asyncio.sleep(15)
            assert swarm.completions(1) == list(range(11))

    run_virtual(main())


def test_a_hundred_nodes_hear_at_once_and_each_some_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last ten, who know three of the others, with many links each."""
    taken = list[PeerId]()

    class Counting(Push):
        def __init__(
            self, runtime: Runtime, transport: Transport, take: Callable[[bytes, PeerId], None]
        ) -> None:
            def counted(data: bytes, neighbour: PeerId) -> None:
                taken.append(neighbour)
                take(data, neighbour)

            super().__init__(runtime, transport, counted)

    monkeypatch.setattr("node.share.gossip.Push", Counting)
    identities = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, 101)]

    async def main() -> None:
        async with swarm_of(link="home") as swarm:
            for number, identity in enumerate(identities):
                await swarm.join(identity, connect_to=None)
                known = min(number, 10 if number < 90 else 3)
                for other in random.Random(number).sample(range(min(number, 90)), known):
                    await swarm.transports[number].connect(swarm.transports[other].addresses()[0])
            await asyncio.sleep(3)
            taken.clear()
            for author in (7, 95):
                await swarm.gossips[author].announce(announcement(author, identities[author]), TTL_MS)
            await asyncio.sleep(1)
            assert sum(map(len, swarm.heard)) == 2 * 99
            assert 4 * 200 < len(taken) < 8 * 200

    run_virtual(main())


def test_what_one_author_says_too_often_is_stored_and_not_pushed_on() -> None:
    async def main() -> None:
        async with swarm_of() as swarm:
            limits = GossipLimits(push_burst=5, pushed_per_s=0.001)
            await swarm.join(IDENTITIES[0], limits=limits)
            await swarm.join(IDENTITIES[1])
            await asyncio.sleep(1)
            author = await swarm.attach(IDENTITIES[2])
            await push(author, IDENTITIES[0].peer_id, *(sealed(n, IDENTITIES[2]) for n in range(1, 21)))
            await asyncio.sleep(0.5)
            assert swarm.completions(0) == list(range(1, 21))
            assert swarm.completions(1) == list(range(1, 6))

    run_virtual(main())


def test_a_neighbour_that_floods_is_cut_off_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs 1 KiB and its own 0.6: 40,000 bytes pay for 24, and an honest neighbour has its own."""
    monkeypatch.setattr(push_module, "BURST_BYTES", 40_000)
    monkeypatch.setattr(push_module, "BYTES_PER_S", 1.0)

    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1])
            await asyncio.sleep(1)
            flood = await swarm.attach(IDENTITIES[2])
            for _ in range(3):
                await push(flood, IDENTITIES[0].peer_id, *(sealed(n, IDENTITIES[2]) for n in range(1, 100)))
            await swarm.gossips[1].announce(announcement(777, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(0.5)
            assert 20 <= len(swarm.completions(0)) <= 27
            assert swarm.completions(0)[-1] == 777
            assert swarm.transports[0].refusals.counters() == {(IDENTITIES[2].peer_id, "rate"): 3}

    run_virtual(main())


def test_full_disk_refuses_the_envelope_and_is_told_once(caplog):
    class FullDisk(ReplayCache):
        def admit(self, *arguments: Any) -> None:
            raise OSError(28, "No space left on device")

    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0], replay=FullDisk())
            await swarm.join(IDENTITIES[1])
            for number in range(3):
                await swarm.gossips[1].announce(announcement(number, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(25)
            assert not swarm.tasks[0].done()
            assert swarm.heard[0] == []
            assert swarm.refusals[0].counters() == {(IDENTITIES[1].peer_id, "disk"): 3}

    run_virtual(main())
    told = [record.getMessage() for record in caplog.records if record.name == "node.share.gossip"]
    assert len(told) == 1
    assert "No space left on device" in told[0]


def test_closed_swarm_hears_members_only_and_answers_members_only():
    async def main() -> None:
        charter = charter_of(closed=True)
        until = VIRTUAL_EPOCH_MS + 3_600_000
        token = issue_token(
            IDENTITIES[0], charter, IDENTITIES[1].peer_id, now_ms=VIRTUAL_EPOCH_MS, expires_at=until
        )
        swarm_name = swarm_id(charter)
        topic = announcement_topic(swarm_name)
        async with swarm_of(charter=charter) as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1])
            stranger = await swarm.attach(STRANGER)
            by_stranger = sealed(1, STRANGER, swarm=swarm_name, topic=topic)
            assert swarm.memberships[0].admit(IDENTITIES[1].peer_id, token)  # the handshake
            await push(stranger, IDENTITIES[0].peer_id, by_stranger)
            await push(swarm.transports[1], IDENTITIES[0].peer_id, by_stranger)
            said = announcement(2, IDENTITIES[1])
            await swarm.gossips[1].announce(msgspec.structs.replace(said, token=token), TTL_MS)
            stream = await stranger.open_stream(IDENTITIES[0].peer_id, RECONCILE_PROTOCOL)
            await asyncio.sleep(1)
            assert swarm.completions(0) == [2]
            assert swarm.transports[0].refusals.counters() == {
                (STRANGER.peer_id, "stranger"): 2,
                (IDENTITIES[1].peer_id, "stranger"): 1,
            }
            await stream.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1", "decode"),
        (b"\xff" * 300, "decode"),
        (sealed(1, IDENTITIES[1], swarm="c" * 64), "swarm"),
        (sealed(1, IDENTITIES[1], topic="another"), "topic"),
        (sealed(1, IDENTITIES[1])[:-2] + b"\xff\xff", "signature"),
    ],
)
def test_bad_gossip_is_counted_against_whoever_pushed_it_and_remembered(data, reason):
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            hostile = await swarm.attach(IDENTITIES[1])
            for _ in range(3):
                await push(hostile, IDENTITIES[0].peer_id, data)
            await asyncio.sleep(1)
            assert swarm.heard[0] == []
            # Once, not three times: the same bytes are not judged again.
            assert swarm.transports[0].refusals.counters() == {(IDENTITIES[1].peer_id, reason): 1}

    run_virtual(main())


def test_expired_announcements_are_neither_served_nor_given_to_a_slow_reader():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            await swarm.join(IDENTITIES[1], reading=False)
            await swarm.gossips[0].announce(announcement(1, IDENTITIES[0]), 5000)
            await swarm.gossips[0].announce(announcement(2, IDENTITIES[0]), TTL_MS)
            await asyncio.sleep(6)
            late = await swarm.join(IDENTITIES[2])
            swarm.read(1)
            await asyncio.sleep(15)
            assert [swarm.completions(number) for number in (1, late)] == [[2], [2]]
            assert [len(gossip.store) for gossip in swarm.gossips] == [1, 1, 1]

    run_virtual(main())


def test_own_announcements_come_back_after_a_restart_and_are_served_but_not_heard():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            first = await swarm.join(IDENTITIES[1])
            await asyncio.sleep(1)
            await swarm.gossips[first].announce(announcement(1, IDENTITIES[1]), TTL_MS)
            await asyncio.sleep(1)
            await swarm.transports[first].close()
            again = await swarm.join(IDENTITIES[1])
            await asyncio.sleep(15)
            assert swarm.heard[again] == []
            assert len(swarm.gossips[again].store) == 1

    run_virtual(main())


def test_announcement_that_cannot_be_sent_is_our_error():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            with pytest.raises(LocalProtocolError):
                await swarm.gossips[0].announce(announcement(1, IDENTITIES[0], rewards=0), TTL_MS)
            with pytest.raises(LocalProtocolError):
                await swarm.gossips[0].announce(announcement(1, IDENTITIES[0]), 0)
            assert len(swarm.gossips[0].store) == 0

    run_virtual(main())


# --- reconciliation with hostile neighbours ---


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (encode(ReconcileRequest("another topic", b"")), "topic"),
        (encode(ReconcileRequest(TOPIC, b"1234567")), "decode"),
        (b"\xc1", "decode"),
    ],
)
def test_bad_request_closes_the_stream_and_is_counted(request_bytes, reason):
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            hostile = await swarm.attach(IDENTITIES[1])
            stream = await hostile.open_stream(IDENTITIES[0].peer_id, RECONCILE_PROTOCOL)
            await stream.send(request_bytes)
            await asyncio.sleep(1)
            assert swarm.transports[0].refusals.counters() == {(IDENTITIES[1].peer_id, reason): 1}
            await stream.close()

    run_virtual(main())


def test_neighbour_that_asks_for_everything_again_and_again_is_cut_off():
    async def main() -> None:
        async with swarm_of() as swarm:
            limits = GossipLimits(served_burst_bytes=400_000, served_bytes_per_s=1000)
            await swarm.join(IDENTITIES[0], limits=limits)
            for number in range(50):
                await swarm.gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
            greedy = await swarm.attach(IDENTITIES[1])
            stream = await greedy.open_stream(IDENTITIES[0].peer_id, RECONCILE_PROTOCOL)
            replies = 0

            async def ask_on() -> None:
                nonlocal replies
                while True:
                    await stream.send(encode(ReconcileRequest(TOPIC, b"")))
                    reply = decode(await stream.receive(), ReconcileReply, max_bytes=64)
                    for _ in range(reply.count):
                        await stream.receive()
                    replies += 1

            with pytest.raises(TransportError, match="early"):
                await ask_on()
            # Each costs 64 KiB and 50 envelopes of about 0.8 KB: 400,000 pay for three.
            assert replies == 3
            assert swarm.transports[0].refusals.counters() == {(IDENTITIES[1].peer_id, "reconcile_rate"): 1}

    run_virtual(main())


def test_neighbour_that_sends_garbage_is_left_after_17_pieces():
    async def main() -> None:
        async with swarm_of() as swarm:
            await swarm.join(IDENTITIES[0])
            hostile = await swarm.attach(IDENTITIES[1])

            async def lie(stream: Stream) -> None:
                await stream.receive()
                await stream.send(encode(ReconcileReply(65_536)))
                for number in range(100):
                    await stream.send(b"garbage %d" % number)

            hostile.serve(RECONCILE_PROTOCOL, lie)
            await asyncio.sleep(1.5)
            assert swarm.refusals[0].counters() == {(IDENTITIES[1].peer_id, "decode"): 17}

    run_virtual(main())


# --- the store ---


def stored(number: int, author: Identity, size: int = 100, expires_at: int = 1000) -> StoredAnnouncement:
    heard = Heard(
        author.peer_id, announcement(number, author), 0, digest(b"%s %d" % (author.peer_id.encode(), number))
    )
    return StoredAnnouncement(heard, b"x" * size, expires_at)


def test_store_displaces_an_authors_own_oldest_and_counts_what_nobody_read():
    store = AnnouncementStore(max_count=100, max_bytes=10_000, author_count=3, author_bytes=250)
    loud, quiet = IDENTITIES[1], IDENTITIES[2]
    store.add(stored(0, quiet), unread=True)
    items = [stored(number, loud) for number in range(4)]
    for item in items:
        store.add(item, unread=True)
    # Two of 100 bytes fit into 250.
    assert [short_digest(item.heard.envelope) in store for item in items] == [False, False, True, True]
    assert store.dropped_unread == 2
    read = [store.next_unread(0) for _ in range(4)]
    assert [heard and heard.announcement.policy_version for heard in read] == [0, 2, 3, None]


def test_full_store_cuts_whoever_takes_most():
    store = AnnouncementStore(max_count=8, max_bytes=10**6, author_count=100, author_bytes=10**6)
    for number in range(2):
        store.add(stored(number, IDENTITIES[2]), unread=False)
    for number in range(7):
        store.add(stored(number, IDENTITIES[1]), unread=False)
    shorts = [short_digest(stored(number, IDENTITIES[2]).heard.envelope) for number in range(2)]
    assert all(short in store for short in shorts)
    assert len(store) == 7


def test_store_gives_what_is_missing_oldest_first_within_bounds():
    store = AnnouncementStore(max_count=100, max_bytes=10**6, author_count=100, author_bytes=10**6)
    items = [stored(number, IDENTITIES[1], size=100 + number) for number in range(5)]
    for item in items:
        store.add(item, unread=False)
    store.add(stored(9, IDENTITIES[1], expires_at=5), unread=False)
    known = {short_digest(items[0].heard.envelope)}
    assert list(map(len, store.missing(known, max_count=2, max_bytes=10**6, now_ms=10))) == [101, 102]
    assert list(map(len, store.missing(known, max_count=9, max_bytes=202, now_ms=10))) == [101]
    assert list(map(len, store.missing(known, max_count=9, max_bytes=1, now_ms=10))) == [101]
    store.expire(10)
    assert len(store) == 5


# --- over real daemons ---


@pytest.mark.net
@pytest.mark.slow
async def test_killed_daemon_and_late_joiner_lose_no_announcement(tmp_path):
    from node.transport.hivemind import HivemindTransport

    limits = GossipLimits(reconcile_interval_s=0.5, peer_poll_s=0.05)
    clock = SystemClock()
    transports: list[HivemindTransport] = []
    gossips: list[Gossip] = []
    tasks: list[asyncio.Task[None]] = []
    heard: list[set[int]] = []
    grown = asyncio.Event()

    async def join(number: int) -> None:
        path = tmp_path / f"{number}.key"
        path.write_bytes(IDENTITIES[number].to_libp2p())
        path.chmod(0o600)
        transport = HivemindTransport(path)
        await transport.start()
        runtime = make_runtime(clock)
        membership, peers = make_peers(runtime, IDENTITIES[number], CHARTER)
        gossip = Gossip(runtime, membership, peers, transport, MemorySequence(1), limits=limits)
        collected: set[int] = set()

        async def read() -> None:
            async for each in gossip.heard():
                collected.add(int(each.announcement.completions, 16))
                grown.set()

        transports.append(transport)
        gossips.append(gossip)
        heard.append(collected)
        tasks.extend([asyncio.create_task(gossip.run()), asyncio.create_task(read())])
        await gossip.listening.wait()
        if number > 0:
            await transport.connect(transports[0].addresses()[0])

    async def all_heard(number: int, expected: set[int]) -> None:
        async with asyncio.timeout(30):
            while heard[number] != expected:
                grown.clear()
                await grown.wait()

    await join(0)
    await join(1)
    for number in range(400):  # more than an outbox takes at once
        await gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
    os.kill(transports[1].daemon_process_id, 9)
    for number in range(400, 420):
        await gossips[0].announce(announcement(number, IDENTITIES[0]), TTL_MS)
        await gossips[1].announce(announcement(1000 + number, IDENTITIES[1]), TTL_MS)
    await all_heard(1, set(range(420)))
    await all_heard(0, set(range(1400, 1420)))
    assert transports[1].restarts == 1
    await join(2)
    await all_heard(2, set(range(420)) | set(range(1400, 1420)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for transport in reversed(transports):
        await transport.close()
