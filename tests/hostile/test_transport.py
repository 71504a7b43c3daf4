"""Hostile peers against the transports: huge frames, floods, invented identities, silence."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from node.clock import VirtualClock, run_virtual
from node.share.push import STREAM_LIFE_S, Push
from node.transport.base import Stream, TransportLimits
from node.transport.limits import OTHER_PEERS, KeyedTokenBuckets, Refusals
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork
from node.transport.streams import ByteChannel
from protocol.errors import TransportError
from protocol.identity import Identity
from protocol.topics import ANNOUNCE_PROTOCOL
from tests.node.pushing import push
from tests.node.runtimes import make_runtime

IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(30)]
ECHO = "/test/1/echo"


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


# --- item 1: a frame that declares more than its cap ---


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [(b"\xff\xff\xff\xff", "frame_size"), (b"\x80\x00\x00\x00", "frame_size"), (bytes(4), "empty_frame")],
)
def test_declared_length_is_refused_before_allocation(prefix, reason):
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        victim, hostile = [network.transport(identity.peer_id) for identity in IDENTITIES[:2]]
        victim.serve(ECHO, echo)
        for transport in (victim, hostile):
            await transport.start()
        channel = (await hostile.open_stream(victim.peer_id, ECHO)).channel
        gc.collect()
        tracemalloc.start()
        await channel.write(prefix + b"x" * 1000)
        with pytest.raises(TransportError):
            await channel.read_exactly(1)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1_000_000
        assert victim.refusals.counters() == {(hostile.peer_id, reason): 1}
        for transport in (hostile, victim):
            await transport.close()

    run_virtual(main())


# --- item 13: bounded whatever is invented ---


@pytest.mark.slow
def test_100000_invented_senders_cannot_grow_counters_or_buckets():
    refusals = Refusals(capacity=100)
    buckets = KeyedTokenBuckets(1.0, 5.0, newcomers_per_s=10.0, newcomer_burst=50.0, capacity=64)
    refusals.add("honest", "decode")
    admitted = sum(buckets.take(f"invented {number}", now_s=number / 100_000) for number in range(100_000))
    for number in range(100_000):
        refusals.add(f"invented {number}", "rate")
    assert len(buckets) <= 64
    assert admitted == 50 + 9  # the burst, and 10 a second for just under one second
    counters = refusals.counters()
    assert len(counters) <= 100
    assert sum(count for (_, reason), count in counters.items() if reason == "rate") == 100_000
    assert counters[OTHER_PEERS, "decode"] == 1


def test_records_of_strangers_are_capped_in_number_and_rate():
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        limits = TransportLimits(dht_records=50, dht_keys_per_s=10, dht_burst=200)
        victim = network.transport(IDENTITIES[0].peer_id, limits=limits)
        hostile = network.transport(IDENTITIES[1].peer_id)
        for transport in (victim, hostile):
            await transport.start()
        await hostile.connect(victim.addresses()[0])
        for number in range(1000):
            await hostile.store(f"key {number}", b"x", network.clock.now_ms() + 60_000)
        # 200 of burst passed the bucket, 50 of them are kept.
        assert len(victim.records.kept) == 50
        assert victim.refusals.counters() == {(hostile.peer_id, "dht_rate"): 800}
        for transport in (victim, hostile):
            await transport.close()

    run_virtual(main())


# --- item 14: one peer above its quota ---


def test_peer_at_100_times_its_quota_costs_the_honest_nothing():
    """Six neighbours push more than their buckets allow: each is cut off, and known ones lose nothing."""

    async def main() -> int:
        clock = VirtualClock()
        network = MemoryNetwork(seed=2, link=LINKS["lan"], clock=clock)
        victim, *others = [network.transport(identity.peer_id) for identity in IDENTITIES[:10]]
        honest, hostile = others[:3], others[3:]
        for transport in (victim, *others):
            await transport.start()
            if transport is not victim:
                await transport.connect(victim.addresses()[0])
        heard = Counter[str]()
        pushing = Push(make_runtime(clock), victim, lambda envelope, neighbour: heard.update([neighbour]))
        victim.serve(ANNOUNCE_PROTOCOL, pushing.receive, deadline_s=STREAM_LIFE_S)

        async def speak(transport, per_second: int) -> None:
            while True:
                await push(transport, victim.peer_id, *[b"x" * 400] * per_second)
                await asyncio.sleep(1)

        tasks = [asyncio.create_task(speak(transport, 5)) for transport in honest]
        await asyncio.sleep(1.5)
        tasks += [asyncio.create_task(speak(transport, 3000)) for transport in hostile]
        await asyncio.sleep(4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in (*others, victim):
            await transport.close()
        refused = victim.refusals.counters()
        assert all(refused[transport.peer_id, "rate"] > 0 for transport in hostile)
        assert {peer_id for peer_id, _ in refused} == {transport.peer_id for transport in hostile}
        return sum(heard[transport.peer_id] for transport in honest)

    assert run_virtual(main()) >= 3 * 5 * 5


# --- item 18: silence, a byte per ten seconds, half-open, never reading ---


@pytest.mark.parametrize("behaviour", ["silent", "byte per 10 s", "never reads"])
def test_slow_peer_is_dropped_by_deadline(behaviour):
    async def main() -> None:
        network = MemoryNetwork(clock=VirtualClock())
        victim, hostile = [network.transport(identity.peer_id) for identity in IDENTITIES[:2]]

        async def talk(stream: Stream) -> None:
            while True:
                await stream.send(b"x" * 100_000)

        victim.serve(ECHO, talk if behaviour == "never reads" else echo)
        for transport in (victim, hostile):
            await transport.start()
        channel = (await hostile.open_stream(victim.peer_id, ECHO)).channel

        async def drip() -> None:
            for byte in b"\x00\x00\x01\x00" + b"x" * 256:
                await channel.write(bytes([byte]))
                await asyncio.sleep(10)

        dripping = asyncio.create_task(drip() if behaviour == "byte per 10 s" else asyncio.sleep(0))
        await asyncio.sleep(TransportLimits().stream_timeout_s + 1)
        assert victim.refusals.counters() == {(hostile.peer_id, "deadline"): 1}
        await asyncio.gather(dripping, return_exceptions=True)
        for transport in (hostile, victim):
            await transport.close()

    run_virtual(main())


async def write_without_reading(channel: ByteChannel) -> None:
    while True:
        await channel.write((1 << 20).to_bytes(4, "big") + b"x" * (1 << 20))


@pytest.mark.net
@pytest.mark.slow
async def test_real_daemons_under_attack(tmp_path: Path):
    """Items 1, 13 and 18 over sockets: the victim refuses, counts, forgets, and closes within 5 s."""
    from node.transport.hivemind import HivemindTransport

    transports = []
    for number, identity in enumerate(IDENTITIES[:3]):
        path = tmp_path / f"{number}.key"
        path.write_bytes(identity.to_libp2p())
        path.chmod(0o600)
        limits = TransportLimits(dht_burst=100, dht_keys_per_s=1, dht_records=10, streams_per_peer=4)
        transports.append(HivemindTransport(path, limits=limits))
    victim, hostile, honest = transports
    victim.serve(ECHO, echo)
    for transport in transports:
        await transport.start()
    for transport in (hostile, honest):
        await transport.connect(victim.addresses()[0])

    channel = (await hostile.open_stream(victim.peer_id, ECHO)).channel
    tracemalloc.start()
    await channel.write(b"\xff\xff\xff\xff" + b"x" * 1000)
    with pytest.raises(TransportError):
        await channel.read_exactly(1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert victim.refusals.counters()[hostile.peer_id, "frame_size"] == 1

    # Strangers' records: 150 valid ones from one peer, and shapes that hivemind itself would accept.
    dht = hostile._session.dht
    expires = time.time() + 60
    for number in range(150):
        await dht.protocol.call_store(
            _peer(victim), [_key(f"k{number}")], [_value(f"k{number}", b"x")], expires
        )
    storage = victim._session.dht.protocol.storage
    assert len(storage) <= 10
    assert victim.refusals.counters()[hostile.peer_id, "dht_rate"] > 20

    # Streams that say nothing, and one that never reads what it asked for.
    silent = [(await hostile.open_stream(victim.peer_id, ECHO)).channel for _ in range(6)]
    with pytest.raises((TransportError, TimeoutError)):
        await asyncio.wait_for(write_without_reading(silent[0]), 0.5)
    assert victim.refusals.counters()[hostile.peer_id, "streams"] == 2

    # Meanwhile the honest peer is served.
    stream = await honest.open_stream(victim.peer_id, ECHO)
    await stream.send(b"hello")
    assert await stream.receive() == b"hello"
    await stream.close()

    began_s = time.monotonic()
    await victim.close()
    assert time.monotonic() - began_s < 5
    for transport in (honest, hostile):
        await transport.close()


@pytest.mark.net
@pytest.mark.slow
async def test_hostile_dht_node_can_neither_hide_nor_forge_a_record(tmp_path: Path):
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.proto import dht_pb2

    from node.transport.hivemind import HivemindTransport

    transports = []
    for number, identity in enumerate(IDENTITIES[:3]):
        path = tmp_path / f"{number}.key"
        path.write_bytes(identity.to_libp2p())
        path.chmod(0o600)
        transports.append(HivemindTransport(path))
    honest, hostile, reader = transports
    for transport in transports:
        await transport.start()
    for transport in (hostile, reader):
        await transport.connect(honest.addresses()[0])
    await reader.connect(hostile.addresses()[0])
    expires_at = time.time_ns() // 1_000_000 + 60_000
    await honest.store("key", b"true", expires_at)

    # The hostile node answers every search with an empty dictionary that expires last.
    async def lie(data: bytes, remote_id: object) -> bytes:
        request = dht_pb2.FindRequest.FromString(data)
        empty = hostile._session.dht.protocol.serializer.dumps(DictionaryDHTValue())
        result = dht_pb2.FindResult(
            type=dht_pb2.FOUND_DICTIONARY, value=empty, expiration_time=time.time() + 1e6
        )
        return dht_pb2.FindResponse(
            results=[result] * len(request.keys), peer=hostile._session.dht.protocol.node_info
        ).SerializeToString()

    hostile._session._p2p._client.control.unary_handlers["DHTProtocol.rpc_find"] = lie
    assert await reader.get("key") == b"true"

    # Stored under a key that is not in the value, with sub-keys, without expiry, as other types.
    protocol = hostile._session.dht.protocol
    soon = time.time() + 100
    attempts = [
        (_key("key"), _value("another", b"x"), soon, None),
        (_key("key"), _value("key", b"x"), soon, "sub-key"),
        (_key("key"), _value("key", b"x"), float("inf"), None),
        (_key("key"), msgpack.packb("text"), soon, None),
        (_key("key"), b"\xc1", soon, None),
        (_key("key"), msgpack.packb(b"\xff\xff"), soon, None),
        (_key("key"), _value("key", b"x" * 20_000), soon, None),
    ]
    for key, value, expires, subkey in attempts:
        stored = await protocol.call_store(_peer(honest), [key], [value], expires, [subkey])
        assert stored in (None, [False])
    assert await honest.get("key") == b"true"
    reasons = {reason for (peer_id, reason) in honest.refusals.counters() if peer_id == hostile.peer_id}
    assert reasons == {"record_key", "freshness", "decode", "oversize"}
    for transport in transports:
        await transport.close()


def _peer(transport):
    from hivemind.p2p import PeerID

    return PeerID.from_base58(transport.peer_id)


def _key(name: str):
    from hivemind.dht.routing import DHTID

    return DHTID.generate(source=name)


def _value(name: str, value: bytes) -> bytes:
    from node.transport._dht import wrap

    return msgpack.packb(wrap(name, value))
