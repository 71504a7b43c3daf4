"""Chains between nodes and on disk: long polls, bounds, restarts, files that a kill cut short."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.clock import VirtualClock, run_virtual
from node.transport.links import LINKS
from node.transport.memory import MemoryNetwork
from node.weights.chain.chain import Chain, ChainError
from node.weights.chain.chains import Chains
from node.weights.chain.file import ChainFile
from protocol.errors import DeadlineError, LimitError, OurFault, TransportError
from protocol.messages import SignedLink
from tests.node.weights.chain.test_chain import BASE, LINE, anchor, delta, digest, names
from tests.node.weights.lineage import SWARM, identity_of, lineage_of
from tests.node.weights.simulation import inline

OWNER = lineage_of(0)


class Nodes:
    """An owner and a few others, with chains in a folder each."""

    def __init__(self, folder: Path, count: int = 2, *, link: str = "home") -> None:
        self.network = MemoryNetwork(seed=1, link=LINKS[link], clock=VirtualClock())
        self.transports = [self.network.transport(identity_of(number).peer_id) for number in range(count)]
        self.all = [
            Chains(transport, SWARM, folder / f"{number}") for number, transport in enumerate(self.transports)
        ]

    async def __aenter__(self) -> list[Chains]:
        for transport in self.transports:
            await transport.start()
        return self.all

    async def __aexit__(self, *_: object) -> None:
        for transport in self.transports:
            await transport.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def publish(chains: Chains, *links: SignedLink) -> Chain:
    chain = chains.open(OWNER, [BASE])
    for link in links:
        await chains.commit(chain, link, inline)
    return chain


# --- asking ---


def test_asked_links_are_those_of_the_chain(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, follower):
            chain = await publish(owner, *LINE)
            assert owner.of(OWNER.owner, OWNER.base_model) is chain
            for after in (None, 0, 2, 5, 7):
                assert await follower.ask(owner.peer_id, OWNER, after, 0.0) == chain.after(after)
            assert now_s() < 2

    run_virtual(main())


def test_an_answer_waits_for_news(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, follower):
            await publish(owner, *LINE)
            asked = asyncio.create_task(follower.ask(owner.peer_id, OWNER, 6, 15.0))
            await asyncio.sleep(7.0)
            assert not asked.done()
            await publish(owner, delta(6, 7))
            assert names(await asked) == ["a5", "d6", "d7"]
            assert now_s() < 8
            # a late anchor of the newest version is news as well
            asked = asyncio.create_task(follower.ask(owner.peer_id, OWNER, 7, 15.0))
            await asyncio.sleep(1.0)
            await publish(owner, anchor(7))
            assert names(await asked) == ["d7", "a7"]
            # and without any, the answer comes when patience ends
            began_s = now_s()
            assert names(await follower.ask(owner.peer_id, OWNER, 7, 5.0)) == ["d7", "a7"]
            assert now_s() - began_s == pytest.approx(5.0, abs=0.5)

    run_virtual(main())


def test_who_asks_before_the_first_version_gets_it_at_once(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, follower):
            asked = asyncio.create_task(follower.ask(owner.peer_id, OWNER, None, 15.0))
            await asyncio.sleep(3.0)
            await publish(owner, anchor(0))
            assert names(await asked) == ["a0"]
            assert now_s() < 4
            assert await follower.ask(owner.peer_id, lineage_of(1), None, 2.0) == []

    run_virtual(main())


def test_links_are_passed_on_by_whoever_has_them(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path, 3) as (owner, first, second):
            await publish(owner, *LINE)
            chain = first.open(OWNER, [BASE])
            for link in await first.ask(owner.peer_id, OWNER, None, 0.0):
                first.learn(chain, link)
            assert names(await second.ask(first.peer_id, OWNER, None, 0.0)) == ["a5", "d6"]

    run_virtual(main())


def test_nobody_there_and_nobody_answering(tmp_path):
    async def main() -> None:
        nodes = Nodes(tmp_path)
        async with nodes as (owner, follower):
            nodes.network.kill(owner.peer_id)
            with pytest.raises(TransportError):
                await follower.ask(owner.peer_id, OWNER, None, 15.0)
            nodes.network.restart(owner.peer_id)

            async def mute(stream) -> None:
                await asyncio.sleep(1000)

            nodes.transports[0].serve("/murmuration/2/chain", mute, deadline_s=1000)
            began_s = now_s()
            with pytest.raises((DeadlineError, TransportError)):
                await follower.ask(owner.peer_id, OWNER, None, 15.0)
            assert now_s() - began_s <= 31

    run_virtual(main())


def test_change_is_noticed(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, _):
            await publish(owner, anchor(0))
            assert owner.changes == 1
            await owner.changed(0)
            waiting = asyncio.create_task(owner.changed(1))
            await asyncio.sleep(1)
            assert not waiting.done()
            await publish(owner, delta(0, 1))
            await waiting

    run_virtual(main())


# --- bounds ---


def test_one_peer_may_have_four_requests_wait(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path, 3) as (owner, greedy, modest):
            await publish(owner, *LINE)
            waiting = [asyncio.create_task(greedy.ask(owner.peer_id, OWNER, 6, 15.0)) for _ in range(6)]
            await asyncio.sleep(2.0)
            served = [task for task in waiting if task.done()]
            assert len(served) == 2
            other = asyncio.create_task(modest.ask(owner.peer_id, OWNER, 6, 15.0))
            await asyncio.sleep(2.0)
            assert not other.done()
            await publish(owner, delta(6, 7))
            assert [len(links) for links in await asyncio.gather(*served)] == [2, 2]
            left = [task for task in waiting if task not in served]
            assert [len(links) for links in await asyncio.gather(other, *left)] == [3] * 5

    run_virtual(main())


def test_links_are_given_and_taken_at_a_bounded_rate(tmp_path, monkeypatch):
    monkeypatch.setattr("node.weights.chain.chains._LINKS_PER_S", 1.0)
    monkeypatch.setattr("node.weights.chain.chains._LINK_BURST", 10)

    async def main() -> None:
        nodes = Nodes(tmp_path)
        async with nodes as (owner, follower):
            await publish(owner, *LINE)
            for _ in range(2):
                assert len(await follower.ask(owner.peer_id, OWNER, 2, 0.0)) == 4
            with pytest.raises((TransportError, LimitError)):
                await follower.ask(owner.peer_id, OWNER, 2, 0.0)
            assert nodes.transports[0].refusals.counters() == {(follower.peer_id, "chain_rate"): 1}
            await asyncio.sleep(4.0)
            assert len(await follower.ask(owner.peer_id, OWNER, 2, 0.0)) == 4

    run_virtual(main())


def test_chains_of_few_others_are_kept(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, _):
            await publish(owner, anchor(0))
            for number in range(1, 20):
                chain = owner.open(lineage_of(number), [BASE])
                owner.learn(chain, anchor(0, owner=number))
            assert owner.of(OWNER.owner, OWNER.base_model) is not None
            known = [owner.of(lineage_of(number).owner, OWNER.base_model) for number in range(1, 20)]
            assert [chain is not None for chain in known] == [False] * 15 + [True] * 4
            assert len(list((tmp_path / "0").iterdir())) <= 10
            with pytest.raises(OurFault, match="open it again"):
                owner.learn(Chain(SWARM, lineage_of(1), [BASE]), anchor(1, owner=1))

    run_virtual(main())


# --- restarts ---


def reopened(folder: Path, number: int = 0, bases: tuple[str, ...] = (BASE,)) -> Chain:
    transport = MemoryNetwork(clock=VirtualClock()).transport(identity_of(number).peer_id)
    return Chains(transport, SWARM, folder / f"{number}").open(OWNER, bases)


def written(folder: Path, *links: SignedLink, number: int = 0) -> Path:
    """The file of a node that published, or learned, these links."""

    async def main() -> None:
        async with Nodes(folder) as nodes:
            chain = nodes[number].open(OWNER, [BASE])
            for link in links:
                if number:
                    nodes[number].learn(chain, link)
                else:
                    await nodes[number].commit(chain, link, inline)

    run_virtual(main())
    (path,) = (folder / f"{number}").iterdir()
    return path


@pytest.mark.parametrize("number", [0, 1])
def test_a_chain_is_there_after_a_restart(tmp_path, number):
    path = written(tmp_path, *LINE, number=number)
    assert path.stat().st_mode & 0o777 == 0o600
    assert reopened(tmp_path, number).links() == list(LINE)


def test_an_append_cut_short_is_forgotten_and_written_over(tmp_path):
    path = written(tmp_path, *LINE)
    whole = path.read_bytes()
    shorter = len(whole) - len(written(tmp_path / "less", *LINE[:-1]).read_bytes())
    for cut in {*range(1, shorter, 17), shorter - 8, shorter - 1, shorter}:
        path.write_bytes(whole[:-cut])
        assert names(ChainFile(path).read()) == names(list(LINE[:-1]))
    for whole_until in (10 - shorter, -1):  # a page that never reached the disk
        path.write_bytes(whole[:whole_until].ljust(len(whole), b"\0"))
        assert ChainFile(path).read() == list(LINE[:-1])
    assert reopened(tmp_path).links() == list(LINE[:-1])
    written(tmp_path, LINE[-1])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("at", [0, 300, -1000])
def test_damage_to_the_own_chain_stops_its_owner_and_no_follower(tmp_path, at):
    for number in (0, 1):
        path = written(tmp_path, *LINE, *(delta(each, each + 1) for each in range(6, 12)), number=number)
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    with pytest.raises(OurFault, match="is damaged at byte"):
        reopened(tmp_path)
    assert reopened(tmp_path, 1).links() == []  # it asks for them again


def test_a_copied_file_is_no_chain_of_this_node(tmp_path):
    path = written(tmp_path, *LINE)
    ChainFile(path).append(anchor(0, owner=1), durable=True)
    with pytest.raises(OurFault, match="do not fit"):
        reopened(tmp_path)


def test_an_own_chain_on_other_base_weights_is_not_gone_on_with(tmp_path):
    written(tmp_path, *LINE)
    with pytest.raises(OurFault, match="another adapter"):
        reopened(tmp_path, bases=("1" * 64,))


def test_a_fork_is_remembered(tmp_path):
    fork = delta(5, 6, result=digest("other"))

    async def main() -> None:
        async with Nodes(tmp_path) as (_, follower):
            chain = follower.open(OWNER, [BASE])
            for link in LINE:
                follower.learn(chain, link)
            with pytest.raises(ChainError):
                follower.learn(chain, fork)

    run_virtual(main())
    assert reopened(tmp_path, 1).evidence == (LINE[-1], fork)


def test_a_full_disk_leaves_the_own_chain_as_it_was(tmp_path, monkeypatch):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, _):
            chain = await publish(owner, *LINE[:-1])
            for failing in ("fsync", "pwrite"):
                with monkeypatch.context() as patched:
                    patched.setattr(f"node.weights.chain.file.os.{failing}", full_disk)
                    with pytest.raises(OSError, match="full"):
                        await publish(owner, LINE[-1])
                assert chain.links() == reopened(tmp_path).links() == list(LINE[:-1])
            with monkeypatch.context() as patched:
                patched.setattr("node.weights.chain.file.os.pwrite", lambda *_: 7)
                with pytest.raises(OSError, match="took 7 of"):
                    await publish(owner, LINE[-1])
            await publish(owner, LINE[-1])
            assert chain.links() == reopened(tmp_path).links() == list(LINE)

    run_virtual(main())


def full_disk(*_: object) -> int:
    raise OSError(28, "the disk is full")


def test_the_file_does_not_grow_for_ever(tmp_path):
    async def main() -> None:
        async with Nodes(tmp_path) as (owner, _):
            await publish(owner, anchor(0))
            largest = 0
            for version in range(1, 200):
                chain = await publish(owner, delta(version - 1, version))
                if version % 8 == 0:
                    await publish(owner, anchor(version))
                (path,) = (tmp_path / "0").iterdir()
                largest = max(largest, path.stat().st_size)
            assert largest < 100 * len(LINE[0].link) * 2
            assert reopened(tmp_path).links() == chain.links()

    run_virtual(main())


@pytest.mark.net
@pytest.mark.slow
async def test_over_real_streams(tmp_path):
    from node.transport.hivemind import HivemindTransport

    transports = []
    for number in range(2):
        path = tmp_path / f"{number}.key"
        path.write_bytes(identity_of(number).to_libp2p())
        path.chmod(0o600)
        transports.append(HivemindTransport(path))
        await transports[-1].start()
    try:
        owner, follower = (
            Chains(transport, SWARM, tmp_path / f"{number}") for number, transport in enumerate(transports)
        )
        await transports[1].connect(transports[0].addresses()[0])
        chain = await publish(owner, *LINE)
        assert await follower.ask(owner.peer_id, OWNER, None, 0.0) == chain.after(None)
        asked = asyncio.create_task(follower.ask(owner.peer_id, OWNER, 6, 15.0))
        await asyncio.sleep(0.1)
        await publish(owner, delta(6, 7))
        assert names(await asked) == ["a5", "d6", "d7"]
    finally:
        for transport in transports:
            await transport.close()
