"""The in-memory network: faults, link conditions, and that a seed fixes a run."""

from __future__ import annotations

import asyncio

import pytest

from node.clock import VirtualClock, run_virtual
from node.transport._pipes import WINDOW_BYTES
from node.transport.base import Stream
from node.transport.links import LINKS, LinkConditions
from node.transport.memory import MemoryNetwork, MemoryTransport
from protocol.errors import AddressError, DeadlineError, TransportError
from protocol.identity import Identity

PEERS = [Identity.from_seed(bytes([number + 1]) * 32).peer_id for number in range(8)]
TOPIC = "topic"
ECHO = "/test/1/echo"


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


async def star(network: MemoryNetwork, count: int) -> list[MemoryTransport]:
    """`count` nodes, all connected to the first."""
    transports = [network.transport(peer_id) for peer_id in PEERS[:count]]
    for transport in transports:
        await transport.start()
        transport.serve(ECHO, echo)
    for transport in transports[1:]:
        await transport.connect(transports[0].addresses()[0])
    return transports


async def close(transports: list[MemoryTransport]) -> None:
    for transport in transports:
        await transport.close()


def network_of(link: LinkConditions = LINKS["perfect"], seed: int = 0) -> MemoryNetwork:
    return MemoryNetwork(seed, link, VirtualClock())


@pytest.mark.parametrize(
    "arguments",
    [{"delay_min_ms": 2, "delay_max_ms": 1}, {"delay_min_ms": -1}, {"loss": 1.1}, {"reorder": -0.1}],
)
def test_impossible_link_conditions_are_refused(arguments):
    with pytest.raises(ValueError, match=r"delays|probability"):
        LinkConditions(**arguments)


def test_stream_takes_the_links_delay_each_way():
    async def main() -> None:
        nodes = await star(network_of(LinkConditions(50, 50)), 2)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        stream = await nodes[1].open_stream(PEERS[0], ECHO)
        assert loop.time() - began_s == pytest.approx(0.1, abs=1e-3)
        began_s = loop.time()
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        assert loop.time() - began_s == pytest.approx(0.1, abs=1e-3)
        await stream.close()
        await close(nodes)

    run_virtual(main())


def heard_numbers(link: LinkConditions, count: int, seed: int = 0) -> list[int]:
    """What one peer hears of `count` messages published 1 ms apart, in order of arrival."""

    async def main() -> list[int]:
        nodes = await star(network_of(link, seed), 2)
        async with nodes[0].subscribe(TOPIC) as messages:
            for number in range(count):
                await nodes[1].publish(TOPIC, b"%d" % number)
                await asyncio.sleep(0.001)
            await asyncio.sleep(10)
            await nodes[0].close()
            heard = [int(message.data) async for message in messages]
        await close(nodes)
        return heard

    return run_virtual(main())


def test_perfect_link_delivers_all_in_order():
    assert heard_numbers(LINKS["perfect"], 200) == list(range(200))


def test_loss_is_as_declared_and_order_is_kept_without_reordering():
    heard = heard_numbers(LinkConditions(1, 20, loss=0.3), 200)
    assert heard == sorted(heard)
    assert 110 < len(heard) < 170  # binomial(200, 0.7): 140 with a standard deviation of 6.5


def test_reordering_swaps_but_loses_nothing():
    heard = heard_numbers(LinkConditions(1, 20, reorder=0.3), 200)
    assert heard != sorted(heard)
    assert sorted(heard) == list(range(200))


def test_duplicates_are_heard_once():
    assert heard_numbers(LinkConditions(1, 20, duplication=1.0), 50) == list(range(50))


def test_seed_fixes_the_run():
    lossy = LINKS["lossy"]
    assert heard_numbers(lossy, 100, seed=1) == heard_numbers(lossy, 100, seed=1)
    assert heard_numbers(lossy, 100, seed=1) != heard_numbers(lossy, 100, seed=2)


def test_partition_breaks_streams_and_gossip_until_it_heals():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 3)
        stream = await nodes[1].open_stream(PEERS[0], ECHO)
        async with nodes[0].subscribe(TOPIC) as messages:
            network.partition([[PEERS[1]]])
            with pytest.raises(TransportError):
                await stream.receive()
            assert await nodes[1].peers() == ()
            assert [peer.peer_id for peer in await nodes[0].peers()] == [PEERS[2]]
            with pytest.raises(AddressError, match="no peer answers"):
                await nodes[1].connect(nodes[0].addresses()[0])
            with pytest.raises(TransportError, match="cannot be reached"):
                await nodes[1].open_stream(PEERS[0], ECHO)
            await nodes[1].publish(TOPIC, b"lost")
            await nodes[2].publish(TOPIC, b"heard")
            assert (await anext(messages)).data == b"heard"
            network.heal()
            await nodes[1].publish(TOPIC, b"again")
            assert (await anext(messages)).data == b"again"
        assert [peer.peer_id for peer in await nodes[1].peers()] == [PEERS[0]]
        await close(nodes)

    run_virtual(main())


def test_message_under_way_does_not_cross_a_partition():
    async def main() -> None:
        network = network_of(LinkConditions(100, 100))
        nodes = await star(network, 2)
        async with nodes[0].subscribe(TOPIC) as messages:
            await nodes[1].publish(TOPIC, b"under way")
            network.partition([[PEERS[1]]])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(messages), 1)
        await close(nodes)

    run_virtual(main())


def test_killed_stack_refuses_calls_and_record_survives_at_the_others():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 4)
        await nodes[1].store("key", b"value", network.clock.now_ms() + 60_000)
        network.kill(PEERS[1])
        for call in (nodes[1].peers(), nodes[1].get("key"), nodes[1].publish(TOPIC, b"x")):
            with pytest.raises(TransportError, match="down"):
                await call
        assert await nodes[3].get("key") == b"value"
        network.kill(PEERS[2])
        network.kill(PEERS[3])
        network.restart(PEERS[1])
        assert nodes[1].restarts == 1
        assert await nodes[1].get("key") == b"value"
        await close(nodes)

    run_virtual(main())


def test_record_of_a_dead_holder_is_stored_again_by_its_owner():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 2)
        await nodes[1].store("key", b"value", network.clock.now_ms() + 60_000)
        network.kill(PEERS[0])
        network.kill(PEERS[1])
        network.restart(PEERS[0])
        assert await nodes[0].get("key") is None
        network.restart(PEERS[1])
        assert await nodes[0].get("key") == b"value"
        await close(nodes)

    run_virtual(main())


def test_silent_peer_is_noticed_by_deadlines_only():
    async def main() -> None:
        network = network_of(LinkConditions(10, 10))
        nodes = await star(network, 3)
        loop = asyncio.get_running_loop()
        stream = await nodes[0].open_stream(PEERS[1], ECHO)
        await nodes[0].store("key", b"value", network.clock.now_ms() + 60_000)
        async with nodes[1].subscribe(TOPIC) as messages:
            await stream.send(b"on its way")
            network.silence(PEERS[1])
            began_s = loop.time()
            with pytest.raises(DeadlineError):
                await stream.receive()
            assert loop.time() - began_s == pytest.approx(20.0, abs=0.1)
            assert {peer.peer_id for peer in await nodes[0].peers()} == {PEERS[1], PEERS[2]}
            for work in (nodes[0].open_stream(PEERS[1], ECHO), nodes[1].open_stream(PEERS[0], ECHO)):
                with pytest.raises(DeadlineError, match="opening"):
                    await work
            with pytest.raises(AddressError, match="no peer answers"):
                await nodes[2].connect(nodes[1].addresses()[0])
            await nodes[0].publish(TOPIC, b"lost")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(messages), 1)
        assert await nodes[2].get("key") == b"value"
        with pytest.raises(ValueError, match="not in this network"):
            network.silence(PEERS[7])
        await close(nodes)

    run_virtual(main())


def test_closing_at_a_silent_end_is_not_seen_at_the_other():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 2)
        channel = (await nodes[0].open_stream(PEERS[1], ECHO)).channel
        network.silence(PEERS[0])
        channel.close()
        reading = asyncio.create_task(channel.read_exactly(1))
        with pytest.raises(TransportError):
            await reading
        await asyncio.sleep(10)
        (theirs,) = (each for each in network._channels if network._channels[each] == (PEERS[1], PEERS[0]))
        await theirs.write(b"still open")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(theirs.read_exactly(1), 5)
        await close(nodes)

    run_virtual(main())


def test_churn_leaves_the_rest_working():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 4)
        await nodes[3].close()
        assert [peer.peer_id for peer in await nodes[0].peers()] == [PEERS[1], PEERS[2]]
        again = network.transport(PEERS[3])
        await again.start()
        await again.connect(nodes[1].addresses()[0])
        assert [peer.peer_id for peer in await nodes[1].peers()] == [PEERS[0], PEERS[3]]
        await close([*nodes, again])

    run_virtual(main())


def test_same_identity_twice_and_faults_of_strangers_are_refused():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 1)
        with pytest.raises(TransportError, match="already in this network"):
            await network.transport(PEERS[0]).start()
        with pytest.raises(ValueError, match="not in this network"):
            network.kill(PEERS[5])
        await close(nodes)

    run_virtual(main())


def test_sender_waits_for_a_reader_that_does_not_read():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 2)

        async def never_read(stream: Stream) -> None:
            await asyncio.sleep(10)

        nodes[0].serve(ECHO, never_read)
        channel = (await nodes[1].open_stream(PEERS[0], ECHO)).channel
        sent = 0

        async def write_on() -> None:
            nonlocal sent
            while True:
                await channel.write(b"x" * 10_000)
                sent += 10_000

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(write_on(), 5)
        assert WINDOW_BYTES - 10_000 < sent <= WINDOW_BYTES
        await close(nodes)

    run_virtual(main())


def test_dead_link_is_a_deadline_error():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 2)
        network.link = LinkConditions(30_000, 30_000)
        with pytest.raises(DeadlineError, match="reading the DHT record key did not finish within 10 s"):
            await nodes[0].get("key")
        with pytest.raises(DeadlineError, match="opening"):
            await nodes[0].open_stream(PEERS[1], ECHO)
        await close(nodes)

    run_virtual(main())


def test_streams_share_the_bandwidth_of_both_ends():
    """1 Mbit/s out of one node to two others: 125 kB to each take 2 s, and 4 s through 0.25 Mbit/s in."""

    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        nodes = [
            network.transport(Identity.from_seed(bytes([number + 1]) * 32).peer_id) for number in range(3)
        ]
        arrived_s = {}

        async def take(stream: Stream, target: int) -> None:
            received = 0
            while received < 125_000:
                received += len(await stream.receive())
            arrived_s[target] = asyncio.get_running_loop().time()

        for node in nodes:
            await node.start()
        network.limit(nodes[0].peer_id, 1.0, 1.0)
        for target, node in enumerate(nodes[1:]):
            node.serve("/test/1/take", lambda stream, target=target: take(stream, target))

        network.limit(nodes[2].peer_id, 1.0, 0.25)
        streams = [await nodes[0].open_stream(node.peer_id, "/test/1/take") for node in nodes[1:]]
        for _ in range(25):
            for stream in streams:
                await stream.send(bytes(5_000))
        await asyncio.sleep(10.0)
        assert arrived_s[0] == pytest.approx(2.0, abs=0.1)
        assert arrived_s[1] == pytest.approx(4.0, abs=0.1)
        for node in nodes:
            await node.close()

    run_virtual(main())
