"""A node's network, wired: the same key in two processes, and loops that end."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from node.clock import VirtualClock, run_virtual
from node.config import NodeConfig
from node.events import Event
from node.network import Network
from node.peers.twin import TWIN_REASON
from node.state.stores import MemorySequence, SequenceStore
from node.supervise import LoopEndedError
from node.transport.memory import MemoryNetwork
from protocol.codec import encode
from protocol.envelope import seal
from protocol.messages import Announcement, BlobRef, Lineage, PromptRef
from protocol.replay import ReplayCache
from protocol.topics import announcement_topic
from tests.node.pushing import push
from tests.node.runtimes import make_peers, make_runtime, notices_of
from tests.node.verify.world import World, identity

WORLD = World()
ALICE, CAROL = identity("alice"), identity("carol")
SAID = Announcement(
    Lineage(ALICE.peer_id, "a" * 64, "b" * 64),
    1,
    mean_version=1.0,
    oldest_version=1,
    prompt=PromptRef(0, 1, 1),
    completions="c" * 64,
    rewards=(1.0, 0.0),
    body=BlobRef("e" * 64, 1),
)


def told(numbers: SequenceStore, heard: list[int], clock: VirtualClock) -> tuple[list[str], dict[str, int]]:
    """What a node with `numbers` says when a neighbour passes on envelopes of its own key with `heard`."""
    events: list[Event] = []

    async def main() -> dict[str, int]:
        network = MemoryNetwork(clock=clock)
        runtime = make_runtime(clock, events=events)
        membership, peers = make_peers(runtime, ALICE, WORLD.charter)
        transport, relaying = network.transport(ALICE.peer_id), network.transport(CAROL.peer_id)
        for each in (transport, relaying):
            await each.start()
        node = Network(
            runtime, membership, peers, transport, NodeConfig(), sequence=numbers, replay=ReplayCache()
        )
        running = asyncio.create_task(node.run())
        await node.gossip.listening.wait()
        await relaying.connect(transport.addresses()[0])
        topic = announcement_topic(membership.swarm_id)
        for number in heard:
            data = seal(
                ALICE,
                swarm_id=membership.swarm_id,
                topic=topic,
                sequence=number,
                payload=encode(SAID),
                now_ms=clock.now_ms(),
                ttl_ms=60_000,
            )
            await push(relaying, ALICE.peer_id, data)
        await asyncio.sleep(5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for each in (transport, relaying):
            await each.close()
        return peers.refusals()

    refusals = run_virtual(main())
    return notices_of(events), refusals


def test_a_copied_home_is_told_to_both_and_a_restart_to_nobody(tmp_path: Path) -> None:
    clock = VirtualClock()
    at_ms = 1_700_000_000_000
    first = SequenceStore(tmp_path / "sequence", lambda: at_ms)
    before = [first.next() for _ in range(3)]
    shutil.copy(tmp_path / "sequence", tmp_path / "copied")
    at_ms += 3_600_000
    second = SequenceStore(tmp_path / "copied", lambda: at_ms)
    at_ms += 90_000
    of_first, of_second = ([each.next() for _ in range(3)] for each in (first, second))
    assert told(first, [*before, *of_first], clock) == ([], {})
    assert told(second, [*before, *of_second], clock) == ([], {})  # what the key said before the copy
    for numbers, heard in ((first, of_second), (second, of_first)):
        ((notice,), refusals) = told(numbers, heard, clock)
        assert notice.startswith(f"another node runs with this node's key ({ALICE.peer_id})")
        assert refusals == {TWIN_REASON: 3}


def test_gossip_that_ends_by_itself_ends_the_network() -> None:
    clock = VirtualClock()

    async def ends() -> None:
        return

    async def main() -> None:
        runtime = make_runtime(clock)
        membership, peers = make_peers(runtime, ALICE, WORLD.charter)
        transport = MemoryNetwork(clock=clock).transport(ALICE.peer_id)
        await transport.start()
        node = Network(
            runtime,
            membership,
            peers,
            transport,
            NodeConfig(),
            sequence=MemorySequence(),
            replay=ReplayCache(),
        )
        node.gossip.run = ends  # type: ignore[method-assign]
        running = asyncio.create_task(node.run())
        async with asyncio.timeout(60):
            with pytest.RaisesGroup(pytest.RaisesExc(LoopEndedError, match="'gossip' has ended")):
                await running

    run_virtual(main())
