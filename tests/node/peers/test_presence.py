"""Handshakes, bootstrapping and the charter's way to a newcomer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.clock import SystemClock, VirtualClock, run_virtual
from node.events import Event, Notice, PeerStatus
from node.peers import links, presence
from node.peers.presence import Presence, ask_clock, clock_skew_ms, fetch_charter, say_hello
from node.state.stores import MemorySequence
from node.transport.base import Stream, StreamHandler
from node.transport.limits import Refusals
from node.transport.memory import MemoryNetwork, MemoryTransport
from protocol.annex import issue_token, sign_annex, token_name
from protocol.charter import MAX_CHARTER_BYTES, charter_bytes, found, swarm_id
from protocol.codec import decode, encode
from protocol.constants import PROTOCOL_VERSION
from protocol.errors import CharterError, RemoteProtocolError, TransportError
from protocol.identity import Identity
from protocol.messages import Annex, Charter, Hello, HelloReply, Lineage, MemberToken, PeerRecord
from protocol.preamble import PREAMBLE
from protocol.records import open_record, record_validator, seal_record
from protocol.topics import CHARTER_PROTOCOL, HELLO_PROTOCOL, peer_key
from tests.node.runtimes import make_peers, make_runtime
from tests.node.verify.world import identity

RULES: dict[str, Any] = {
    "name": "test",
    "environments": [{"name": "chain_sum"}],
    "tokenizers": [{"name": "letters", "digest": "a" * 64, "vocab_size": 10, "end_token_ids": [1]}],
}
FOUNDER, ALICE, BOB, CAROL = (identity(name) for name in ("founder", "alice", "bob", "carol"))
CHARTER = found(FOUNDER, RULES, created_at=1)
OTHER = found(FOUNDER, RULES | {"name": "other"}, created_at=1)
CLOSED = found(FOUNDER, RULES | {"closed": True}, created_at=1)


def record_of(one: Identity, addresses: tuple[str, ...] | None = None) -> PeerRecord:
    if addresses is None:
        addresses = (f"/memory/p2p/{one.peer_id}",)
    return PeerRecord("node", PROTOCOL_VERSION, addresses, Lineage(one.peer_id, "b" * 64, "a" * 64))


class Member:
    """One node's presence, what it told its operator, and what it refused beside the transport."""

    def __init__(self, town: Town, one: Identity, charter: Charter, bootstraps: tuple[str, ...]) -> None:
        self.transport: MemoryTransport = town.network.transport(
            one.peer_id, validate_record=record_validator(swarm_id(charter), town.clock.now_ms)
        )
        self.notices: list[tuple[str, str]] = []
        self.refusals = Refusals()
        runtime = make_runtime(town.clock)
        runtime.bus.subscribe(self._told)
        membership, self.peers = make_peers(runtime, one, charter, refusals=self.refusals)
        membership.token = town.tokens.get(one.peer_id)
        self.membership = membership
        self.presence = Presence(
            runtime,
            membership,
            self.peers,
            self.transport,
            MemorySequence(1),
            name="node",
            bootstraps=bootstraps,
        )
        self.presence.lineage = record_of(one).lineage
        self.task: asyncio.Task[None] | None = None

    def _told(self, event: Event) -> None:
        assert isinstance(event, Notice)
        self.notices.append((event.level, event.text))

    def table(self) -> tuple[PeerStatus, ...]:
        return self.peers.table(self.presence.links, self.presence.known, "")

    @property
    def refused(self) -> dict[tuple[str, str], int]:
        return self.refusals.counters()


class Town:
    """Members and strangers on one network."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.members: list[Member] = []
        self.tokens: dict[str, MemberToken] = {}
        """By peer; whoever settles has the one that was issued before."""

    def admit(self, one: Identity, *, for_ms: int = 3_600_000) -> MemberToken:
        now_ms = self.clock.now_ms()
        token = issue_token(FOUNDER, CLOSED, one.peer_id, now_ms=now_ms, expires_at=now_ms + for_ms)
        self.tokens[one.peer_id] = token
        return token

    def publish(self, *members: Member, **fields: Any) -> Annex:
        """A new annex of the closed swarm, known to these members."""
        annex = Annex(
            swarm_id(CLOSED), **({"sequence": 1, "issuer": FOUNDER.peer_id, "created_at": 1} | fields)
        )
        signed = sign_annex(FOUNDER, CLOSED, annex)
        for member in members:
            assert member.membership.renew(signed)
        return signed

    async def settle(
        self, one: Identity, *others: str, charter: Charter = CHARTER, running: bool = True
    ) -> Member:
        bootstraps = tuple(f"/memory/p2p/{other}" for other in others)
        member = Member(self, one, charter, bootstraps)
        await member.transport.start()
        if running:
            member.task = asyncio.create_task(member.presence.run())
        self.members.append(member)
        return member

    async def stranger(self, one: Identity, hello: StreamHandler | None = None) -> MemoryTransport:
        transport = self.network.transport(one.peer_id)
        await transport.start()
        if hello is not None:
            transport.serve(HELLO_PROTOCOL, hello)
        return transport


def town(test: Callable[[Town], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Town()
        await test(made)
        for member in made.members:
            if member.task is not None:
                assert not member.task.done(), "presence ended"
                member.task.cancel()
                await asyncio.gather(member.task, return_exceptions=True)
            await member.transport.close()

    run_virtual(main())


def replies(reply: HelloReply | bytes) -> StreamHandler:
    """A neighbour that answers every handshake with this."""

    async def handler(stream: Stream) -> None:
        await stream.send(PREAMBLE)
        assert await stream.receive() == PREAMBLE
        await stream.receive()
        await stream.send(reply if isinstance(reply, bytes) else encode(reply))

    return handler


async def never_replies(stream: Stream) -> None:
    await stream.receive()
    await asyncio.Event().wait()


async def replies_with_no_preamble(stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"GET / HTTP/1.1")


VERSION_1 = "it speaks protocol version 1, this node 2: it must be updated"


async def speaks_version_1(stream: Stream) -> None:
    """What it would say after its preamble has fields that this version does not know."""
    await stream.send(b"murmuration/1")
    await stream.receive()


# --- handshake ---------------------------------------------------------------------------------------------


def test_two_nodes_learn_of_each_other_through_one_bootstrap() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        assert bob.presence.known == {ALICE.peer_id: record_of(ALICE)}
        assert alice.presence.known == {BOB.peer_id: record_of(BOB)}
        assert alice.presence.connected == {BOB.peer_id}
        assert [*alice.notices, *bob.notices, *alice.refused, *bob.refused] == []
        stored = await alice.transport.get(peer_key(swarm_id(CHARTER), BOB.peer_id))
        assert stored is not None
        found_record = open_record(
            peer_key(swarm_id(CHARTER), BOB.peer_id),
            stored,
            swarm_id=swarm_id(CHARTER),
            now_ms=town.clock.now_ms(),
        )
        assert found_record == record_of(BOB)

    town(test)


def test_another_lineage_is_told_to_every_neighbour_at_once() -> None:
    """A follower that has another owner: its neighbours ask the right peers for weights."""

    async def test(made: Town) -> None:
        bob = await made.settle(BOB)
        alice = await made.settle(ALICE, BOB.peer_id)
        carol = await made.settle(CAROL, BOB.peer_id, ALICE.peer_id)
        await asyncio.sleep(5)
        owned = Lineage(BOB.peer_id, "b" * 64, "a" * 64)
        assert bob.presence.known[ALICE.peer_id].lineage != owned
        alice.presence.lineage = owned
        await asyncio.sleep(2)
        for member in (bob, carol):
            assert member.presence.known[ALICE.peer_id].lineage == owned

    town(test)


def test_the_record_is_renewed_before_it_expires() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        await town.settle(BOB, ALICE.peer_id)
        for _ in range(6):
            await asyncio.sleep(presence.RECORD_TTL_MS / 1000 * 0.9)
            assert await alice.transport.get(peer_key(swarm_id(CHARTER), BOB.peer_id)) is not None

    town(test)


@pytest.mark.parametrize(
    ("charter", "one", "hello", "sentence", "reason"),
    [
        (
            CHARTER,
            BOB,
            Hello(swarm_id(OTHER), record_of(BOB)),
            f"this node belongs to swarm {swarm_id(CHARTER)[:12]} (test), not {swarm_id(OTHER)[:12]}",
            "other_swarm",
        ),
        (
            CLOSED,
            BOB,
            Hello(swarm_id(CLOSED), record_of(BOB)),
            f"swarm test is closed and {BOB.peer_id} shows no valid token; ask its founder for one",
            "other_swarm",
        ),
    ],
    ids=["swarm", "closed"],
)
def test_who_does_not_belong_is_told_why_in_one_sentence(
    charter: Charter, one: Identity, hello: Hello, sentence: str, reason: str
) -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE, charter=charter, running=False)
        stranger = await town.stranger(one)
        reply, _ = await say_hello(stranger, ALICE.peer_id, hello, town.clock)
        assert (reply.peer, reply.refusal) == (None, sentence)
        await asyncio.sleep(0.1)
        assert alice.transport.refusals.counters() == {(one.peer_id, reason): 1}
        assert alice.presence.known == {}

    town(test)


def test_another_version_is_told_on_both_sides_in_one_sentence_whatever_fields_it_has() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        older = await town.stranger(BOB, speaks_version_1)
        await older.connect(alice.transport.addresses()[0])
        await asyncio.sleep(30)
        sentence = f"no handshake with {BOB.peer_id}: {VERSION_1}"
        assert alice.notices == [("warning", sentence)]
        assert alice.refused == {(BOB.peer_id, "version"): 1}  # and is not asked every second
        # The other way round: the older one connects, and is told our version before it says more.
        other = await town.stranger(FOUNDER)
        for _ in range(3):
            stream = await other.open_stream(ALICE.peer_id, HELLO_PROTOCOL)
            await stream.send(b"murmuration/1")
            assert await stream.receive() == PREAMBLE
            with pytest.raises(TransportError):
                await stream.receive()  # and nothing more is read
        assert alice.notices[1:] == [("warning", sentence.replace(BOB.peer_id, FOUNDER.peer_id))]
        assert alice.transport.refusals.counters() == {(FOUNDER.peer_id, "version"): 3}

    town(test)


def test_whoever_asks_another_version_for_the_time_is_told() -> None:
    async def test(town: Town) -> None:
        older = await town.stranger(ALICE, speaks_version_1)
        with pytest.raises(TransportError, match=VERSION_1):
            await ask_clock(await town.stranger(BOB), older.peer_id, town.clock)

    town(test)


def test_members_of_a_closed_swarm_are_welcome() -> None:
    async def test(town: Town) -> None:
        town.admit(ALICE), town.admit(BOB)
        await town.settle(FOUNDER, charter=CLOSED)
        alice = await town.settle(ALICE, FOUNDER.peer_id, charter=CLOSED)
        bob = await town.settle(BOB, ALICE.peer_id, charter=CLOSED)  # they admit each other by token
        await asyncio.sleep(3)
        assert set(alice.presence.known) == {FOUNDER.peer_id, BOB.peer_id}
        assert bob.membership.is_member(ALICE.peer_id)
        assert (alice.notices, bob.notices) == ([], [])

    town(test)


def test_an_expired_token_admits_nobody() -> None:
    async def test(town: Town) -> None:
        town.admit(BOB, for_ms=60_000)
        alice = await town.settle(ALICE, charter=CLOSED)
        await town.settle(BOB, ALICE.peer_id, charter=CLOSED)
        await asyncio.sleep(5)
        assert alice.membership.is_member(BOB.peer_id)
        await asyncio.sleep(60)
        assert not alice.membership.is_member(BOB.peer_id)

    town(test)


def test_a_newer_annex_goes_from_neighbour_to_neighbour() -> None:
    async def test(town: Town) -> None:
        bobs = town.admit(BOB)
        town.admit(ALICE)
        founder = await town.settle(FOUNDER, charter=CLOSED)
        alice = await town.settle(ALICE, FOUNDER.peer_id, charter=CLOSED)
        bob = await town.settle(BOB, ALICE.peer_id, charter=CLOSED)
        await asyncio.sleep(5)
        first = town.publish(founder, bootstraps=("/memory/p2p/" + identity("new").peer_id,))
        await asyncio.sleep(5)
        assert alice.membership.annex == bob.membership.annex == first
        second = town.publish(alice, sequence=2, revoked=(token_name(bobs),))
        await asyncio.sleep(5)
        assert founder.membership.annex == second
        assert not alice.membership.is_member(BOB.peer_id)
        assert not founder.membership.admit(BOB.peer_id, bobs)

    town(test)


def test_an_annex_that_the_disk_does_not_take_ends_nothing() -> None:
    async def test(town: Town) -> None:
        def full(_: Annex) -> bool:
            raise OSError(28, "No space left on device", "/home/annex.bin")

        town.admit(ALICE)
        founder = await town.settle(FOUNDER, charter=CLOSED)
        alice = await town.settle(ALICE, FOUNDER.peer_id, charter=CLOSED)
        alice.membership.renew = full  # type: ignore[method-assign]
        town.publish(founder)
        await asyncio.sleep(60)
        ((level, text),) = alice.notices
        assert level == "warning"
        assert text.startswith("the annex cannot be kept: [Errno 28] No space left on device: '/home/annex")

    town(test)


def test_an_annex_by_a_stranger_or_with_another_content_is_refused() -> None:
    async def test(town: Town) -> None:
        town.admit(ALICE)
        founder = await town.settle(FOUNDER, charter=CLOSED)
        annex = town.publish(founder)
        alice = await town.settle(ALICE, FOUNDER.peer_id, charter=CLOSED)
        for wrong, reason in (
            (msgspec.structs.replace(annex, sequence=9), "annex_signature"),
            (sign_annex(FOUNDER, CLOSED, msgspec.structs.replace(annex, created_at=2)), "annex_conflict"),
        ):
            with pytest.raises(RemoteProtocolError) as refused:
                founder.membership.renew(wrong)
            assert refused.value.reason == reason
        await asyncio.sleep(5)
        assert alice.membership.annex == founder.membership.annex == annex

    town(test)


def test_another_version_of_a_task_is_told_on_both_sides_and_blames_nobody() -> None:
    async def test(town: Town) -> None:
        name = CHARTER.environments[0].name
        both = [await town.settle(ALICE, running=False), await town.settle(BOB, ALICE.peer_id, running=False)]
        for member, pin in zip(both, ("task==1", "task==2"), strict=True):
            member.membership.pins[name] = pin
            member.task = asyncio.create_task(member.presence.run())
        await asyncio.sleep(30)
        alice, bob = both
        for member, other, (own, theirs) in ((alice, bob, "12"), (bob, alice, "21")):
            ((level, sentence),) = member.notices
            assert level == "warning"
            assert sentence == (
                f"environment_mismatch with {other.membership.peer_id}: {name} is task=={theirs} there and "
                f"task=={own} here; groups of it are not exchanged until both have the same"
            )
        assert set(alice.refused) == {(BOB.peer_id, "environment_mismatch")}
        assert list(alice.presence.known) == [BOB.peer_id]  # a neighbour like any other

    town(test)


def test_a_refusal_is_shown_once_in_one_inert_line() -> None:
    async def test(town: Town) -> None:
        text = "\x1b[2J\x1b]8;;http://evil\x1b\\no\nwarning: run rm -rf"
        reply = HelloReply(peer=None, clock_at=town.clock.now_ms(), refusal=text)
        await town.stranger(BOB, replies(reply))
        alice = await town.settle(ALICE, BOB.peer_id)
        await asyncio.sleep(30)
        ((level, notice),) = alice.notices
        assert level == "warning"
        assert notice.startswith(f"{BOB.peer_id} refuses this node: ")
        assert notice.isprintable()
        assert alice.presence.known[BOB.peer_id].name == "unknown"

    town(test)


def test_many_strangers_cannot_fill_the_screen_with_refusals() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        for number in range(40):
            reply = HelloReply(peer=None, clock_at=town.clock.now_ms(), refusal=f"no {number}")
            stranger = await town.stranger(identity(f"stranger{number}"), replies(reply))
            await stranger.connect(alice.transport.addresses()[0])
        await asyncio.sleep(5)
        assert len(alice.notices) == presence.REFUSALS_TOLD

    town(test)


# --- hostile and absent neighbours -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (replies(b"\xc1\xc1"), "decode"),
        (replies(b"\x00" * 9000), "frame_size"),
        (replies(encode(Hello("0" * 64, record_of(BOB)))), "decode"),
        (replies_with_no_preamble, "decode"),
        (never_replies, "deadline"),
    ],
    ids=["garbage", "too_long", "another_record", "no_preamble", "silence"],
)
def test_a_neighbour_that_answers_nonsense_is_counted_and_delays_nobody(
    handler: StreamHandler, reason: str
) -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        for number in range(5):
            mallory = await town.stranger(identity(f"mallory{number}"), handler)
            await mallory.connect(alice.transport.addresses()[0])
        await asyncio.sleep(1)
        await town.settle(BOB, ALICE.peer_id, running=False)
        await town.members[1].transport.connect(alice.transport.addresses()[0])
        await asyncio.sleep(2 * presence.HELLO_TIMEOUT_S + 2)
        assert list(alice.presence.known) == [BOB.peer_id]
        assert {found_reason for _, found_reason in alice.refused} == {reason}
        assert len({peer_id for peer_id, _ in alice.refused}) == 5

    town(test)


def test_a_neighbour_without_handshake_is_no_error() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        stranger = await town.stranger(BOB)
        await stranger.connect(alice.transport.addresses()[0])
        await asyncio.sleep(5)
        assert (alice.presence.known, alice.refused, alice.notices) == ({}, {}, [])
        assert alice.presence.links.peers == {BOB.peer_id}
        assert alice.presence.connected == set()  # nobody has answered

    town(test)


def test_a_bad_hello_closes_that_stream_and_is_counted() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        stranger = await town.stranger(BOB)
        for data in (b"\xc1", b"x" * 9000, encode(record_of(BOB))):
            stream = await stranger.open_stream(ALICE.peer_id, HELLO_PROTOCOL)
            await stream.send(PREAMBLE)
            await stream.receive()
            await stream.send(data)
            with pytest.raises(TransportError):
                await stream.receive()
        assert alice.transport.refusals.counters() == {
            (BOB.peer_id, "decode"): 2,
            (BOB.peer_id, "frame_size"): 1,
        }
        for data in (b"GET / HTTP/1.1", b"x" * 33):
            stream = await stranger.open_stream(ALICE.peer_id, HELLO_PROTOCOL)
            await stream.send(data)
        await asyncio.sleep(0.1)
        assert alice.transport.refusals.counters() == {
            (BOB.peer_id, "decode"): 3,
            (BOB.peer_id, "frame_size"): 2,
        }
        assert alice.presence.known == {}

    town(test)


def test_known_neighbours_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "KNOWN_PEERS", 3)

    async def test(town: Town) -> None:
        alice = await town.settle(ALICE, running=False)
        for number in range(6):
            one = identity(f"peer{number}")
            await say_hello(
                await town.stranger(one), ALICE.peer_id, Hello(swarm_id(CHARTER), record_of(one)), town.clock
            )
        assert list(alice.presence.known) == [identity(f"peer{number}").peer_id for number in (3, 4, 5)]

    town(test)


# --- frozen neighbours --------------------------------------------------------------------------------------


def test_a_neighbour_whose_application_stands_still_is_frozen_and_then_connected_again() -> None:
    """Its link stands all the while, as with a process that is stopped beside a living daemon."""

    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(120)
        links = alice.presence.links
        assert links.connected == alice.presence.connected == {BOB.peer_id}
        assert town.clock.now_ms() - links.answered_at(BOB.peer_id) <= 30_000  # nobody has to have news
        assert bob.task is not None
        bob.task.cancel()
        bob.transport.serve(HELLO_PROTOCOL, never_replies)
        await asyncio.sleep(60)
        assert (links.peers, links.connected, links.frozen) == ({BOB.peer_id}, set(), {BOB.peer_id})
        assert 3 <= alice.refused[BOB.peer_id, "deadline"] <= 6  # with a back-off
        row = next(row for row in alice.table() if row.peer_id == BOB.peer_id)
        assert (row.connected, row.frozen, row.answered_at) == (False, True, links.answered_at(BOB.peer_id))
        bob.transport.serve(HELLO_PROTOCOL, bob.presence.answer_hello)
        bob.task = asyncio.create_task(bob.presence.run())
        await asyncio.sleep(5)
        assert (links.connected, links.frozen) == ({BOB.peer_id}, set())
        assert len(alice.notices) == 0

    town(test)


def test_a_silent_neighbour_delays_no_news_to_others() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        silent = await town.stranger(CAROL, never_replies)
        await silent.connect(alice.transport.addresses()[0])
        await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        for owner in (CAROL, BOB, CAROL):
            alice.presence.lineage = Lineage(owner.peer_id, "b" * 64, "a" * 64)
            await asyncio.sleep(2)
            assert town.members[1].presence.known[ALICE.peer_id].lineage == alice.presence.lineage

    town(test)


# --- bootstraps --------------------------------------------------------------------------------------------


def test_bootstraps_are_tried_with_growing_pauses_and_told_once() -> None:
    async def test(town: Town) -> None:
        bob = await town.settle(BOB, ALICE.peer_id)
        tries: list[float] = []
        connect = bob.transport.connect

        async def counted(address: str) -> str:
            tries.append(town.clock.monotonic_s())
            return await connect(address)

        bob.transport.connect = counted  # type: ignore[method-assign]
        await asyncio.sleep(200)
        pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert pauses[0] <= 2
        assert sum(pauses[:6]) <= 15  # a bootstrap that comes up seconds later is found soon
        assert all(later >= earlier - presence.ROUND_S for earlier, later in itertools.pairwise(pauses))
        assert max(pauses) > 15
        assert max(pauses) <= presence.MAX_BACKOFF_S + presence.ROUND_S
        ((level, text),) = bob.notices
        assert level == "warning"
        assert "no bootstrap answers yet" in text
        assert "training alone, still trying" in text
        await town.settle(ALICE)
        await asyncio.sleep(presence.MAX_BACKOFF_S + 5)
        assert bob.presence.connected == {ALICE.peer_id}
        assert list(bob.presence.known) == [ALICE.peer_id]
        before = len(tries)
        await asyncio.sleep(100)
        assert len(tries) == before  # nothing is missing

    town(test)


def test_one_dead_bootstrap_does_not_hide_a_living_one() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, identity("dead").peer_id, ALICE.peer_id, BOB.peer_id)
        await asyncio.sleep(60)
        assert list(bob.presence.known) == [ALICE.peer_id]
        assert bob.notices == []

    town(test)


def test_a_neighbour_that_vanishes_and_comes_back_is_there_again() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        town.network.partition([[ALICE.peer_id]])
        await asyncio.sleep(60)
        assert bob.presence.connected == alice.presence.connected == frozenset()
        town.network.heal()
        await asyncio.sleep(5)
        assert bob.presence.connected == {ALICE.peer_id}
        town.network.kill(BOB.peer_id)  # bob's own stack: its calls fail
        await asyncio.sleep(60)
        town.network.restart(BOB.peer_id)
        await asyncio.sleep(5)
        assert bob.presence.connected == {ALICE.peer_id}
        assert alice.presence.connected == {BOB.peer_id}
        assert bob.presence.known == {ALICE.peer_id: record_of(ALICE)}
        assert (alice.refused, bob.refused) == ({}, {})

    town(test)


# --- the way to further peers ------------------------------------------------------------------------------


def counted_reads(town: Town, member: Member) -> list[tuple[float, str]]:
    """Time and key of whatever this member reads from the DHT from now on."""
    reads: list[tuple[float, str]] = []
    get = member.transport.get

    async def counted(key: str) -> bytes | None:
        reads.append((town.clock.monotonic_s(), key))
        return await get(key)

    member.transport.get = counted  # type: ignore[method-assign]
    return reads


def test_two_who_know_only_a_third_find_each_other_through_the_dht() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        carol = await town.settle(CAROL, ALICE.peer_id)
        await asyncio.sleep(10)
        assert bob.presence.connected == carol.presence.connected == {ALICE.peer_id}
        bob.presence.seek(CAROL.peer_id)  # its announcement came by gossip
        await asyncio.sleep(3)
        assert bob.presence.connected == {ALICE.peer_id, CAROL.peer_id}
        assert carol.presence.connected == {ALICE.peer_id, BOB.peer_id}
        assert bob.presence.known[CAROL.peer_id] == record_of(CAROL)
        assert carol.presence.known[BOB.peer_id] == record_of(BOB)
        assert [*bob.notices, *carol.notices, *bob.refused, *carol.refused] == []

    town(test)


def test_address_in_a_record_must_be_its_owners() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await town.stranger(FOUNDER)
        carol = await town.settle(CAROL, ALICE.peer_id)
        honest = carol.transport.addresses
        carol.transport.addresses = lambda: (f"/memory/p2p/{FOUNDER.peer_id}", "nonsense", "")  # type: ignore[method-assign]
        await asyncio.sleep(3)
        bob.presence.seek(CAROL.peer_id)
        await asyncio.sleep(60)
        assert bob.presence.connected == {ALICE.peer_id}
        carol.transport.addresses = honest  # type: ignore[method-assign]  # the new address is stored soon
        await asyncio.sleep(90)
        assert bob.presence.connected == {ALICE.peer_id, CAROL.peer_id}

    town(test)


def test_only_a_few_are_sought_at_a_time() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        reads = counted_reads(town, bob)
        bob.presence.seek(BOB.peer_id)
        bob.presence.seek(ALICE.peer_id)
        for number in range(presence.SOUGHT_PEERS + 50):
            bob.presence.seek(identity(f"ghost{number}").peer_id)
        assert len(bob.presence.sought) == presence.SOUGHT_PEERS
        await asyncio.sleep(30)
        rounds = Counter(at_s for at_s, _ in reads)
        assert max(rounds.values()) == presence.SEEK_PER_ROUND
        assert not any(one.peer_id in key for _, key in reads for one in (ALICE, BOB))

    town(test)


def test_who_is_not_found_is_sought_ever_more_rarely() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        reads = counted_reads(town, bob)
        bob.presence.seek(CAROL.peer_id)
        await asyncio.sleep(2000)
        pauses = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(reads)]
        assert pauses[:6] == pytest.approx([2, 4, 8, 16, 32, 64], abs=1.01)
        assert max(pauses) <= presence.MAX_SEEK_BACKOFF_S + 2 * presence.ROUND_S

    town(test)


def test_search_that_hangs_stops_neither_handshakes_nor_itself() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        get = bob.transport.get

        async def hangs(key: str) -> bytes | None:
            if CAROL.peer_id in key:
                return await get(key)
            return await asyncio.Event().wait()  # type: ignore[func-returns-value]

        bob.transport.get = hangs  # type: ignore[method-assign]
        bob.presence.seek(identity("ghost").peer_id)
        await asyncio.sleep(2)
        newcomer = await town.settle(FOUNDER, BOB.peer_id)
        await asyncio.sleep(3)
        assert FOUNDER.peer_id in bob.presence.known
        await town.settle(CAROL, ALICE.peer_id)
        bob.presence.seek(CAROL.peer_id)
        await asyncio.sleep(presence.SEEK_TIMEOUT_S + 5)
        assert CAROL.peer_id in bob.presence.connected
        assert alice.refused == newcomer.refused == {}

    town(test)


def test_forged_record_leads_nowhere() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        await asyncio.sleep(3)
        _, forged = seal_record(
            FOUNDER,
            record_of(FOUNDER),
            swarm_id=swarm_id(CHARTER),
            sequence=1,
            now_ms=town.clock.now_ms(),
            ttl_ms=60_000,
        )

        async def get(_: str) -> bytes:
            return forged

        bob.transport.get = get  # type: ignore[method-assign, assignment]
        bob.presence.seek(CAROL.peer_id)
        await asyncio.sleep(10)
        assert bob.presence.connected == {ALICE.peer_id}

    town(test)


def test_enough_neighbours_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ENOUGH_NEIGHBOURS", 2)

    async def test(town: Town) -> None:
        await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id)
        others = [identity(f"peer{number}") for number in range(4)]
        for one in others:
            await town.settle(one, ALICE.peer_id)
        await asyncio.sleep(3)
        for one in others:
            bob.presence.seek(one.peer_id)
            await asyncio.sleep(5)
        assert len(bob.presence.connected) == 2

    town(test)


def test_record_that_could_not_be_stored_is_stored_soon() -> None:
    async def test(town: Town) -> None:
        alice = await town.settle(ALICE)
        bob = await town.settle(BOB, ALICE.peer_id, running=False)
        store = bob.transport.store
        fails = True
        tries = 0

        async def unsure(key: str, value: bytes, expires_at: int) -> None:
            nonlocal tries
            tries += 1
            if fails:
                raise TransportError("the network daemon died")
            await store(key, value, expires_at)

        bob.transport.store = unsure  # type: ignore[method-assign]
        bob.task = asyncio.create_task(bob.presence.run())
        await asyncio.sleep(45)
        assert 3 <= tries <= 6
        fails = False
        await asyncio.sleep(presence.STORE_AGAIN_S + 2)
        assert await alice.transport.get(peer_key(swarm_id(CHARTER), BOB.peer_id)) is not None

    town(test)


# --- clocks ------------------------------------------------------------------------------------------------


def test_the_skew_is_the_median() -> None:
    assert clock_skew_ms([]) == 0
    assert clock_skew_ms([5000]) == 5000
    assert clock_skew_ms([10, -20, 2**53]) == 10  # one liar of three moves nothing
    assert clock_skew_ms([1, 2]) == clock_skew_ms([2, 1]) == 1
    assert clock_skew_ms([-9000, 20]) == clock_skew_ms([20, 9000]) == 20  # nor one of two


def test_a_wrong_clock_is_told_once_when_most_neighbours_agree() -> None:
    async def test(town: Town) -> None:
        def clock(offset_ms: int) -> StreamHandler:
            async def handler(stream: Stream) -> None:
                await stream.send(PREAMBLE)
                await stream.receive()
                await stream.receive()
                reply = HelloReply(record_of(BOB), clock_at=town.clock.now_ms() + offset_ms)
                await stream.send(encode(reply))

            return handler

        alice = await town.settle(ALICE)
        expected = 0
        for number, offset_ms in enumerate([100, 9000, -300, 9000, 9000, 9000]):
            stranger = await town.stranger(identity(f"peer{number}"), clock(offset_ms))
            await stranger.connect(alice.transport.addresses()[0])
            await asyncio.sleep(2)
            expected += number == 4  # 100, 9000, -300, 9000, 9000: the median is off
            assert len(alice.notices) == min(expected, 1)
        ((level, text),) = alice.notices
        assert level == "warning"
        assert text.startswith("this clock is 9 s behind the neighbours'")

    town(test)


def test_anybody_can_be_asked_for_the_time_whatever_the_swarm() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE, charter=CLOSED)
        stranger = await town.stranger(BOB)
        assert abs(await ask_clock(stranger, ALICE.peer_id, town.clock)) <= 1
        liar = await town.stranger(identity("liar"), replies(b"\xc1"))
        with pytest.raises(TransportError, match="answers, but not as a node of this protocol"):
            await ask_clock(stranger, liar.peer_id, town.clock)

    town(test)


# --- charter -----------------------------------------------------------------------------------------------


def test_the_charter_is_served_to_whoever_asks() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE, charter=CLOSED)
        assert await fetch_charter(await town.stranger(BOB), ALICE.peer_id) == CLOSED

    town(test)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (charter_bytes(msgspec.structs.replace(CHARTER, group_size=9)), "signature of charter"),
        (charter_bytes(msgspec.structs.replace(CHARTER, founder=BOB.peer_id)), "signature of charter"),
        (b"\xc1\xc1", "no charter"),
        (bytes(MAX_CHARTER_BYTES), "no charter"),
    ],
    ids=["changed", "other_founder", "garbage", "longest"],
)
def test_a_charter_that_does_not_hold_is_refused(data: bytes, message: str) -> None:
    async def test(town: Town) -> None:
        async def serve(stream: Stream) -> None:
            await stream.send(data)

        liar = await town.stranger(ALICE)
        liar.serve(CHARTER_PROTOCOL, serve)
        with pytest.raises(CharterError, match=message):
            await fetch_charter(await town.stranger(BOB), ALICE.peer_id)

    town(test)


def test_hello_replies_are_signed_by_nobody_and_carry_the_time() -> None:
    async def test(town: Town) -> None:
        await town.settle(ALICE, running=False)
        stranger = await town.stranger(BOB)
        stream = await stranger.open_stream(ALICE.peer_id, HELLO_PROTOCOL)
        await stream.send(PREAMBLE)
        assert await stream.receive() == PREAMBLE
        await stream.send(encode(Hello(swarm_id(CHARTER), record_of(BOB))))
        reply = decode(await stream.receive(), HelloReply, max_bytes=8192)
        assert reply == HelloReply(record_of(ALICE), town.clock.now_ms())

    town(test)


# --- over real daemons -------------------------------------------------------------------------------------


@pytest.mark.net
@pytest.mark.slow
async def test_two_real_nodes_who_know_only_a_third_become_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons' own routing connects so few by itself; what the search would find is in the DHT too. At
    the end a node stands still whose daemon lives."""
    from node.transport.hivemind import HivemindTransport

    monkeypatch.setattr(links, "ASK_AFTER_S", 0.5)
    clock = SystemClock()
    transports: list[HivemindTransport] = []
    presences: list[Presence] = []
    refusals = Refusals()
    tasks: list[asyncio.Task[None]] = []

    async def settle(one: Identity) -> None:
        path = tmp_path / f"{one.peer_id}.key"
        path.write_bytes(one.to_libp2p())
        path.chmod(0o600)
        validate = record_validator(swarm_id(CHARTER), clock.now_ms)
        transport = HivemindTransport(path, validate_record=validate)
        await transport.start()
        transports.append(transport)
        runtime = make_runtime(clock)
        runtime.bus.subscribe(lambda event: pytest.fail(str(event)))
        membership, peers = make_peers(runtime, one, CHARTER, refusals=refusals)
        presences.append(
            Presence(
                runtime,
                membership,
                peers,
                transport,
                MemorySequence(1),
                name="node",
                bootstraps=transports[0].addresses()[:1] if len(transports) > 1 else (),
            )
        )
        presences[-1].lineage = record_of(one).lineage
        tasks.append(asyncio.create_task(presences[-1].run()))

    async def eventually(met: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while True:
                if met():
                    return
                await asyncio.sleep(0.05)

    for one in (ALICE, BOB, CAROL):
        await settle(one)
    bob, carol = presences[1:]
    await eventually(lambda: None not in (bob.stored, carol.stored))
    bob.seek(CAROL.peer_id)
    await eventually(lambda: {BOB.peer_id, CAROL.peer_id} <= bob.known.keys() | carol.known.keys())
    await eventually(lambda: CAROL.peer_id in bob.connected and BOB.peer_id in carol.connected)
    assert bob.known[CAROL.peer_id] == record_of(CAROL, transports[2].addresses())
    reply, _ = await say_hello(transports[1], CAROL.peer_id, Hello(swarm_id(CHARTER), record_of(BOB)), clock)
    assert reply.peer == record_of(CAROL, transports[2].addresses())
    # What a node reads that nobody has connected to carol yet.
    assert await bob.look_up(CAROL.peer_id) == transports[2].addresses()
    assert await transports[1].connect(transports[2].addresses()[0]) == CAROL.peer_id
    assert refusals.counters() == {}
    monkeypatch.setattr(links, "ANSWER_S", 1.5)
    monkeypatch.setattr(presence, "HELLO_TIMEOUT_S", 0.5)
    tasks[2].cancel()
    transports[2].serve(HELLO_PROTOCOL, never_replies)
    await eventually(lambda: CAROL.peer_id in bob.links.frozen)
    assert CAROL.peer_id in bob.links.peers
    assert CAROL.peer_id not in bob.connected
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for transport in reversed(transports):
        await transport.close()
