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
    [{"delay_min_ms": 2, "delay_max_ms": 1}, {"delay_min_ms": -1}, {"loss": 1.1}, {"loss": -0.1}],
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


def echo_times(link: LinkConditions, count: int, seed: int = 0) -> list[float]:
    """When the answers to `count` frames sent 1 ms apart come back, in seconds after the first was sent."""

    async def main() -> list[float]:
        nodes = await star(network_of(link, seed), 2)
        loop = asyncio.get_running_loop()
        stream = await nodes[1].open_stream(PEERS[0], ECHO)
        began_s, times = loop.time(), list[float]()

        async def read() -> None:
            for number in range(count):
                assert await stream.receive() == b"%d" % number
                times.append(loop.time() - began_s)

        reading = asyncio.create_task(read())
        for number in range(count):
            await stream.send(b"%d" % number)
            await asyncio.sleep(0.001)
        await reading
        await stream.close()
        await close(nodes)
        return times

    return run_virtual(main())


def test_what_is_lost_arrives_later_in_order_and_once():
    """Half of the pieces are lost at first and cost 200 ms or more; all behind them wait."""
    assert echo_times(LINKS["perfect"], 20)[-1] < 0.03
    assert echo_times(LinkConditions(1, 20, loss=0.5), 20)[0] >= 0.002
    assert echo_times(LinkConditions(1, 20, loss=0.5), 20)[-1] > 0.4


def test_seed_fixes_the_run():
    lossy = LINKS["lossy"]
    assert echo_times(lossy, 50, seed=1) == echo_times(lossy, 50, seed=1)
    assert echo_times(lossy, 50, seed=1) != echo_times(lossy, 50, seed=2)


def test_partition_breaks_streams_until_it_heals():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 3)
        stream = await nodes[1].open_stream(PEERS[0], ECHO)
        network.partition([[PEERS[1]]])
        with pytest.raises(TransportError):
            await stream.receive()
        assert await nodes[1].peers() == ()
        assert [peer.peer_id for peer in await nodes[0].peers()] == [PEERS[2]]
        with pytest.raises(AddressError, match="no peer answers"):
            await nodes[1].connect(nodes[0].addresses()[0])
        with pytest.raises(TransportError, match="cannot be reached"):
            await nodes[1].open_stream(PEERS[0], ECHO)
        network.heal()
        assert [peer.peer_id for peer in await nodes[1].peers()] == [PEERS[0]]
        await close(nodes)

    run_virtual(main())


def test_killed_stack_refuses_calls_and_record_survives_at_the_others():
    async def main() -> None:
        network = network_of()
        nodes = await star(network, 4)
        await nodes[1].store("key", b"value", network.clock.now_ms() + 60_000)
        network.kill(PEERS[1])
        for call in (nodes[1].peers(), nodes[1].get("key"), nodes[1].open_stream(PEERS[0], ECHO)):
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
