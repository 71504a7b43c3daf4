"""What a peer's DHT request must pass before hivemind sees it."""

from __future__ import annotations

import time

import pytest

from node.transport.base import TransportLimits
from node.transport.limits import Refusals
from protocol.errors import DecodeError, LimitError
from protocol.identity import Identity

pytestmark = pytest.mark.slow  # hivemind imports torch

PEER = Identity.from_seed(bytes([7]) * 32).peer_id
KEY = bytes(20)


def guard(burst: int):
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    from node.transport._dht import DhtGuard

    refusals = Refusals()
    passed: list[bytes] = []

    async def inner(data: bytes, remote_id: PeerID) -> bytes:
        passed.append(data)
        return b"answer"

    handler = DhtGuard(TransportLimits(dht_burst=burst, dht_keys_per_s=1), refusals).handler(
        dht_pb2.FindRequest, inner
    )
    return lambda data: handler(data, PeerID.from_base58(PEER)), passed, refusals, dht_pb2.FindRequest


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x00" * 1000], ids=["cut", "long", "zeros"]
)
async def test_request_that_is_no_protobuf_is_counted(data):
    ask, passed, refusals, _ = guard(burst=10)
    with pytest.raises(DecodeError):
        await ask(data)
    assert refusals.counters() == {(PEER, "dht_decode"): 1}
    assert passed == []


async def test_garbage_costs_a_token_before_it_is_parsed():
    ask, _, refusals, request = guard(burst=5)
    for number in range(20):
        with pytest.raises(DecodeError if number < 5 else LimitError):
            await ask(b"\xff")
    assert refusals.counters() == {(PEER, "dht_decode"): 5, (PEER, "dht_rate"): 15}
    with pytest.raises(LimitError):
        await ask(request(keys=[KEY]).SerializeToString())


async def test_each_key_costs_a_token():
    ask, passed, refusals, request = guard(burst=10)
    for count in (4, 6):
        assert await ask(request(keys=[KEY] * count).SerializeToString()) == b"answer"
    with pytest.raises(LimitError):
        await ask(request(keys=[KEY]).SerializeToString())
    assert (len(passed), refusals.counters()) == (2, {(PEER, "dht_rate"): 1})


async def test_own_records_are_kept_by_the_time_that_hivemind_judges_by():
    """A node's clock may be another one than the machine's, and hivemind knows only the latter."""
    from node.transport import _neighbours

    stored: list[str] = []

    class Dht:
        async def store(self, key: str, value: bytes, expires_s: float) -> None:
            stored.append(key)

    class Session:
        dht = Dht()

    neighbours = _neighbours.Neighbours(TransportLimits(), lambda failures: 0.0)
    now_ms = round(time.time() * 1000)
    neighbours.records = {"kept": (b"x", now_ms + 60_000), "expired": (b"x", now_ms - 1)}
    await neighbours.store_all(Session())
    assert stored == list(neighbours.records) == ["kept"]
