"""Own groups go out: what is announced, what is served, what is kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from node.clock import VirtualClock, run_virtual
from node.share import publish
from node.share.accepted import Accepted
from node.share.gossip import Gossip
from node.share.publish import GroupPublisher, announce
from node.state.stores import MemorySequence
from node.transport.memory import MemoryNetwork, MemoryTransport
from protocol.codec import decode, digest, encode
from protocol.constants import MAX_FRAME_BYTES
from protocol.errors import LocalProtocolError, TransportError
from protocol.messages import (
    Announcement,
    BlobRef,
    BlobReply,
    BlobRequest,
    RolloutGroup,
    RolloutReply,
    RolloutRequest,
)
from protocol.receipts import proves, slot_digest
from protocol.topics import BLOB_PROTOCOL, ROLLOUT_PROTOCOL
from tests.node.runtimes import make_peers, make_runtime
from tests.node.verify.world import World, identity

WORLD = World(group_size=3)
ALICE, BOB = identity("alice"), identity("bob")
MIXED = WORLD.group(ALICE.peer_id)


def with_rewards(*rewards: float, slot: int = 0) -> RolloutGroup:
    group = WORLD.group(ALICE.peer_id, slot=slot)
    rollouts = tuple(
        msgspec.structs.replace(rollout, reward=reward)
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def blob(body: bytes) -> BlobRef:
    return BlobRef(digest(body), len(body))


# --- announce ----------------------------------------------------------------------------------------------


def test_a_group_with_mixed_rewards_is_offered_with_its_body() -> None:
    group = with_rewards(0.0, 1.0, 0.0)
    body = encode(group)
    announcement = announce(group, blob(body))
    assert announcement.body == BlobRef(digest(body), len(body))
    assert announcement.rewards == (0.0, 1.0, 0.0)
    assert announcement.completions == slot_digest(ALICE.peer_id, group.lineage, group.prompt, group.rollouts)
    assert (announcement.lineage, announcement.prompt) == (group.lineage, group.prompt)
    assert announcement.policy_version == group.policy_version


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
def test_a_group_with_equal_rewards_has_a_body_that_nobody_needs(reward: float) -> None:
    group = with_rewards(reward, reward, reward)
    announcement = announce(group, blob(encode(group)))
    assert announcement.body == blob(encode(group))
    assert announcement.rewards == (reward,) * 3
    assert not announcement.mixed


def test_a_body_above_the_cap_is_never_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "MAX_BLOB_BYTES", 100)
    with pytest.raises(LocalProtocolError, match="is above the cap of 100"):
        announce(MIXED, blob(encode(MIXED)))


# --- serving -----------------------------------------------------------------------------------------------


class Stand:
    """A publisher and one customer."""

    def __init__(self, **options: int) -> None:
        clock = VirtualClock()
        network = MemoryNetwork(clock=clock)
        self.seller: MemoryTransport = network.transport(ALICE.peer_id)
        self.buyer: MemoryTransport = network.transport(BOB.peer_id)
        runtime = make_runtime(clock)
        membership, peers = make_peers(runtime, ALICE, WORLD.charter)
        self.gossip = Gossip(runtime, membership, peers, self.seller, MemorySequence(1))
        self.publisher = GroupPublisher(membership, self.seller, self.gossip, **options)

    async def __aenter__(self) -> Stand:
        await self.seller.start()
        await self.buyer.start()
        await self.buyer.connect(self.seller.addresses()[0])
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.buyer.close()
        await self.seller.close()

    async def ask_rollout(self, request: RolloutRequest) -> RolloutReply:
        stream = await self.buyer.open_stream(self.seller.peer_id, ROLLOUT_PROTOCOL)
        await stream.send(encode(request))
        return decode(await stream.receive(), RolloutReply, max_bytes=MAX_FRAME_BYTES)

    async def publish(self, group: RolloutGroup) -> Announcement:
        """As the rollout stage does."""
        body = encode(group)
        rewards = tuple(rollout.reward for rollout in group.rollouts)
        own = Accepted(digest(body), group, (), rewards, arrived_at=0, own=True)
        return await self.publisher.publish(own, body)

    async def ask(self, wanted: str) -> tuple[int, list[bytes]]:
        stream = await self.buyer.open_stream(self.seller.peer_id, BLOB_PROTOCOL)
        await stream.send(encode(BlobRequest(wanted)))
        size = decode(await stream.receive(), BlobReply, max_bytes=1024).size
        frames: list[bytes] = []
        while sum(map(len, frames)) < size:
            frames.append(await stream.receive())
        with pytest.raises(TransportError):
            await stream.receive()  # nothing more comes
        return size, frames


def test_a_body_is_served_by_its_digest() -> None:
    async def main() -> None:
        async with Stand() as stand:
            announcement = await stand.publish(MIXED)
            size, frames = await stand.ask(announcement.body.digest)
            assert frames == [encode(MIXED)]
            assert size == announcement.body.size
            assert (stand.publisher.announced, stand.publisher.bodies_served) == (1, 1)
            assert len(stand.gossip.store) == 1

    run_virtual(main())


def test_a_large_body_comes_in_full_frames() -> None:
    async def main() -> None:
        async with Stand() as stand:
            body = bytes(MAX_FRAME_BYTES) + b"end"
            announcement = announce(MIXED, blob(body))
            await stand.publisher.offer(announcement, body)
            size, frames = await stand.ask(digest(body))
            assert [len(frame) for frame in frames] == [MAX_FRAME_BYTES, 3]
            assert b"".join(frames) == body
            assert size == len(body)

    run_virtual(main())


def test_what_is_not_here_has_size_zero() -> None:
    async def main() -> None:
        async with Stand() as stand:
            await stand.publish(with_rewards(1.0, 1.0, 1.0))
            assert await stand.ask("0" * 64) == (0, [])
            assert (stand.publisher.announced, stand.publisher.bodies_served) == (1, 0)

    run_virtual(main())


@pytest.mark.parametrize("index", range(3))
def test_one_rollout_of_a_receipt_comes_with_its_proof(index: int) -> None:
    async def main() -> None:
        async with Stand() as stand:
            receipt = await stand.publish(with_rewards(1.0, 1.0, 1.0))
            reply = await stand.ask_rollout(RolloutRequest(receipt.completions, index))
            assert reply.rollout == with_rewards(1.0, 1.0, 1.0).rollouts[index]
            assert proves(ALICE.peer_id, receipt, index, reply.rollout, reply.path)
            assert not proves(BOB.peer_id, receipt, index, reply.rollout, reply.path)

    run_virtual(main())


def test_a_rollout_that_is_not_here() -> None:
    async def main() -> None:
        async with Stand() as stand:
            receipt = await stand.publish(MIXED)
            for request in (RolloutRequest("0" * 64, 0), RolloutRequest(receipt.completions, 3)):
                assert await stand.ask_rollout(request) == RolloutReply(None, b"")

    run_virtual(main())


def test_a_receipt_is_answered_for_as_long_as_the_charter_says() -> None:
    kept = WORLD.charter.receipt_windows

    def in_window(window: int) -> RolloutGroup:
        group = with_rewards(1.0, 1.0, 1.0)
        return msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, window=window))

    async def main() -> None:
        async with Stand() as stand:
            made = [await stand.publish(in_window(window)) for window in range(kept + 2)]
            sizes = [(await stand.ask(each.body.digest))[0] > 0 for each in made]
            assert sizes == [False] + [True] * (kept + 1)
            assert (await stand.ask_rollout(RolloutRequest(made[0].completions, 0))).rollout is None
            assert (await stand.ask_rollout(RolloutRequest(made[1].completions, 0))).rollout is not None

    run_virtual(main())


def test_the_oldest_bodies_go_when_they_take_too_much() -> None:
    size = len(encode(with_rewards(0.0, 0.0, 1.0)))

    async def main() -> None:
        async with Stand(max_bytes=5 * size // 2) as stand:
            made = [await stand.publish(with_rewards(0.0, 0.0, 1.0, slot=slot)) for slot in range(4)]
            sizes = [(await stand.ask(each.body.digest))[0] > 0 for each in made]
            assert sizes == [False, False, True, True]
            assert stand.publisher.announced == 4

    run_virtual(main())


@pytest.mark.parametrize("request_bytes", [b"\xc1garbage", encode(BlobReply(5)), b"x" * 1025])
def test_a_bad_request_closes_that_stream_and_is_counted(request_bytes: bytes) -> None:
    async def main() -> None:
        async with Stand() as stand:
            await stand.publish(MIXED)
            stream = await stand.buyer.open_stream(stand.seller.peer_id, BLOB_PROTOCOL)
            await stream.send(request_bytes)
            with pytest.raises(TransportError):
                await stream.receive()
            assert [peer for peer, _ in stand.seller.refusals.counters()] == [BOB.peer_id]
            assert (await stand.ask(digest(encode(MIXED))))[0] > 0  # others are still served

    run_virtual(main())


def test_a_dead_network_is_no_error_of_publishing() -> None:
    async def main() -> None:
        async with Stand() as stand:
            stand.seller.stack_died()
            await stand.publish(MIXED)
            assert len(stand.gossip.store) == 1  # neighbours get it by reconciliation
            stand.seller.stack_restarted()
            assert (await stand.ask(digest(encode(MIXED))))[0] > 0

    run_virtual(main())
