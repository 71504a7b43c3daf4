"""What every transport promises (`node/transport/base.py`), over all of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from node.transport.base import Stream, TransportLimits
from protocol.constants import MAX_DHT_RECORD_BYTES, MAX_FRAME_BYTES
from protocol.errors import (
    AddressError,
    DecodeError,
    LimitError,
    LocalProtocolError,
    SignatureError,
    TransportError,
)
from protocol.identity import Identity

ECHO = "/test/1/echo"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def refuse_bad(key: str, value: bytes, expires_at: int) -> None:
    if value.startswith(b"bad"):
        raise SignatureError("bad record")


async def echo(stream: Stream) -> None:
    while True:
        await stream.send(await stream.receive())


async def test_two_nodes_are_peers_of_each_other(nodes):
    first = await nodes.open(1)
    assert await first.peers() == ()
    second = await nodes.open(2)
    assert await second.connect(first.addresses()[0]) == first.peer_id
    assert [peer.peer_id for peer in await second.peers()] == [first.peer_id]
    await nodes.eventually(lambda: _has_peer(first, second.peer_id))


async def _has_peer(transport, peer_id) -> bool:
    return peer_id in [peer.peer_id for peer in await transport.peers()]


async def test_peer_id_is_that_of_the_identity_and_part_of_the_address(nodes):
    transport = await nodes.open(1)
    assert transport.peer_id == Identity.from_seed(bytes([1]) * 32).peer_id
    assert transport.addresses()[0].endswith(f"/p2p/{transport.peer_id}")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "/ip4/127.0.0.1/tcp/1", "/memory/p2p/", "/ip4/x/tcp/y/p2p/z"]
)
async def test_malformed_address_is_an_address_error(nodes, address):
    transport = await nodes.open(1)
    with pytest.raises(AddressError, match="of the form"):
        await transport.connect(address)


async def test_unreachable_and_own_address_are_address_errors(nodes):
    transport = await nodes.open(1)
    with pytest.raises(AddressError, match="itself"):
        await transport.connect(transport.addresses()[0])
    stranger = Identity.from_seed(bytes([9]) * 32).peer_id
    place = "/memory" if nodes.kind == "memory" else "/ip4/127.0.0.1/tcp/1"
    with pytest.raises(AddressError, match=r"reached|answers"):
        await transport.connect(f"{place}/p2p/{stranger}")


async def test_record_is_found_by_another_node_and_replaced_by_a_later_one(nodes):
    first = await nodes.open(1)
    second, third = await nodes.open(2, first), await nodes.open(3, first)
    assert await third.get("key") is None
    await second.store("key", b"old", now_ms() + 60_000)
    assert await third.get("key") == b"old"
    await second.store("key", b"new", now_ms() + 61_000)
    assert await third.get("key") == b"new"
    assert await second.get("key") == b"new"


async def test_record_stored_alone_is_found_after_connecting(nodes):
    first, second = await nodes.open(1), await nodes.open(2)
    await second.store("key", b"value", now_ms() + 60_000)
    assert await second.get("key") == b"value"
    await second.connect(first.addresses()[0])
    await nodes.eventually(lambda: _finds(first, "key", b"value"))


async def _finds(transport, key, value) -> bool:
    return await transport.get(key) == value


async def test_record_expires(nodes):
    first = await nodes.open(1)
    second = await nodes.open(2, first)
    await second.store("key", b"value", now_ms() + 150)
    await nodes.eventually(lambda: _finds(first, "key", None), deadline_s=5)


async def test_own_record_that_others_would_refuse_is_our_error(nodes):
    transport = await nodes.open(1, validate_record=refuse_bad)
    with pytest.raises(LocalProtocolError, match="bad record"):
        await transport.store("key", b"bad", now_ms() + 60_000)
    with pytest.raises(LocalProtocolError, match=str(MAX_DHT_RECORD_BYTES)):
        await transport.store("key", b"x" * (MAX_DHT_RECORD_BYTES + 1), now_ms() + 60_000)
    await transport.store("key", b"x" * MAX_DHT_RECORD_BYTES, now_ms() + 60_000)


async def test_invalid_record_of_a_peer_is_neither_stored_nor_believed(nodes):
    honest = await nodes.open(1, validate_record=refuse_bad)
    hostile = await nodes.open(2, honest)
    reader = await nodes.open(3, honest, validate_record=refuse_bad)
    await hostile.store("key", b"bad", now_ms() + 60_000)
    await nodes.eventually(lambda: honest.refusals.counters().get((hostile.peer_id, "signature"), 0) >= 1)
    assert await honest.get("key") is None
    assert await reader.get("key") is None


async def test_stream_carries_frames_both_ways(nodes):
    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, ECHO)
    assert stream.peer_id == first.peer_id
    for frame in (b"x", b"hello", bytes(range(256)) * 4096, b"y" * MAX_FRAME_BYTES):
        await stream.send(frame)
        assert await stream.receive() == frame
    with pytest.raises(LocalProtocolError):
        await stream.send(b"x" * (MAX_FRAME_BYTES + 1))
    await stream.close()
    await stream.close()
    with pytest.raises(TransportError):
        await stream.send(b"x")


async def test_frame_above_the_readers_cap_closes_the_stream_and_is_counted(nodes):
    async def read_small(stream: Stream) -> None:
        await stream.receive(max_bytes=10)

    first = await nodes.open(1, prepare=lambda transport: transport.serve("/test/1/small", read_small))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, "/test/1/small")
    await stream.send(b"x" * 11)
    with pytest.raises(TransportError):
        await stream.receive()
    assert first.refusals.counters() == {(second.peer_id, "frame_size"): 1}


async def test_opener_refuses_an_oversize_answer(nodes):
    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, ECHO)
    await stream.send(b"x" * 11)
    with pytest.raises(LimitError):
        await stream.receive(max_bytes=10)
    with pytest.raises(TransportError, match="closed"):
        await stream.receive()


async def test_stream_that_ends_early_is_a_transport_error(nodes):
    async def hang_up(stream: Stream) -> None:
        await stream.receive()
        await stream.send(b"last words")

    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, hang_up))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, ECHO)
    await stream.send(b"x")
    assert await stream.receive() == b"last words"
    with pytest.raises(TransportError, match="early"):
        await stream.receive()


async def test_unknown_protocol_and_unknown_peer_are_transport_errors(nodes):
    first = await nodes.open(1)
    second = await nodes.open(2, first, limits=TransportLimits(connect_timeout_s=2))
    with pytest.raises(TransportError):
        await second.open_stream(first.peer_id, "/test/1/nothing")
    with pytest.raises(TransportError):
        await second.open_stream(Identity.from_seed(bytes([9]) * 32).peer_id, ECHO)


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("our bug"), "handler"), (DecodeError("their bytes"), "decode")]
)
async def test_failing_handler_closes_only_its_stream(nodes, error, reason):
    async def fail(stream: Stream) -> None:
        if await stream.receive() == b"fail":
            raise error
        await echo(stream)

    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, fail))
    second = await nodes.open(2, first)
    failing, other = [await second.open_stream(first.peer_id, ECHO) for _ in range(2)]
    await other.send(b"begin")
    await failing.send(b"fail")
    with pytest.raises(TransportError):
        await failing.receive()
    await other.send(b"still here")
    assert await other.receive() == b"still here"
    assert first.refusals.counters() == {(second.peer_id, reason): 1}


async def test_streams_above_the_cap_of_a_peer_are_closed_and_counted(nodes):
    limits = TransportLimits(streams_per_peer=2)
    first = await nodes.open(1, limits=limits, prepare=lambda transport: transport.serve(ECHO, echo))
    second, third = await nodes.open(2, first), await nodes.open(3, first)
    kept = [await second.open_stream(first.peer_id, ECHO) for _ in range(2)]
    for stream in kept:
        await stream.send(b"x")
        assert await stream.receive() == b"x"
    above = await second.open_stream(first.peer_id, ECHO)
    with pytest.raises(TransportError):
        await above.receive()
    assert first.refusals.counters() == {(second.peer_id, "streams"): 1}
    of_another = await third.open_stream(first.peer_id, ECHO)
    await of_another.send(b"x")
    assert await of_another.receive() == b"x"
    await kept[0].close()
    await nodes.eventually(lambda: _echoes(second, first))


async def _echoes(opener, server) -> bool:
    stream = await opener.open_stream(server.peer_id, ECHO)
    try:
        await stream.send(b"x")
        return await stream.receive() == b"x"
    except TransportError:
        return False
    finally:
        await stream.close()


async def test_stream_opens_above_the_rate_are_refused(nodes):
    limits = TransportLimits(stream_opens_per_s=0.001, stream_burst=2)
    first = await nodes.open(1, limits=limits, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    assert [await _echoes(second, first) for _ in range(3)] == [True, True, False]
    assert first.refusals.counters() == {(second.peer_id, "stream_rate"): 1}


async def test_silent_stream_ends_by_deadline(nodes):
    limits = TransportLimits(stream_timeout_s=0.1)
    first = await nodes.open(1, limits=limits, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, ECHO)
    with pytest.raises(TransportError):
        await stream.receive()
    assert first.refusals.counters() == {(second.peer_id, "deadline"): 1}


async def test_handler_served_with_a_deadline_outlives_the_default_one(nodes):
    async def count(stream: Stream) -> None:
        while True:
            await stream.send(b"alive")
            await asyncio.sleep(0.05)

    def prepare(transport) -> None:
        transport.serve("/test/1/default", count)
        transport.serve("/test/1/long", count, deadline_s=0.8)

    first = await nodes.open(1, limits=TransportLimits(stream_timeout_s=0.2), prepare=prepare)
    second = await nodes.open(2, first)
    heard = {}
    for protocol in ("/test/1/default", "/test/1/long"):
        stream = await second.open_stream(first.peer_id, protocol)
        heard[protocol] = await _frames_until_the_end(stream)
    assert heard["/test/1/default"] <= 5 < heard["/test/1/long"] <= 17
    assert first.refusals.counters() == {(second.peer_id, "deadline"): 2}


async def _frames_until_the_end(stream: Stream) -> int:
    count = 0
    try:
        while True:
            await stream.receive()
            count += 1
    except TransportError:
        return count


async def test_crash_fails_calls_at_once_and_recovery_restores_everything(nodes):
    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    await first.store("key", b"value", now_ms() + 60_000)
    address = first.addresses()[0]
    incoming = await second.open_stream(first.peer_id, ECHO)
    nodes.crash(first)
    with pytest.raises(TransportError):
        await incoming.receive()
    await nodes.recovered(first)
    assert first.addresses()[0] == address
    await nodes.eventually(lambda: _has_peer(first, second.peer_id))
    assert await second.get("key") == b"value"
    await nodes.eventually(lambda: _echoes(second, first))


async def test_close_is_idempotent_and_fails_calls(nodes):
    first = await nodes.open(1, prepare=lambda transport: transport.serve(ECHO, echo))
    second = await nodes.open(2, first)
    stream = await second.open_stream(first.peer_id, ECHO)
    async with asyncio.timeout(5):
        await first.close()
        await first.close()
    with pytest.raises(TransportError):
        await stream.receive()
    for call in (
        first.peers(),
        first.get("key"),
        first.open_stream(second.peer_id, ECHO),
    ):
        with pytest.raises(TransportError):
            await call
