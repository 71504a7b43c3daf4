"""An owner's publications: what becomes of versions, what is kept, and what a kill at any point leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from node.clock import VirtualClock, run_virtual
from node.events import VersionPublished
from node.transport.memory import MemoryNetwork
from node.weights.chain.apply import apply_link
from node.weights.chain.base import BaseWeights
from node.weights.chain.bf16 import U16, to_bits
from node.weights.chain.chain import Chain
from node.weights.publish import VersionPublisher
from protocol.delta import weights_digest
from protocol.errors import LocalProtocolError, OurFault
from protocol.links import open_link
from protocol.messages import LinkKind, WeightsLink
from tests.node.weights.chain.test_chain import names
from tests.node.weights.lineage import BASE_MODEL, SWARM, Member, Weights

pytestmark = pytest.mark.usefixtures("compiled_delta")

SHAPES = {"a": (40, 30), "b": (500,), "norm": (8,)}


def owner_in(folder, **options) -> Member:
    """An owner that just started."""
    return Member(MemoryNetwork(clock=VirtualClock()), 0, folder, **options)


def chain_of(owner: Member) -> Chain:
    chain = owner.chains.of(owner.peer_id, BASE_MODEL)
    assert chain is not None
    return chain


def links_of(owner: Member) -> list[WeightsLink]:
    return [open_link(signed, SWARM) for signed in chain_of(owner).links()]


async def opened(publisher: VersionPublisher) -> tuple[int, Mapping[str, U16] | None]:
    """The version and the weights that an earlier run left."""
    bits = await publisher.open()
    return publisher.published, bits


def test_versions_are_deltas_and_every_few_also_anchors(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=3)
        assert await publisher.open() is None
        results = {}
        for version in range(8):
            state = weights.step()
            link = await publisher.publish(version, state)
            results[version] = weights_digest(to_bits(state))
            assert (link.policy_version, link.result) == (version, results[version])
            assert link.kind is (LinkKind.DELTA if version else LinkKind.ANCHOR)
            assert link.created_at == owner.clock.now_ms()
        links = links_of(owner)
        assert names(links) == ["a3", "d4", "d5", "d6", "a6", "d7"]
        assert all(link.result == results[link.policy_version] for link in links)
        assert {link.base for link in links if link.kind is LinkKind.ANCHOR} == {weights_digest(weights.base)}
        assert [link.base_version for link in links] == [3, 3, 4, 5, 6, 6]
        assert not owner.notices

    run_virtual(main())


def test_publications_at_the_same_time_take_turns(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        owner.costs(broadcast=1.0, disk=1.0)
        publisher = owner.publisher(weights.base, anchor_every=100)
        outcome = await asyncio.gather(
            publisher.publish(0, weights.step()),
            publisher.publish(2, weights.step()),
            publisher.publish(1, weights.step()),
            publisher.anchored(),
            return_exceptions=True,
        )
        assert names([outcome[0], outcome[1]]) == ["a0", "d2"]
        assert isinstance(outcome[2], LocalProtocolError)
        assert names([outcome[3]]) == ["a2"]
        assert names(links_of(owner)) == ["a0", "d2", "a2"]

    run_virtual(main())


def test_a_version_may_be_an_anchor_only(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=100)
        for version in range(3):
            await publisher.publish(version, weights.step())
        weights.state = Weights(SHAPES, seed=1).state
        link = await publisher.publish(3, weights.state, anchor=True)
        assert (link.kind, link.base) == (LinkKind.ANCHOR, weights_digest(weights.base))
        assert link.result == weights_digest(to_bits(weights.state))
        # killed right after it
        again = owner_in(tmp_path)
        publisher = again.publisher(weights.base, anchor_every=100)
        version, bits = await opened(publisher)
        assert (version, weights_digest(bits)) == (3, link.result)
        link = await publisher.publish(5, weights.step())
        assert (link.kind, link.base_version) == (LinkKind.DELTA, 3)
        assert names(links_of(again)) == ["a0", "d1", "d2", "a3", "d5"]
        assert (await opened(owner_in(tmp_path).publisher(weights.base)))[0] == 5

    run_virtual(main())


# --- what a merge is given ---


def test_a_contribution_is_the_anchor_of_the_newest_version(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=3)
        assert await publisher.anchored() is None
        for version in range(3):
            await publisher.publish(version, weights.step())
        signed = await publisher.anchored()
        link = open_link(signed, SWARM)
        assert (link.kind, link.policy_version, link.result) == (
            LinkKind.ANCHOR,
            2,
            weights_digest(to_bits(weights.state)),
        )
        stored = owner.store.get(link.blob.root)
        assert stored.complete
        assert weights_digest(apply_link(link, stored.data(), None, weights.base)) == link.result
        assert names(links_of(owner)) == ["a0", "d1", "d2", "a2"]
        assert await publisher.anchored() == signed  # made once
        for version in range(3, 6):
            await publisher.publish(version, weights.step())
        assert names(links_of(owner)) == ["a2", "d3", "d4", "d5", "a5"]  # three after the contribution
        assert names([await publisher.anchored()]) == ["a5"]
        assert names(links_of(owner)) == ["a2", "d3", "d4", "d5", "a5"]

    run_virtual(main())


def test_no_contribution_without_the_weights_of_the_head_or_room_for_it(tmp_path, monkeypatch):
    async def main() -> None:
        weights = Weights(SHAPES)
        owner = owner_in(tmp_path)
        publisher = owner.publisher(weights.base)
        for version in range(2):
            link = await publisher.publish(version, weights.step())
        with monkeypatch.context() as patched:
            patched.setattr(owner.store, "add", no_room)
            with pytest.raises(OurFault, match="no room"):
                await publisher.anchored()
        assert names(links_of(owner)) == ["a0", "d1"]
        for path in (tmp_path / "0" / "state" / "weights").glob(f"{link.blob.root}.*"):
            path.unlink()
        publisher = owner_in(tmp_path).publisher(weights.base)
        assert await publisher.open() is None
        assert await publisher.anchored() is None
        await publisher.publish(2, weights.step())
        assert names([await publisher.anchored()]) == ["a2"]

    run_virtual(main())


def test_what_must_not_be_published(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base)
        good = weights.step()
        await publisher.publish(5, good)
        for version in (5, 4, 0):
            with pytest.raises(
                LocalProtocolError, match=f"version {version} cannot be published after version 5"
            ):
                await publisher.publish(version, good)
        for bad, text in (
            (good | {"a": torch.full((40, 30), 3.4e38)}, "not all finite"),
            (good | {"a": torch.zeros(30, 40)}, "different names or shapes"),
            ({"a": good["a"]}, "different names or shapes"),
        ):
            with pytest.raises(LocalProtocolError, match=text):
                await publisher.publish(6, bad)
        assert names(links_of(owner)) == ["a5"]
        assert (await publisher.publish(6, good)).kind is LinkKind.DELTA

    run_virtual(main())


def test_adapters_travel_like_weights(tmp_path):
    """Full bases are not on everybody's disk: an adapter starts from zeros."""

    async def main() -> None:
        owner = owner_in(tmp_path)
        weights = Weights({"layers.0.q.lora_A": (8, 64), "layers.0.q.lora_B": (64, 8)})
        base = {name: np.zeros_like(array) for name, array in weights.base.items()}
        publisher = owner.publisher(base)
        for version in range(3):
            await publisher.publish(version, weights.step())
        version, bits = await opened(owner_in(tmp_path).publisher(base))
        assert version == 2
        assert weights_digest(bits) == weights_digest(to_bits(weights.state))

    run_virtual(main())


# --- what is kept ---


def test_the_newest_anchor_and_the_deltas_since_the_one_before_are_kept(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path, keep_bytes=20_000), Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=4)
        for version in range(30):
            await publisher.publish(version, weights.step())
            assert owner.store.held_bytes <= 20_000
        links = links_of(owner)
        assert names(links)[0] == "a24"
        assert all(owner.store.get(link.blob.root).complete for link in links[1:])
        assert not owner.notices

    run_virtual(main())


def test_many_bytes_of_deltas_make_an_anchor_early(tmp_path):
    async def main() -> None:
        owner, weights = owner_in(tmp_path, keep_bytes=16_000), Weights(SHAPES, share=0.9)
        publisher = owner.publisher(weights.base, anchor_every=1000)
        for version in range(30):
            await publisher.publish(version, weights.step())
        anchors = [link.policy_version for link in links_of(owner) if link.kind is LinkKind.ANCHOR]
        assert len(anchors) == 2
        assert 1 <= anchors[1] - anchors[0] <= 10
        assert not owner.notices

    run_virtual(main())


def test_a_version_that_does_not_fit_is_an_error_and_an_anchor_that_does_not_is_told(tmp_path, monkeypatch):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=2)
        await publisher.publish(0, weights.step())
        whole = owner.store.add
        with monkeypatch.context() as patched:
            patched.setattr(owner.store, "add", no_room)
            with pytest.raises(OurFault, match="no room"):
                await publisher.publish(1, weights.step())
        assert names(links_of(owner)) == ["a0"]
        link = await publisher.publish(2, weights.step())
        assert (link.kind, link.base_version) == (LinkKind.DELTA, 0)
        with monkeypatch.context() as patched:
            patched.setattr(owner.store, "add", lambda data: no_room() if has(owner, 4) else whole(data))
            await publisher.publish(4, weights.step())
        assert [text for text in owner.notices if "no anchor of version 4" in text]
        await publisher.publish(5, weights.step())
        assert names(links_of(owner))[-2:] == ["d5", "a5"]

    run_virtual(main())


def no_room(*_: object) -> None:
    raise OurFault("no room for a blob")


def has(owner: Member, version: int) -> bool:
    return any(link.policy_version == version for link in links_of(owner))


# --- restarts ---


def test_restored_weights_are_the_heads(tmp_path):
    async def main() -> None:
        weights = Weights(SHAPES)
        publisher = owner_in(tmp_path).publisher(weights.base, anchor_every=4)
        for version in range(7):
            await publisher.publish(version, weights.step())
        owner = owner_in(tmp_path)
        publisher = owner.publisher(weights.base, anchor_every=4)
        version, bits = await opened(publisher)
        assert version == 6
        assert weights_digest(bits) == weights_digest(to_bits(weights.state))
        link = await publisher.publish(7, weights.step())
        assert (link.kind, link.base_version) == (LinkKind.DELTA, 6)

    run_virtual(main())


def test_a_head_that_cannot_be_rebuilt_is_never_signed_again(tmp_path):
    async def main() -> None:
        weights = Weights(SHAPES)
        publisher = owner_in(tmp_path).publisher(weights.base, anchor_every=4)
        for version in range(7):
            link = await publisher.publish(version, weights.step())
        for path in (tmp_path / "0" / "state" / "weights").glob(f"{link.blob.root}.*"):
            path.unlink()
        owner = owner_in(tmp_path)
        publisher = owner.publisher(weights.base, anchor_every=4)
        assert await publisher.open() is None
        assert "version 6, the last one published, cannot be rebuilt" in owner.notices[0]
        with pytest.raises(LocalProtocolError, match="after version 6"):
            await publisher.publish(6, weights.step())
        assert (await publisher.publish(9, weights.step())).kind is LinkKind.ANCHOR
        assert (await publisher.publish(10, weights.step())).kind is LinkKind.DELTA

    run_virtual(main())


def test_a_lost_anchor_is_made_anew(tmp_path):
    async def main() -> None:
        weights = Weights(SHAPES)
        owner = owner_in(tmp_path)
        publisher = owner.publisher(weights.base, anchor_every=4)
        for version in range(6):
            await publisher.publish(version, weights.step())
        owner.store.get(chain_of(owner).anchor.blob.root).remove()
        await publisher.publish(6, weights.step())
        assert names(links_of(owner))[-1] == "a6"

    run_virtual(main())


@pytest.mark.slow
def test_a_kill_at_any_point_costs_the_version_in_work_at_most(tmp_path, monkeypatch):
    """The disk as it is before every call that changes it is what a kill there leaves."""
    home, left = tmp_path / "home", []
    announced = -1

    def spied(name: str):
        real = getattr(os, name)

        def call(*args, **kwargs):
            left.append((announced, tmp_path / f"left{len(left)}"))
            shutil.copytree(home, left[-1][1])
            if name == "pwrite":  # and half-way through it
                left.append((announced, tmp_path / f"left{len(left)}"))
                half = args[1][: len(args[1]) // 2]
                real(args[0], half, args[2])
                shutil.copytree(home, left[-1][1])
            return real(*args, **kwargs)

        return call

    states: dict[int, str] = {}

    async def publish() -> None:
        nonlocal announced
        weights = Weights(SHAPES)
        publisher = owner_in(home).publisher(weights.base, anchor_every=2)
        await publisher.open()
        for name in ("pwrite", "fsync", "rename", "replace", "ftruncate"):
            monkeypatch.setattr(os, name, spied(name))
        for version in range(4):
            state = weights.step()
            states[version] = weights_digest(to_bits(state))
            await publisher.publish(version, state)
            announced = version
        monkeypatch.undo()
        await published_on(home, 4)

    async def published_on(folder, least: int) -> None:
        """Start again and go on; the chain must still be one."""
        owner = owner_in(folder)
        weights = Weights(SHAPES, seed=0)
        publisher = owner.publisher(weights.base, anchor_every=2)
        version, bits = await opened(publisher)
        if bits is not None:
            assert weights_digest(bits) == states[version]
        assert version >= least - 1
        weights.state = {name: tensor + 1 for name, tensor in weights.state.items()}
        await publisher.publish(version + 1, weights.step())
        assert chain_of(owner).head.policy_version == version + 1
        assert (await opened(owner_in(folder).publisher(weights.base)))[0] == version + 1
        assert not owner.notices

    run_virtual(publish())
    assert len(left) > 50
    for heard, folder in left:
        run_virtual(published_on(folder, heard + 1))


@pytest.mark.slow
@pytest.mark.parametrize("contributes", [False, True])
def test_what_is_cancelled_at_any_turn_leaves_one_chain(tmp_path, contributes):
    async def main(turns: int) -> None:
        folder = tmp_path / f"{turns}"
        owner, weights = owner_in(folder), Weights(SHAPES)
        owner.costs(broadcast=0.1, disk=0.1)
        publisher = owner.publisher(weights.base, anchor_every=2)
        for version in range(2):
            await publisher.publish(version, weights.step())
        work = publisher.anchored() if contributes else publisher.publish(2, weights.step())
        publishing = asyncio.create_task(work)
        await asyncio.sleep(0.05 + 0.1 * turns)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await publisher.publish(3, weights.step())
        assert (await opened(owner_in(folder).publisher(weights.base)))[0] == 3
        versions = [link.policy_version for link in links_of(owner)]
        assert versions == sorted(versions)
        assert not chain_of(owner).evidence

    for turns in range(8):
        run_virtual(main(turns))


# --- what is offered ---


def published(owner: Member) -> list[tuple[int, str]]:
    """Versions and kinds, in order."""
    return [
        (event.policy_version, event.kind) for event in owner.events if isinstance(event, VersionPublished)
    ]


async def asked_for(owner: Member, asker: Member) -> None:
    """As a follower that connects."""
    await owner.transport.start()
    await asker.transport.start()
    await asker.chains.ask(owner.peer_id, owner.lineage, None, 0.0)


def test_nothing_is_made_until_somebody_asks_and_then_the_newest(tmp_path):
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        owner, asker = (Member(network, number, tmp_path) for number in range(2))
        weights, loaded = Weights(SHAPES), []

        def load() -> Mapping[str, U16]:
            loaded.append(1)
            return weights.base

        publisher = VersionPublisher(
            owner.runtime,
            owner.membership,
            owner.lineage,
            owner.source,
            BaseWeights(owner.runtime, load),
            owner.sharing,
        )
        await publisher.resume(None, tmp_path / "mark")
        running = asyncio.create_task(publisher.run())
        for version in range(1, 4):
            owner.source.state, owner.source.policy_version = weights.step(), version
            publisher.offer(version, owner.source.state)
            await asyncio.sleep(1.0)
        assert (published(owner), publisher.published, loaded) == ([], -1, [])
        assert not (tmp_path / "mark").exists()
        await asked_for(owner, asker)
        await asyncio.sleep(1.0)
        assert published(owner) == [(3, "anchor")]
        assert chain_of(owner).head.result == weights_digest(to_bits(owner.source.state))
        assert (tmp_path / "mark").exists()
        for version in range(4, 6):  # somebody asks: each one
            publisher.offer(version, weights.step())
            await asyncio.sleep(1.0)
        assert published(owner)[1:] == [(4, "delta"), (5, "delta")]
        await asyncio.sleep(60.0)  # nobody has asked for long
        publisher.offer(6, weights.step())
        await asyncio.sleep(1.0)
        assert publisher.published == 5
        running.cancel()

    run_virtual(main())


def test_weights_that_a_step_has_changed_since_wait_for_the_next_offer(tmp_path):
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        owner, asker = (Member(network, number, tmp_path) for number in range(2))
        weights = Weights(SHAPES)
        publisher = owner.publisher(weights.base)
        running = asyncio.create_task(publisher.run())
        publisher.offer(1, weights.step())
        owner.source.policy_version = 2  # not proven yet
        await asked_for(owner, asker)
        await asyncio.sleep(1.0)
        assert published(owner) == []
        publisher.offer(2, weights.step())
        await asyncio.sleep(1.0)
        assert published(owner) == [(2, "anchor")]
        running.cancel()

    run_virtual(main())


def test_the_newest_of_what_waits_is_published_as_it_was_offered(tmp_path):
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        owner, asker = (Member(network, number, tmp_path) for number in range(2))
        weights = Weights(SHAPES)
        publisher = owner.publisher(weights.base, anchor_every=100)
        await asked_for(owner, asker)
        running = asyncio.create_task(publisher.run())
        for offers in (
            [(0, False)],
            [(1, False), (2, False)],
            [(3, False), (4, True)],
            [(5, True), (6, False)],  # a merge that gave way: the delta spans over it
        ):
            for version, anchor in offers:
                publisher.offer(version, weights.step(), anchor=anchor)
            await asyncio.sleep(1.0)
            assert publisher.published == version
        running.cancel()
        assert published(owner) == [(0, "anchor"), (2, "delta"), (4, "anchor"), (6, "delta")]

    run_virtual(main())


def test_a_contribution_is_the_newest_version_and_what_hinders_it_is_told(tmp_path, monkeypatch):
    async def main() -> None:
        owner, weights = owner_in(tmp_path), Weights(SHAPES)
        publisher = owner.publisher(weights.base)
        assert await publisher.contribute() is None
        for version in range(2):
            owner.source.state, owner.source.policy_version = weights.step(), version
            publisher.offer(version, owner.source.state)
        link = open_link(await publisher.contribute(), SWARM)
        assert (link.policy_version, link.kind, link.base) == (
            1,
            LinkKind.ANCHOR,
            weights_digest(weights.base),
        )
        assert published(owner) == [(1, "anchor")]  # nobody follows
        publisher.offer(2, owner.source.state)
        contributing = asyncio.create_task(publisher.contribute())
        await asyncio.sleep(1.0)
        assert not contributing.done()  # the trainer is at another version than the one offered
        publisher.offer(3, weights.step())
        assert names([await contributing]) == ["a3"]
        await publisher.publish(4, weights.step())
        with monkeypatch.context() as patched:
            patched.setattr(owner.store, "add", no_room)
            assert await publisher.contribute() is None
        assert owner.notices == ["version 4 cannot be contributed to a merge: no room for a blob"]
        assert names([await publisher.contribute()]) == ["a4"]

    run_virtual(main())


def test_with_a_chain_that_must_not_be_gone_on_with_nothing_is_published_or_contributed(
    tmp_path, monkeypatch
):
    async def main() -> None:
        weights = Weights(SHAPES)
        await owner_in(tmp_path).publisher(weights.base).publish(0, weights.step())
        network = MemoryNetwork(clock=VirtualClock())
        owner, asker = (Member(network, number, tmp_path) for number in range(2))
        publisher = owner.publisher({"other": weights.base["a"]})
        await publisher.resume(None, tmp_path / "mark")
        await asked_for(owner, asker)
        running = asyncio.create_task(publisher.run())
        publisher.offer(1, weights.step())
        await asyncio.sleep(1.0)
        running.cancel()
        assert (publisher.published, await publisher.contribute()) == (-1, None)
        (told,) = owner.notices
        assert told.endswith("until then nobody can follow this node")

    run_virtual(main())
