"""The owner's side as the trainer and a merge see it: what is offered, what is published of it, and how."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from node.clock import VirtualClock, run_virtual
from node.events import Event, EventBus, VersionPublished
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.transport.memory import MemoryNetwork
from node.weights.publish.owner import OwnerBroadcast
from node.weights.sharing import WeightsSharing
from protocol.delta import weights_digest
from protocol.errors import OurFault
from protocol.links import open_link
from tests.node.weights.lineage import SWARM, Member, Weights

pytestmark = pytest.mark.usefixtures("compiled_delta")

WEIGHTS = Weights({"w": (40, 30)})


def owner_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[OwnerBroadcast, Member, list[Event]]:
    monkeypatch.setattr("node.weights.publish.owner.base_bits", lambda policy, adapter: WEIGHTS.base)
    member = Member(MemoryNetwork(clock=VirtualClock()), 0, folder)
    sharing = SimpleNamespace(store=member.store, chains=member.chains, exchange=member.exchange)
    bus, told = EventBus(), []
    bus.subscribe(told.append)
    owner = OwnerBroadcast(
        member.identity,
        SWARM,
        member.lineage,
        cast("Policy", None),
        None,
        cast("WeightsSharing", sharing),
        anchor_every=100,
        compute=member.compute,
        clock=member.clock,
        bus=bus,
        gauge=StageGauge("broadcast", member.clock, "a new version"),
        notice=lambda level, text: member.notices.append(text),
        followers=lambda: 0,
    )
    return owner, member, told


def test_the_newest_of_what_waits_is_published_as_it_was_offered(tmp_path, monkeypatch):
    async def main() -> None:
        owner, _, told = owner_in(tmp_path, monkeypatch)
        assert await owner.open() is None
        assert owner.base[0] is WEIGHTS.base
        assert owner.base[1] == weights_digest(WEIGHTS.base)
        running = asyncio.create_task(owner.run())
        for offers in (
            [(0, False)],
            [(1, False), (2, False)],
            [(3, False), (4, True)],
            [(5, True), (6, False)],  # a merge that gave way: the delta spans over it
        ):
            for version, anchor in offers:
                owner.offer(version, WEIGHTS.step(), anchor=anchor)
            await asyncio.sleep(1.0)
            assert owner.published == version
        running.cancel()
        published = [
            (event.policy_version, event.kind) for event in told if isinstance(event, VersionPublished)
        ]
        assert published == [(0, "anchor"), (2, "delta"), (4, "anchor"), (6, "delta")]

    run_virtual(main())


def test_a_contribution_is_the_newest_version_published_and_what_hinders_it_is_told(tmp_path, monkeypatch):
    async def main() -> None:
        owner, member, _ = owner_in(tmp_path, monkeypatch)
        assert await owner.contribute() is None
        await owner.open()
        assert await owner.contribute() is None
        running = asyncio.create_task(owner.run())
        for version in range(2):
            owner.offer(version, WEIGHTS.step())
            await asyncio.sleep(1.0)

        def full(data: bytes) -> None:
            raise OurFault("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(member.store, "add", full)
            assert await owner.contribute() is None
        assert member.notices == ["version 1 cannot be contributed to a merge: the disk is full"]
        link = open_link(await owner.contribute(), SWARM)
        assert (link.policy_version, link.kind.value, link.base) == (1, "anchor", owner.base[1])
        running.cancel()

    run_virtual(main())


def test_with_a_chain_that_must_not_be_gone_on_with_nothing_is_published_or_contributed(
    tmp_path, monkeypatch
):
    async def main() -> None:
        owner, member, _ = owner_in(tmp_path, monkeypatch)

        def copied(*_: object) -> None:
            raise OurFault("links that do not fit")

        monkeypatch.setattr(member.chains, "open", copied)
        assert await owner.open() is None
        assert owner.base[1] == weights_digest(WEIGHTS.base)
        running = asyncio.create_task(owner.run())
        owner.offer(0, WEIGHTS.step())
        await asyncio.sleep(1.0)
        running.cancel()
        assert (owner.published, await owner.contribute()) == (-1, None)
        assert len(member.notices) == 1

    run_virtual(main())
