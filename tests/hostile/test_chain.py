"""Hostile owners and members of a lineage: what they send about chains, and what they sign. Each is refused
by rule or deadline and counted with its reason; the version that runs stays, and honest links go on."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest

from node.clock import VirtualClock, run_virtual
from node.transport.base import Stream
from node.transport.memory import MemoryNetwork
from node.weights.chain.bf16 import U16, to_bits
from protocol.codec import decode, encode
from protocol.constants import MAX_CHAIN_LINKS
from protocol.delta import encode as encode_delta
from protocol.delta import max_delta_bytes, weights_digest
from protocol.errors import TransportError
from protocol.links import MAX_SIGNED_LINK_BYTES, sign_link
from protocol.messages import ChainReply, ChainRequest, ChunkedBlob, LinkKind, SignedLink, WeightsLink
from protocol.topics import CHAIN_PROTOCOL
from tests.node.weights.lineage import SWARM, Member, Weights, identity_of, lineage_of
from tests.node.weights.simulation import inline

pytestmark = pytest.mark.usefixtures("compiled_delta")

SHAPES = {"w": (64, 32), "norm": (32,)}
Handler = Callable[[Stream], Awaitable[None]]


class Swarm:
    """Member 0 owns the lineage, member 1 follows it, member 2 says that it does. Whoever is hostile serves
    what a test tells it to."""

    def __init__(self, folder, *, keep_bytes: int = 1 << 30) -> None:
        """`keep_bytes`: what the victim's store holds."""
        self.network = MemoryNetwork(seed=1, clock=VirtualClock())
        self.owner, self.victim, self.member = self.members = [
            Member(self.network, number, folder, keep_bytes=keep_bytes if number == 1 else 1 << 30)
            for number in range(3)
        ]
        for each in self.members:
            each.members = [other.peer_id for other in self.members if other is not each]
        self.weights = Weights(SHAPES)
        self.base = self.weights.base
        self.publisher = self.owner.publisher(self.base)

    async def __aenter__(self) -> Swarm:
        for each in self.members:
            await each.transport.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.members:
            await each.close()

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.publisher.publish(version, self.weights.step())

    @property
    def bits(self) -> dict[str, U16]:
        """The newest version, as the owner has it."""
        return to_bits(self.weights.state)

    async def sign(
        self, version: int, data: bytes, *, kind: LinkKind = LinkKind.DELTA, **fields
    ) -> WeightsLink:
        """The owner signs whatever it is told to, and offers the blob."""
        chain = self.owner.chains.open(self.owner.lineage, [weights_digest(self.base)])
        head = chain.head
        values = {
            "lineage": self.owner.lineage,
            "policy_version": version,
            "kind": kind,
            "base_version": version if kind is LinkKind.ANCHOR else head.policy_version,
            "base": weights_digest(self.base) if kind is LinkKind.ANCHOR else head.result,
            "result": "e" * 64,
            "blob": self.owner.store.add(data).blob,
            "created_at": 1,
        }
        link = WeightsLink(**(values | fields))
        await self.owner.chains.commit(chain, sign_link(self.owner.identity, SWARM, link), inline)
        return link

    def blamed(self, member: Member) -> dict[str, int]:
        """What the victim holds against this one; nobody else must be blamed."""
        assert {peer_id for peer_id, _ in self.victim.failures} <= {member.peer_id}
        return {reason: count for (_, reason), count in self.victim.failures.items()}


async def reply(stream: Stream, *links: SignedLink, count: int | None = None) -> None:
    decode(await stream.receive(), ChainRequest, max_bytes=1024)
    await stream.send(encode(ChainReply(count=len(links) if count is None else count)))
    for link in links:
        await stream.send(encode(link))


# --- answers about chains ---


async def garbage(swarm: Swarm, stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\xff" * 32)


async def long_reply(swarm: Swarm, stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes(1 << 20))


async def long_link(swarm: Swarm, stream: Stream) -> None:
    await reply(stream, count=1)
    await stream.send(bytes(MAX_SIGNED_LINK_BYTES + 1))


async def too_many(swarm: Swarm, stream: Stream) -> None:
    await stream.receive()
    whole = encode(ChainReply(count=MAX_CHAIN_LINKS))
    await stream.send(whole[:-2] + (MAX_CHAIN_LINKS + 1).to_bytes(2, "big"))


async def forged(swarm: Swarm, stream: Stream) -> None:
    link = swarm.owner.chains.of(swarm.owner.peer_id, swarm.owner.lineage.base_model).links()[-1]
    await reply(stream, SignedLink(encode(next_link(swarm)), link.signature))


async def of_another_lineage(swarm: Swarm, stream: Stream) -> None:
    link = msgspec.structs.replace(next_link(swarm), lineage=lineage_of(2))
    await reply(stream, sign_link(identity_of(2), SWARM, link))


async def of_another_swarm(swarm: Swarm, stream: Stream) -> None:
    await reply(stream, sign_link(swarm.owner.identity, "6" * 64, next_link(swarm)))


async def with_a_gap(swarm: Swarm, stream: Stream) -> None:
    link = msgspec.structs.replace(next_link(swarm), base_version=1000, policy_version=1001)
    await reply(stream, sign_link(swarm.owner.identity, SWARM, link))


async def a_link_of_junk(swarm: Swarm, stream: Stream) -> None:
    await reply(stream, SignedLink(b"junk", bytes(64)))


async def a_byte_every_ten_seconds(swarm: Swarm, stream: Stream) -> None:
    await reply(stream, count=1)
    writer = stream.channel
    while True:
        await writer.write(b"\0")
        await asyncio.sleep(10.0)


async def silent(swarm: Swarm, stream: Stream) -> None:
    await asyncio.sleep(1000.0)


def next_link(swarm: Swarm) -> WeightsLink:
    head = swarm.owner.chains.of(swarm.owner.peer_id, swarm.owner.lineage.base_model).head
    return msgspec.structs.replace(
        head,
        kind=LinkKind.DELTA,
        base_version=head.policy_version,
        policy_version=head.policy_version + 1,
        base=head.result,
        result="f" * 64,
    )


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (garbage, "decode"),
        (long_reply, "frame_size"),
        (long_link, "frame_size"),
        (too_many, "decode"),
        (forged, "link_signature"),
        (of_another_lineage, "chain_owner"),
        (of_another_swarm, "link_signature"),
        (with_a_gap, "chain_gap"),
        (a_link_of_junk, "decode"),
        (a_byte_every_ten_seconds, "deadline"),
        (silent, "deadline"),
    ],
)
def test_answers_that_are_wrong_are_counted_and_the_owner_is_followed(tmp_path, handler, reason):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            asked = 0

            async def serve(stream: Stream) -> None:
                nonlocal asked
                asked += 1
                await handler(swarm, stream)

            swarm.member.transport.serve(CHAIN_PROTOCOL, serve, deadline_s=1000.0)
            await swarm.publish(0, 1)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(1)
            await asyncio.sleep(60.0)
            await swarm.publish(2)
            await swarm.victim.until(2, within_s=1.0)
            await asyncio.sleep(60.0)
            blamed = swarm.blamed(swarm.member)
            assert blamed.keys() == {reason}
            assert asked <= 2 + 120 / 15 + 5, asked  # it rests ever longer
            assert swarm.victim.reached[-1] == (2, weights_digest(swarm.bits))
            assert not swarm.victim.tracker.stopped

    run_virtual(main())


@pytest.mark.slow
def test_a_thousand_heads_of_one_peer_cost_little(tmp_path):
    """The owner signs a thousand versions that do not exist, again and again."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            base = weights_digest(swarm.base)
            signed = [
                sign_link(
                    swarm.owner.identity,
                    SWARM,
                    WeightsLink(
                        lineage=swarm.owner.lineage,
                        policy_version=version,
                        kind=LinkKind.ANCHOR,
                        base_version=version,
                        base=base,
                        result="e" * 64,
                        blob=ChunkedBlob(f"{version:064x}", 1000, 16 * 1024),
                        created_at=1,
                    ),
                )
                for version in range(2 * MAX_CHAIN_LINKS)
            ]
            calls = 0

            async def serve(stream: Stream) -> None:
                nonlocal calls
                first = (calls * MAX_CHAIN_LINKS) % len(signed)
                calls += 1
                await reply(stream, *signed[first : first + MAX_CHAIN_LINKS])

            swarm.owner.transport.serve(CHAIN_PROTOCOL, serve)
            tracemalloc.start()
            swarm.victim.follow(swarm.base)
            await asyncio.sleep(120.0)
            grown, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert grown < 8 << 20
            assert swarm.victim.version == -1
            chain = swarm.victim.chains.of(swarm.owner.peer_id, swarm.owner.lineage.base_model)
            assert len(chain) <= 2
            files = list((tmp_path / "1" / "state" / "chain").iterdir())
            assert sum(path.stat().st_size for path in files) < 1 << 18
            blamed = swarm.blamed(swarm.owner)
            assert blamed.keys() <= {"chain_rate", "chain_rollback", "deadline"}

    run_virtual(main())


# --- what an owner signs ---


def not_finite(swarm: Swarm) -> tuple[bytes, dict]:
    new = {name: array.copy() for name, array in swarm.bits.items()}
    new["w"][3, 3] = 0x7F80
    return encode_delta(swarm.bits, new), {"result": weights_digest(new)}


def another_result(swarm: Swarm) -> tuple[bytes, dict]:
    new = {name: array ^ np.uint16(1) for name, array in swarm.bits.items()}
    return encode_delta(swarm.bits, new, new_digest="e" * 64), {}


def another_delta(swarm: Swarm) -> tuple[bytes, dict]:
    new = {name: array ^ np.uint16(1) for name, array in swarm.bits.items()}
    return encode_delta(swarm.bits, new), {}


def other_shapes(swarm: Swarm) -> tuple[bytes, dict]:
    old = Weights({"w": (640, 320), "more": (5,)}).base
    new = {name: array ^ np.uint16(1) for name, array in old.items()}
    head = swarm.owner.chains.of(swarm.owner.peer_id, swarm.owner.lineage.base_model).head
    return encode_delta(old, new, base_digest=head.result, new_digest="e" * 64)[:4000], {}


def cut_short(swarm: Swarm) -> tuple[bytes, dict]:
    data, _ = another_delta(swarm)
    return data[:-1], {"result": data_result(data)}


def more_than_it_declares(swarm: Swarm) -> tuple[bytes, dict]:
    data, _ = another_delta(swarm)
    return data + b"\0", {"result": data_result(data)}


def larger_than_any_delta(swarm: Swarm) -> tuple[bytes, dict]:
    return bytes(max_delta_bytes(swarm.base) + 1), {}


def no_delta(swarm: Swarm) -> tuple[bytes, dict]:
    return b"anything", {}


def data_result(data: bytes) -> str:
    from protocol.delta import read_header

    return read_header(data).result


BLOBS = {
    not_finite: "delta_not_finite",
    another_result: "delta_result",
    another_delta: "delta_link",
    other_shapes: None,
    cut_short: None,
    more_than_it_declares: "delta_trailing",
    larger_than_any_delta: "delta_size",
    no_delta: None,
}


@pytest.mark.parametrize("make", BLOBS)
def test_signed_blobs_that_are_wrong_change_nothing_and_the_next_anchor_mends(tmp_path, make):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.publish(0, 1)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(1)
            good = weights_digest(swarm.bits)
            data, fields = make(swarm)
            await swarm.sign(2, data, **fields)
            await asyncio.sleep(20.0)
            blamed = swarm.blamed(swarm.owner)
            assert sum(blamed.values()) == 1
            assert BLOBS[make] is None or blamed == {BLOBS[make]: 1}
            tracker = swarm.victim.tracker
            assert [tracker.misled] == list(blamed)
            assert (tracker.version, tracker.digest, tracker.lag) == (1, good, 1)
            assert weights_digest(swarm.victim.bits) == good
            assert swarm.victim.reached[-1] == (1, good)

            new = {name: array ^ np.uint16(2) for name, array in swarm.bits.items()}
            mended = encode_delta(swarm.base, new)
            await swarm.sign(3, mended, kind=LinkKind.ANCHOR, result=weights_digest(new))
            await swarm.victim.until(3)
            assert swarm.victim.reached[-1] == (3, weights_digest(new))
            assert sum(swarm.blamed(swarm.owner).values()) == 1  # the bad one was not tried again
            assert swarm.victim.peers.hard == {swarm.owner.peer_id: 1}

    run_virtual(main())


@pytest.mark.parametrize("kind", LinkKind)
def test_a_signed_but_non_existent_base_is_refused(tmp_path, kind):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.publish(0, 1)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(1)
            data, _ = another_delta(swarm)
            bad = msgspec.structs.replace(
                next_link(swarm),
                kind=kind,
                base="d" * 64,
                base_version=2 if kind is LinkKind.ANCHOR else 1,
                blob=swarm.owner.store.add(data).blob,
            )
            served = [sign_link(swarm.owner.identity, SWARM, bad)]

            async def serve(stream: Stream) -> None:
                await reply(stream, *served)

            swarm.owner.transport.serve(CHAIN_PROTOCOL, serve)
            await asyncio.sleep(60.0)
            blamed = swarm.blamed(swarm.owner)
            assert blamed.keys() == {"chain_base"}
            assert 1 <= blamed["chain_base"] <= 10
            assert swarm.victim.version == 1
            assert not swarm.victim.exchange.progress()

    run_virtual(main())


def test_a_version_whose_blob_does_not_come_leaves_the_one_before(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.publish(0, 1)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(1)
            await swarm.sign(2, b"promised", blob=ChunkedBlob("c" * 64, 3000, 16 * 1024))
            await asyncio.sleep(200.0)
            assert swarm.victim.version == 1
            assert swarm.blamed(swarm.owner) == {}  # whoever had it may have let it go
            assert not swarm.victim.tracker.misled
            new = {name: array ^ np.uint16(2) for name, array in swarm.bits.items()}
            await swarm.sign(
                3, encode_delta(swarm.base, new), kind=LinkKind.ANCHOR, result=weights_digest(new)
            )
            await swarm.victim.until(3)

    run_virtual(main())


def test_a_blob_that_is_only_too_large_for_this_node_is_no_lie(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, keep_bytes=3000) as swarm:
            await swarm.publish(0, 1)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(1)
            swarm.weights.state = Weights(SHAPES, seed=1).state
            await swarm.publish(2)
            await asyncio.sleep(20.0)
            assert swarm.victim.version == 1
            assert swarm.blamed(swarm.owner) == {"blob_size": 1}
            assert not swarm.victim.tracker.misled
            assert len(swarm.victim.notices) == 1

    run_virtual(main())


# --- requests ---


def test_requests_that_are_wrong_are_counted(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.publish(0)
            for data in (b"\xff" * 100, b"\x80", bytes(513), encode(ChainReply(count=3))):
                stream = await swarm.member.transport.open_stream(swarm.owner.peer_id, CHAIN_PROTOCOL)
                await stream.send(data)
                with pytest.raises(TransportError):
                    await stream.receive()
                await stream.close()
            counted = swarm.owner.transport.refusals.counters()
            assert {peer_id for peer_id, _ in counted} == {swarm.member.peer_id}
            assert sum(counted.values()) == 4

    run_virtual(main())


@pytest.mark.slow
def test_a_flood_of_requests_leaves_room_for_others(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.publish(*range(8))
            lineage = swarm.owner.lineage

            async def flood() -> None:
                while True:
                    try:
                        await swarm.member.chains.ask(swarm.owner.peer_id, lineage, None, 15.0)
                    except TransportError:
                        await asyncio.sleep(0.1)

            floods = [asyncio.create_task(flood()) for _ in range(50)]
            await asyncio.sleep(5.0)
            swarm.victim.follow(swarm.base)
            await swarm.victim.until(7, within_s=5.0)
            await swarm.publish(8)
            await swarm.victim.until(8, within_s=5.0)
            for each in floods:
                each.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            assert not swarm.victim.failures

    run_virtual(main())
