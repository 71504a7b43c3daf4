"""Which addresses a stranger may have dialled: a record in the DHT is a stranger's word."""

from __future__ import annotations

import pytest

from node.transport._addresses import may_dial

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
