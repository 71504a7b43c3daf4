"""What is particular to the real daemon: ports, death, memory, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from node.transport import _daemon
from node.transport._neighbours import Neighbours
from node.transport.base import Stream, TransportLimits
from protocol.errors import AddressError, KeyFileError, TransportError
from protocol.identity import Identity

pytestmark = [pytest.mark.net, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


def daemons() -> list[psutil.Process]:
    """Running `p2pd` children of this process."""
    return [child for child in psutil.Process().children() if "p2pd" in child.name()]


def socket_files() -> set[Path]:
    return set(Path("/tmp").glob("hivemind-p2p*.sock"))


async def test_busy_port_is_one_sentence_with_the_port(real_nodes):
    first = await real_nodes.open(1)
    port = re.search(r"/tcp/(\d+)/", first.addresses()[0]).group(1)
    with pytest.raises(
        AddressError, match=rf"cannot listen on /ip4/127.0.0.1/tcp/{port}: Address already in use"
    ):
        await real_nodes.open(2, listen=f"/ip4/127.0.0.1/tcp/{port}")


@pytest.mark.parametrize(
    "listen",
    ["", "/ip4/127.0.0.1/udp/0/quic", "/ip4/127.0.0.1/tcp/70000", "/ip4/203.0.113.7/tcp/0", "/unix/tmp/x"],
)
async def test_address_that_cannot_be_bound_is_an_address_error(real_nodes, listen):
    with pytest.raises(AddressError, match="listen"):
        await real_nodes.open(1, listen=listen)
    assert daemons() == []


def test_key_of_another_type_is_refused(tmp_path):
    from node.transport.hivemind import HivemindTransport

    path = tmp_path / "key"
    path.write_bytes(b"\x08\x00\x12\x04rsa!")
    with pytest.raises(KeyFileError):
        HivemindTransport(path)


async def test_nothing_is_left_behind_also_after_kill_9(real_nodes):
    files, descriptors = socket_files(), psutil.Process().num_fds()
    tasks = asyncio.all_tasks()
    first = await real_nodes.open(1)
    second = await real_nodes.open(2, first)
    assert len(daemons()) == 2
    os.kill(first.daemon_process_id, 9)
    await real_nodes.recovered(first)
    await second.close()
    await first.close()
    assert daemons() == []
    assert socket_files() - files == set()
    await real_nodes.eventually(lambda: psutil.Process().num_fds() <= descriptors)
    await real_nodes.eventually(lambda: asyncio.all_tasks() <= tasks)


async def test_pending_calls_fail_at_once_when_the_daemon_dies(real_nodes):
    transport = await real_nodes.open(1, limits=TransportLimits(connect_timeout_s=30))

    async def accept_and_say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(accept_and_say_nothing, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        stranger = Identity.from_seed(bytes([9]) * 32).peer_id
        pending = asyncio.create_task(transport.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}"))
        await asyncio.wait([pending], timeout=0.2)
        assert not pending.done()
        killed_s = time.monotonic()
        os.kill(transport.daemon_process_id, 9)
        with pytest.raises(TransportError):
            await pending
        assert time.monotonic() - killed_s < 1
        await real_nodes.recovered(transport)
        assert await transport.peers() == ()


async def test_calls_during_the_rebuild_wait_for_it(real_nodes):
    transport = await real_nodes.open(1)
    process_id = transport.daemon_process_id
    os.kill(process_id, 9)
    await real_nodes.eventually(lambda: transport.daemon_process_id is None)
    assert await transport.peers() == ()
    assert transport.daemon_process_id not in (None, process_id)


async def test_daemon_above_its_memory_limit_is_replaced(real_nodes, monkeypatch):
    monkeypatch.setattr("node.transport._daemon._MEMORY_CHECK_EVERY_S", 0.05)
    transport = await real_nodes.open(1)
    address = transport.addresses()
    transport._max_daemon_bytes = 1
    transport._session.break_down("for the new limit")
    await real_nodes.eventually(lambda: transport.restarts >= 2)
    transport._max_daemon_bytes = 2**40
    assert await transport.peers() == ()
    assert transport.addresses() == address


async def test_broken_control_connection_is_noticed(real_nodes):
    """hivemind's reader task can die of a race; its calls would then wait for ever."""
    transport = await real_nodes.open(1)
    transport._session._p2p._client.control._read_task.cancel()
    await real_nodes.recovered(transport)
    assert await transport.get("key") is None


async def test_lost_neighbour_is_dialled_again(real_nodes, tmp_path):
    from node.transport.hivemind import HivemindTransport

    first = await real_nodes.open(1)
    second = await real_nodes.open(2, first)
    listen = first.addresses()[0].rpartition("/p2p/")[0]
    await first.close()
    await real_nodes.eventually(lambda: _has_no_peers(second))
    again = HivemindTransport(tmp_path / "1.key", listen=listen)
    await again.start()
    await real_nodes.eventually(lambda: _has_peers(again))
    assert [peer.peer_id for peer in await again.peers()] == [second.peer_id]
    await again.close()


async def _has_peers(transport) -> bool:
    return await transport.peers() != ()


async def _has_no_peers(transport) -> bool:
    return await transport.peers() == ()


async def test_protocol_served_after_the_start_is_served_after_a_crash_too(real_nodes):
    async def hello(stream: Stream) -> None:
        await stream.send(b"hello")

    first = await real_nodes.open(1)
    second = await real_nodes.open(2, first)
    first.serve("/test/1/hello", hello)
    for crash in (False, True):
        if crash:
            os.kill(first.daemon_process_id, 9)
            await real_nodes.recovered(first)
        await real_nodes.eventually(lambda: _says_hello(second, first.peer_id))


async def _says_hello(transport, peer_id) -> bool:
    try:
        stream = await transport.open_stream(peer_id, "/test/1/hello")
    except TransportError:
        return False
    try:
        return await stream.receive() == b"hello"
    finally:
        await stream.close()


def test_back_off_doubles_with_jitter_up_to_a_limit(tmp_path):
    from node.transport.hivemind import HivemindTransport

    path = tmp_path / "key"
    path.write_bytes(Identity.from_seed(bytes(32)).to_libp2p())
    transport = HivemindTransport(path, rng=random.Random(1))
    for failures, middle_s in ((0, 0.1), (1, 0.2), (5, 3.2), (9, 30.0), (1000, 30.0)):
        delays = [transport._delay_s(failures) for _ in range(50)]
        assert 0.5 * middle_s <= min(delays) < max(delays) <= 1.5 * middle_s
        assert max(delays) - min(delays) > 0.5 * middle_s


def test_importing_the_contract_imports_neither_hivemind_nor_torch():
    modules = "node.transport, node.transport.memory, node.share.gossip"
    code = f"import sys, {modules}; print({{'hivemind', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_process_ends_without_a_word_also_when_its_daemon_was_killed(tmp_path):
    """No "Event loop is closed", no "never retrieved", no log of hivemind."""
    (tmp_path / "key").write_bytes(Identity.from_seed(bytes([1]) * 32).to_libp2p())
    code = f"""
        import asyncio, logging, os
        from pathlib import Path
        from node.transport import open_transport

        async def main():
            transport = await open_transport(Path({str(tmp_path / "key")!r}))
            os.kill(transport.daemon_process_id, 9)
            while not transport.restarts:
                await asyncio.sleep(0.01)
            await transport.peers()
            os.kill(transport.daemon_process_id, 9)
            await transport.close()

        logging.getLogger("node").setLevel(logging.ERROR)
        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_a_daemon_that_cannot_be_watched_is_started_again(real_nodes, monkeypatch):
    """Else its supervisor has ended without a word, and nobody notices when the daemon does."""
    real, calls = _daemon._resident_bytes, []

    def none_left(process_id: int) -> int:
        calls.append(process_id)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        return real(process_id)

    monkeypatch.setattr(_daemon, "_MEMORY_CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(_daemon, "_resident_bytes", none_left)
    first = await real_nodes.open(1)
    await real_nodes.eventually(lambda: first.restarts == 1)
    second = await real_nodes.open(2, first)
    assert await second.peers()


async def test_work_of_the_stack_that_ends_is_a_stack_that_is_started_again(real_nodes, monkeypatch):
    maintain, begun = Neighbours.maintain, []

    async def returns_once(self: Neighbours, *arguments: object) -> None:
        begun.append(self)
        if len(begun) > 1:
            await maintain(self, *arguments)

    monkeypatch.setattr(Neighbours, "maintain", returns_once)
    first = await real_nodes.open(1)
    await real_nodes.eventually(lambda: first.restarts == 1)
    second = await real_nodes.open(2, first)
    assert await second.peers()


ANSWERED = ("/ipfs/id/1.0.0", "/ipfs/ping/1.0.0")
CLOSED = (
    *(
        "/meshsub/1.1.0",
        "/meshsub/1.0.0",
        "/floodsub/1.0.0",
    ),  # their peer exchange had the daemon dial anything
    *("/ipfs/kad/1.0.0", "/ipfs/lan/kad/1.0.0"),  # the daemon's own DHT
    *("/libp2p/autonat/1.0.0", "/libp2p/circuit/relay/0.2.0/hop"),
    *("/libp2p/circuit/relay/0.1.0", "/libp2p/dcutr", "/libp2p/fetch/0.0.1", "/x/"),
)
"""`/libp2p/circuit/relay/0.2.0/stop` is open, and useless: only a relay that this node asked may use it."""


async def test_the_daemon_answers_to_no_protocol_that_we_do_not_use(real_nodes):
    """400,000 provider records of one peer took its own DHT from 55 to 239 MiB, past all our limits."""
    first = await real_nodes.open(1)
    second = await real_nodes.open(2, first)
    for protocol in ANSWERED:
        await (await second.open_stream(first.peer_id, protocol)).close()
    answered = []
    for protocol in CLOSED:
        with contextlib.suppress(TransportError):
            await (await second.open_stream(first.peer_id, protocol)).close()
            answered.append(protocol)
    assert answered == []
