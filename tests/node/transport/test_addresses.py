"""Which addresses a stranger may have dialled: a record in the DHT is a stranger's word."""

from __future__ import annotations

import pytest

from node.transport._addresses import may_dial, parse_address, resolve
from protocol.errors import AddressError

PEER = "12D3KooWFMM2t31FiAagEyie4coBshMqpk4z15uxzNzywd7cBHkG"


@pytest.mark.parametrize(
    ("address", "own", "dialled"),
    [
        ("/ip4/8.8.8.8/tcp/4001", [], True),
        ("/ip6/2001:4860:4860::8888/tcp/4001", [], True),
        ("/ip4/192.168.1.7/tcp/4001", ["/ip4/8.8.8.8/tcp/1"], False),
        ("/ip4/192.168.1.7/tcp/4001", ["/ip4/10.0.0.2/tcp/1"], True),
        ("/ip4/127.0.0.1/tcp/22", ["/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.2/tcp/1"], False),
        ("/ip4/127.0.0.1/tcp/22", ["/ip4/127.0.0.1/tcp/1"], True),
        ("/ip6/::1/tcp/22", ["/ip4/127.0.0.1/tcp/1"], True),
        ("/ip6/::ffff:127.0.0.1/tcp/22", ["/ip4/8.8.8.8/tcp/1"], False),
        ("/ip4/169.254.169.254/tcp/80", ["/ip4/169.254.1.1/tcp/1", "/ip4/10.0.0.2/tcp/1"], False),
        ("/ip4/0.0.0.0/tcp/80", ["/ip4/127.0.0.1/tcp/1"], False),
        ("/ip4/224.0.0.1/tcp/80", [], False),
        ("/ip4/8.8.8.8/tcp/0", [], False),
        ("/ip4/8.8.8.8/tcp/99999", [], False),
        ("/ip4/8.8.8.8/udp/4001/quic-v1", [], False),
        ("/ip4/8.8.8.8/tcp/4001/ws", [], False),
        ("/ip4/8.8.8.8/tcp/4001/p2p/" + PEER + "/p2p-circuit", [], False),
        ("/dns4/example.org/tcp/4001", [], False),
        ("/ip4/8.8.8.8.8/tcp/4001", [], False),
        ("", [], False),
    ],
)
def test_what_a_stranger_may_have_dialled(address: str, own: list[str], dialled: bool) -> None:
    theirs = [f"{each}/p2p/{PEER}" for each in own]
    assert may_dial(f"{address}/p2p/{PEER}", theirs) == dialled


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/8.8.8.8/udp/4001/quic-v1",
        "/ip4/8.8.8.8/tcp/4001/ws",
        "/ip4/8.8.8.8/tcp/70000",
        "/ip4/8.8.8.8/tcp/4001/p2p/" + PEER + "/p2p-circuit",
        "/dnsaddr/example.org",
        "/unix/tmp/socket",
        "/dns4/a b/tcp/1",
    ],
)
def test_what_nobody_may_have_dialled_not_even_a_configuration(address: str) -> None:
    with pytest.raises(AddressError, match="no address of the form"):
        parse_address(f"{address}/p2p/{PEER}")


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("/ip4/8.8.8.8/tcp/4001", "/ip4/8.8.8.8/tcp/4001"),
        ("/ip6/2001:4860:4860::8888/tcp/1", "/ip6/2001:4860:4860::8888/tcp/1"),
        ("/dns4/localhost/tcp/4001", "/ip4/127.0.0.1/tcp/4001"),
    ],
)
async def test_names_are_looked_up_here_and_addresses_are_not(address: str, dialled: str) -> None:
    assert parse_address(f"{address}/p2p/{PEER}") == PEER
    assert [str(each) for each in await resolve(f"{address}/p2p/{PEER}")] == [dialled]


@pytest.mark.parametrize("address", ["/dns4/no.such.name.invalid/tcp/1", "/ip4/999.1.1.1/tcp/1"])
async def test_a_name_without_an_address_is_one_sentence(address: str) -> None:
    with pytest.raises(AddressError, match="has no address"):
        await resolve(f"{address}/p2p/{PEER}")
