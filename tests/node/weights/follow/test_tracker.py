"""Whole followers of one owner over the memory transport, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from node.clock import VirtualClock, run_virtual
from node.transport.memory import MemoryNetwork
from node.weights.publish import VersionPublisher
from protocol.delta import weights_digest
from protocol.links import open_link, sign_link
from protocol.messages import LinkKind, WeightsLink
from tests.node.weights.lineage import BASE_MODEL, SWARM, Member, Weights
from tests.node.weights.simulation import HOME, inline

pytestmark = pytest.mark.usefixtures("compiled_delta")

SHAPES = {"embed": (64, 32), "layer.w": (96, 32), "norm": (32,)}


class Swarm:
    """Member 0 owns the lineage of them all."""

    def __init__(self, folder: Path, count: int, *, mbit: float = 0.0, **options) -> None:
        self.folder = folder
        self.network = MemoryNetwork(seed=1, link=HOME, clock=VirtualClock())
        self.options = options
        self.mbit = mbit
        self.members: list[Member] = []
        for number in range(count):
            self.add(number)

    def add(self, number: int) -> Member:
        member = Member(self.network, number, self.folder, **self.options)
        self.members.append(member)
        if self.mbit:
            self.network.limit(member.peer_id, self.mbit, self.mbit)
        for each in self.members:
            each.members = [other.peer_id for other in self.members if other is not each]
        return member

    async def restarted(self, member: Member) -> Member:
        """As after `kill -9`: what was only in memory is gone."""
        await member.close()
        self.members.remove(member)
        again = self.add(member.number)
        await again.transport.start()
        return again


@asynccontextmanager
async def running(swarm: Swarm) -> AsyncIterator[list[Member]]:
    for member in swarm.members:
        await member.transport.start()
    try:
        yield list(swarm.members)
    finally:
        for member in swarm.members:
            await member.close()


async def publish(publisher: VersionPublisher, weights: Weights, versions: range) -> dict[int, str]:
    """Hashes of the versions published."""
    return {version: (await publisher.publish(version, weights.step())).result for version in versions}


@pytest.mark.slow
def test_followers_are_at_the_owners_version(tmp_path):
    async def main() -> None:
        async with running(Swarm(tmp_path, 3)) as (owner, first, second):
            weights = Weights(SHAPES)
            publisher = owner.publisher(weights.base)
            digests = {}
            for follower in (first, second):
                follower.follow(weights.base)
            sizes = []
            for version in range(11):
                link = await publisher.publish(version, weights.step())
                digests[version] = link.result
                sizes.append(link.blob.size)
                await asyncio.sleep(1.0)
            for follower in (first, second):
                await follower.until(10)
                assert follower.reached == list(digests.items())
                assert weights_digest(follower.bits) == digests[10]
                assert follower.tracker.digest == digests[10]
                assert (follower.tracker.lag, follower.tracker.stopped) == (0, "")
                assert follower.tracker.signs_of_life_s < 16
                assert not follower.failures
                assert not follower.notices
                # each has the newest anchor's blob, which nobody sent
                anchor = follower.chains.of(owner.peer_id, BASE_MODEL).anchor
                assert anchor.policy_version == 8
                assert follower.store.get(anchor.blob.root).complete
                assert sum(follower.exchange.downloaded.values()) == sum(sizes)

    run_virtual(main())


@pytest.mark.slow
def test_who_lags_behind_takes_several_versions_at_once(tmp_path):
    async def main() -> None:
        async with running(Swarm(tmp_path, 2)) as (owner, follower):
            weights = Weights(SHAPES)
            follower.costs(apply=3.0)
            follower.follow(weights.base)
            publisher = owner.publisher(weights.base, anchor_every=100)
            digests = {}
            for version in range(30):
                digests |= await publish(publisher, weights, range(version, version + 1))
                await asyncio.sleep(1.0)
            await follower.until(29)
            reached = [version for version, _ in follower.reached]
            assert reached == sorted(set(reached))
            assert len(reached) < 20
            assert dict(follower.reached).items() <= digests.items()

    run_virtual(main())


@pytest.mark.slow
def test_blobs_are_fetched_while_earlier_ones_are_applied(tmp_path, monkeypatch):
    """Each takes about as long on the way as in work."""
    weights = Weights({"w": (300, 300)}, share=1.0)
    took_s = {}

    async def main(folder: Path, ahead: int) -> None:
        monkeypatch.setattr("node.weights.follow.tracker.AHEAD", ahead)
        async with running(Swarm(folder, 2, mbit=1.0)) as (owner, follower):
            await publish(owner.publisher(weights.base, anchor_every=100), weights, range(11))
            follower.costs(apply=links_of(owner)[1].blob.size * 8 / 1e6)
            began_s = asyncio.get_running_loop().time()
            follower.follow(weights.base)
            await follower.until(10)
            took_s[ahead] = asyncio.get_running_loop().time() - began_s

    for ahead in (1, 4):
        run_virtual(main(tmp_path / f"{ahead}", ahead))
    assert took_s[4] < 0.75 * took_s[1]


@pytest.mark.slow
def test_a_joiner_at_version_200_has_the_owners_weights_and_all_share_its_download(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 4, mbit=20.0)
        async with running(swarm) as (owner, *followers):
            shapes = {"embed": (1300, 400), "w": (400, 400), "norm": (64,)}
            weights, base = Weights(shapes, share=0.001), Weights(shapes, seed=1).base
            publisher = owner.publisher(base, anchor_every=32)
            await publish(publisher, weights, range(150))
            for follower in followers:
                follower.follow(base)
            for version in range(150, 201):  # past anchors, whose blobs they make themselves
                await publish(publisher, weights, range(version, version + 1))
                await asyncio.sleep(2.0)
            for follower in followers:
                await follower.until(200)
                assert not follower.failures

            joiner = swarm.add(4)
            await joiner.transport.start()
            joiner.follow(base)
            await joiner.until(200)
            assert joiner.reached == [(200, weights_digest(joiner.bits))]
            assert joiner.reached[0] == owner_version(owner)
            chain = owner.chains.of(owner.peer_id, BASE_MODEL)
            needed = [open_link(link, SWARM) for link in chain.after(None)]
            assert [link.kind for link in needed] == [LinkKind.ANCHOR] + [LinkKind.DELTA] * 8
            assert sum(-(-link.blob.size // link.blob.chunk_bytes) for link in needed) > 64
            donated = {
                member.peer_id: member.exchange.uploaded[joiner.peer_id] for member in (owner, *followers)
            }
            size = sum(link.blob.size for link in needed)
            assert size <= sum(donated.values()) <= 1.1 * size
            assert max(donated.values()) <= 2 * sum(donated.values()) / 4, donated
            assert not joiner.failures

    run_virtual(main())


def links_of(member: Member) -> list[WeightsLink]:
    chain = member.chains.of(member.lineage.owner, BASE_MODEL)
    return [open_link(signed, SWARM) for signed in chain.links()]


def owner_version(owner: Member) -> tuple[int, str]:
    head = owner.chains.of(owner.peer_id, BASE_MODEL).head
    return head.policy_version, head.result


def test_adapters_travel_like_weights(tmp_path):
    async def main() -> None:
        async with running(Swarm(tmp_path, 2)) as (owner, follower):
            weights = Weights({"layers.0.q.lora_A": (8, 64), "layers.0.q.lora_B": (64, 8)})
            base = {name: np.zeros_like(array) for name, array in weights.base.items()}
            publisher = owner.publisher(base)
            follower.follow(base)
            digests = await publish(publisher, weights, range(6))
            await follower.until(5)
            assert weights_digest(follower.bits) == digests[5]

    run_virtual(main())


def test_followers_go_on_over_a_version_that_is_an_anchor_only(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 2)
        async with running(swarm) as (owner, follower):
            weights, merged = Weights(SHAPES), Weights(SHAPES, share=1.0, seed=5)
            publisher = owner.publisher(weights.base, anchor_every=100)
            follower.follow(weights.base)
            digests = await publish(publisher, weights, range(6))
            await follower.until(5)
            weights.state = merged.state
            link = await publisher.publish(6, weights.state, anchor=True)
            digests[6] = link.result
            await follower.until(6)
            owner = await swarm.restarted(owner)
            publisher = owner.publisher(weights.base, anchor_every=100)
            bits = await publisher.open()
            assert (publisher.published, weights_digest(bits)) == (6, digests[6])
            newcomer = swarm.add(2)
            await newcomer.transport.start()
            newcomer.follow(weights.base)
            digests |= await publish(publisher, weights, range(7, 8))
            for each in (follower, newcomer):
                await each.until(7)
                assert dict(each.reached).items() <= digests.items()
                assert weights_digest(each.bits) == digests[7]
                assert not each.failures
                assert not each.notices
            chain = owner.chains.of(owner.peer_id, BASE_MODEL)
            kinds = [(link.policy_version, link.kind) for link in links_of(owner)[-2:]]
            assert kinds == [(6, LinkKind.ANCHOR), (7, LinkKind.DELTA)]
            assert chain.head.base_version == 6

    run_virtual(main())


def test_who_was_away_while_an_anchor_only_came_goes_on_by_it(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 2)
        async with running(swarm) as (owner, follower):
            weights = Weights(SHAPES)
            publisher = owner.publisher(weights.base, anchor_every=100)
            follower.follow(weights.base)
            await publish(publisher, weights, range(6))
            await follower.until(5)
            swarm.network.partition([[owner.peer_id]])
            weights.state = Weights(SHAPES, seed=5).state
            await publisher.publish(6, weights.state, anchor=True)
            digests = await publish(publisher, weights, range(7, 8))
            swarm.network.heal()
            await follower.until(7)
            assert [version for version, _ in follower.reached][-2:] == [5, 7]
            assert weights_digest(follower.bits) == digests[7]
            assert not follower.failures

    run_virtual(main())


# --- restarts and absences ---


@pytest.mark.slow
def test_an_owner_killed_while_it_broadcasts_goes_on_on_the_same_chain(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 3, mbit=1.0)
        async with running(swarm) as (owner, first, second):
            weights = Weights({"w": (300, 300)}, share=1.0)
            publisher = owner.publisher(weights.base)
            for follower in (first, second):
                follower.follow(weights.base)
            digests = await publish(publisher, weights, range(6))
            await asyncio.sleep(0.3)  # somewhere in the middle of a blob
            assert max(first.version, second.version) < 5
            owner = await swarm.restarted(owner)
            publisher = owner.publisher(weights.base)
            bits = await publisher.open()
            assert (publisher.published, weights_digest(bits)) == (5, digests[5])
            digests |= await publish(publisher, weights, range(6, 12))
            for follower in (first, second):
                await follower.until(11)
                assert dict(follower.reached).items() <= digests.items()
                assert not follower.tracker.stopped

    run_virtual(main())


def test_a_follower_that_starts_again_needs_nobody(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 2)
        async with running(swarm) as (owner, follower):
            weights = Weights(SHAPES)
            publisher = owner.publisher(weights.base)
            follower.follow(weights.base)
            await publish(publisher, weights, range(7))
            await follower.until(6)
            follower = await swarm.restarted(follower)
            swarm.network.kill(owner.peer_id)
            follower.follow(weights.base)
            await follower.until(6, within_s=1.0)
            assert follower.reached == [owner_version(owner)]
            assert not follower.exchange.downloaded
            swarm.network.restart(owner.peer_id)
            await publish(publisher, weights, range(7, 8))
            await follower.until(7)

    run_virtual(main())


def test_what_the_owner_cannot_tell_others_pass_on(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 3)
        async with running(swarm) as (owner, first, second):
            weights = Weights(SHAPES)
            publisher = owner.publisher(weights.base)
            first.follow(weights.base)
            await publish(publisher, weights, range(7))
            await first.until(6)
            swarm.network.kill(owner.peer_id)
            second.follow(weights.base)
            await second.until(6, within_s=10.0)
            assert second.tracker.signs_of_life_s < 10.0  # a new link of the owner's is one
            await asyncio.sleep(60.0)
            assert second.tracker.signs_of_life_s > 50.0
            assert first.tracker.signs_of_life_s > 50.0
            swarm.network.restart(owner.peer_id)
            await publish(publisher, weights, range(7, 9))
            await asyncio.gather(first.until(8, within_s=20.0), second.until(8, within_s=20.0))
            assert not second.failures

    run_virtual(main())


def test_a_blob_that_nobody_has_any_more_is_gone_around(tmp_path):
    async def main() -> None:
        swarm = Swarm(tmp_path, 2)
        async with running(swarm) as (owner, follower):
            weights = Weights(SHAPES)
            publisher = owner.publisher(weights.base, anchor_every=6)
            follower.follow(weights.base)
            await publish(publisher, weights, range(2))
            await follower.until(1)
            swarm.network.partition([[owner.peer_id]])
            await publish(publisher, weights, range(2, 4))
            lost = owner.chains.of(owner.peer_id, BASE_MODEL).head
            owner.store.get(lost.blob.root).remove()
            swarm.network.heal()
            await follower.until(2)
            await publish(publisher, weights, range(4, 8))
            await follower.until(7)  # by the anchor of version 6
            assert [version for version, _ in follower.reached][-2:] == [2, 7]
            assert not follower.notices

    run_virtual(main())


# --- an owner that cannot be followed ---


@pytest.mark.parametrize(
    ("how", "reason"),
    [("other weights", "chain_fork"), ("older weights", "chain_rollback"), ("by a member", "chain_fork")],
)
def test_an_owner_that_contradicts_itself_stops_the_tracker(tmp_path, how, reason):
    async def main() -> None:
        swarm = Swarm(tmp_path, 3)
        async with running(swarm) as (owner, first, second):
            weights, others = Weights(SHAPES), Weights(SHAPES)
            publisher = owner.publisher(weights.base)
            first.follow(weights.base)
            await publish(publisher, weights, range(4))
            await first.until(3)
            if how != "by a member":  # the owner starts again without its chain
                for path in (tmp_path / "0" / "state" / "chain").iterdir():
                    path.unlink()
                owner = await swarm.restarted(owner)
                if how == "other weights":
                    others.step()
                await publish(owner.publisher(weights.base), others, range(3))
            else:
                await second.transport.close()
                swarm.members.remove(second)
                second = swarm.add(2)
                await second.transport.start()
                chain = second.chains.open(second.lineage, [weights_digest(weights.base)])
                original = owner.chains.of(owner.peer_id, BASE_MODEL)
                for signed in original.links()[:-1]:
                    second.chains.learn(chain, signed)
                fork = open_link(original.links()[-1], SWARM)
                signed = sign_link(owner.identity, SWARM, type(fork)(**{**as_dict(fork), "result": "f" * 64}))
                await second.chains.commit(chain, signed, inline)
            async with asyncio.timeout(60.0):
                await first.task
            assert first.tracker.stopped == reason
            assert first.failures == {(owner.peer_id, reason): 1}
            assert first.tracker.signs_of_life_s == float("inf")
            assert first.version == 3  # what was here is here
            if reason == "chain_fork":
                first.follow(weights.base)
                await first.task
                assert first.tracker.stopped == reason

    run_virtual(main())


def as_dict(record) -> dict:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_what_on_version_raises_ends_the_run(tmp_path):
    class Broken(Exception):
        pass

    async def main() -> None:
        async with running(Swarm(tmp_path, 2)) as (owner, follower):
            weights = Weights(SHAPES)

            async def broken(version: int, bits: object) -> None:
                raise Broken

            follower.follow(weights.base, on_version=broken)
            await publish(owner.publisher(weights.base), weights, range(1))
            with pytest.raises(Broken):
                await follower.task
            assert follower.version == -1

    run_virtual(main())
