"""What the network daemon may dial: the rule, and the kernel asking for it."""

from __future__ import annotations

import socket
import sys

import pytest

from node.transport._dials import DialGuard, problem

HOME = ("/ip4/192.168.1.5/tcp/4001/p2p/x",)
HOST = ("/ip4/127.0.0.1/tcp/4001",)
PUBLIC = ("/ip4/8.8.8.8/tcp/4001",)


@pytest.mark.parametrize(
    ("call", "address", "own", "word"),
    [
        ("connect", ("1.1.1.1", 4001), PUBLIC, ""),
        ("connect", ("2606:4700::1111", 4001), PUBLIC, ""),
        ("connect", ("10.0.0.1", 4001), PUBLIC, "address"),
        ("connect", ("::ffff:10.0.0.1", 4001), PUBLIC, "address"),
        ("connect", ("10.0.0.1", 4001), HOME, ""),
        ("connect", ("::ffff:10.0.0.1", 4001), HOME, ""),
        ("connect", ("127.0.0.1", 80), HOME, "address"),
        ("connect", ("127.0.0.1", 80), HOST, ""),
        ("connect", ("169.254.169.254", 80), HOME, "address"),
        ("connect", ("0.0.0.0", 80), HOST, "address"),
        ("connect", ("fe80::1", 80), HOME, "address"),
        ("connect", ("1.1.1.1", 0), PUBLIC, "address"),
        ("connect", ("1.1.1.1", 53), PUBLIC, "dns"),
        ("connect", ("127.0.0.53", 53), HOST, "dns"),
        ("sendto", ("1.1.1.1", 4001), PUBLIC, "datagram"),
        ("sendmsg", ("192.168.1.1", 4001), HOME, "datagram"),
        ("sendto", ("239.255.255.250", 1900), HOME, "datagram"),
        ("connect", ("192.168.1.1", 5351), PUBLIC, "address"),
    ],
)
def test_what_is_dialled(call: str, address: tuple[str, int], own: tuple[str, ...], word: str) -> None:
    assert problem(call, address, own, permitted=False, maps_ports=False) == word


def test_a_home_router_is_asked_for_a_port_where_ports_are_mapped() -> None:
    def may(call: str, address: tuple[str, int]) -> bool:
        return problem(call, address, PUBLIC, permitted=False, maps_ports=True) == ""

    assert may("sendto", ("239.255.255.250", 1900))
    assert may("connect", ("192.168.1.1", 5351))
    assert not may("sendto", ("239.255.255.250", 1901))
    assert not may("sendto", ("1.1.1.1", 5351))
    assert not may("connect", ("127.0.0.1", 5351))


def test_what_the_node_itself_wants_is_dialled_but_no_datagram() -> None:
    assert problem("connect", ("10.0.0.1", 53), PUBLIC, permitted=True, maps_ports=False) == ""
    assert problem("sendto", ("10.0.0.1", 53), PUBLIC, permitted=True, maps_ports=False) == "datagram"


def test_a_machine_without_filters_starts_the_daemon_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.transport._dials.known_calls", lambda: None)
    guard = DialGuard(lambda: HOST, maps_ports=False)
    assert guard.command(["p2pd", "-x"]) == ["p2pd", "-x"]
    assert guard.missing.startswith("no table of system calls for")
    guard.close()


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
async def test_the_daemon_is_held_to_it(real_nodes) -> None:  # type: ignore[no-untyped-def]
    """Told by its control socket, past every check of the node's, as identify would have it."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    from node.transport._control import Control, ControlError

    first = await real_nodes.open(1)
    second = await real_nodes.open(2, first)
    assert second.dials_unguarded == ""
    assert second.peer_id in {peer.peer_id for peer in await first.peers()}  # TCP to loopback, as its own is
    control = Control(first.control_path)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(0.2)
        port = heard.getsockname()[1]
        for number, (address, word) in enumerate(
            [
                ("/ip4/10.9.9.9/tcp/80", "address"),
                (f"/ip4/127.0.0.1/udp/{port}/quic-v1", "datagram"),
                ("/dns4/localhost.example/tcp/80", "dns"),
            ]
        ):
            before = first.dials.refused[word]
            peer = PeerID(b"\x00\x24\x08\x01\x12\x20" + bytes([number]) * 32)
            with pytest.raises(ControlError):
                await control.connect(peer, [Multiaddr(address)], 2)
            assert first.dials.refused[word] > before, address
        with pytest.raises(TimeoutError):
            heard.recv(1)
