"""The broadcast bench: the network it makes and removes, what it computes from what it saw, the whole."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from node.clock import run_virtual
from node.transport.base import Transport
from protocol.errors import AddressError, ConfigError, DeadlineError, OurFault
from protocol.identity import Identity
from swarm_cli.bench.broadcast import bench, networks
from swarm_cli.bench.broadcast.bench import QUICK, Size
from swarm_cli.bench.broadcast.crowd import Cpu, Sample, Trace
from swarm_cli.bench.broadcast.member import Place
from swarm_cli.bench.broadcast.networks import Site, open_network
from swarm_cli.bench.broadcast.swarm import UnicastMember

FIELDS = {"n", "bytes", "last_s", "bound_s", "ratio", "source_copies", "unicast_s", "libtorrent_s"}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def namespaces() -> None:
    """For tests that need them."""
    with open_network(1, 10.0) as network:
        if network.kind != "namespaces":
            pytest.skip(f"network namespaces cannot be made here: {network.reason}")


# --- the network ---


class Kernel:
    """Instead of `ip` and `tc`: remembers namespaces and commands, and fails where it is told to."""

    def __init__(self) -> None:
        self.namespaces: list[str] = []
        self.commands: list[str] = []
        self.fails_at = ""

    def call(self, *command: str) -> str:
        line = " ".join(command)
        self.commands.append(line)
        if self.fails_at and self.fails_at in line:
            raise networks.NoNamespacesError(f"`{line}` failed: not today")
        match command:
            case ("ip", "netns", "add", name):
                self.namespaces.append(name)
            case ("ip", "netns", "delete", name):
                self.namespaces.remove(name)
            case ("ip", "netns", "list"):
                return "".join(f"{name} (id: 3)\n" for name in self.namespaces)
        return ""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(networks, "call", kernel.call)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return kernel


def test_every_link_is_limited_both_ways(kernel: Kernel) -> None:
    with open_network(3, 20.0) as network:
        assert network.kind == "namespaces"
        assert network.cap_mbit == 0
        assert len({site.address for site in network.sites}) == 3
        assert len(kernel.namespaces) == 4
        shaped = [each.split() for each in kernel.commands if each.startswith("tc")]
    hub = next(each[2] for each in shaped if each[2].endswith("-hub"))
    limited = {(each[2], each[6]) for each in shaped}
    up = {(site.namespace, "uplink") for site in network.sites}
    assert limited == up | {(hub, f"port{number}") for number in range(3)}
    assert all("tbf rate 20000000bit" in " ".join(each) for each in shaped)
    assert kernel.namespaces == []


def test_network_is_removed_after_a_failure(kernel: Kernel) -> None:
    with pytest.raises(KeyboardInterrupt), open_network(2, 20.0):
        raise KeyboardInterrupt
    assert kernel.namespaces == []


@pytest.mark.parametrize("fails_at", ["netns add", "type bridge", "type veth", "qdisc", "netns list"])
def test_without_namespaces_nodes_share_the_loopback_device(kernel: Kernel, fails_at: str) -> None:
    kernel.fails_at = fails_at
    with open_network(2, 20.0) as network:
        if fails_at == "netns list":
            assert network.kind == "namespaces", "leftovers that cannot be listed are no reason"
            kernel.fails_at = ""
            return
        assert network.kind == "user-space limits"
        assert fails_at in network.reason
        assert network.cap_mbit == 20.0
        assert {site.address for site in network.sites} == {"127.0.0.1"}
    assert kernel.namespaces == []


def test_without_root_nothing_is_tried(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with open_network(2, 20.0) as network:
        assert "root" in network.reason
        assert not any("add" in each for each in kernel.commands)


def test_only_leftovers_of_dead_runs_are_removed(kernel: Kernel) -> None:
    dead = psutil.pids()[-1] + 1
    while psutil.pid_exists(dead):
        dead += 1
    kept = ["mine", f"swarm-bench-{os.getpid()}-ab12-hub", f"swarm-bench-{dead}", f"swarm-bench-{dead}-ab-x"]
    kernel.namespaces = [*kept, f"swarm-bench-{dead}-ab12-hub", f"swarm-bench-{dead}-ab12-0"]
    networks.remove_leftovers()
    assert kernel.namespaces == kept


def test_loopback_cannot_be_cut() -> None:
    with pytest.raises(OurFault, match="loopback"):
        networks.set_link(Site("127.0.0.1"), up=False)


# --- nodes that find each other ---


class Door:
    """Instead of a transport: refuses so many tries, then all `visible` peers are connected."""

    def __init__(self, refusals: int, visible: int) -> None:
        self.tried_s: list[float] = []
        self._refusals = refusals
        self._visible = visible

    async def connect(self, address: str) -> None:
        self.tried_s.append(asyncio.get_running_loop().time())
        if len(self.tried_s) <= self._refusals:
            raise AddressError(f"{address} cannot be reached: dial backoff")

    async def peers(self) -> tuple[None, ...]:
        return (None,) * self._visible


def joined(door: Door, timeout_s: float = 60.0) -> Door:
    """After a node behind this door has joined the one before it."""
    place = Place(1, Site("10.213.0.2"), Path("unused"), Path("unused"), 0.0)
    member = UnicastMember(place)
    member.use(cast("Transport", door))
    ids = [Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2)]
    others = [{"address": f"/ip4/10.213.0.1/tcp/1/p2p/{peer_id}", "size": 1} for peer_id in ids]
    run_virtual(member.join(others, timeout_s))
    return door


def test_node_that_is_not_reached_at_once_is_dialled_again() -> None:
    assert len(joined(Door(refusals=0, visible=1)).tried_s) == 1
    door = joined(Door(refusals=4, visible=1))
    pauses = [later - sooner for sooner, later in itertools.pairwise(door.tried_s)]
    assert len(pauses) == 4
    assert pauses[-1] > 3 * pauses[0]


def test_node_that_is_never_reached_ends_the_bench_with_its_words() -> None:
    door = Door(refusals=99, visible=0)
    with pytest.raises(AddressError, match="dial backoff"):
        joined(door)
    assert 5.0 < door.tried_s[-1] < 30.0, "libp2p itself refuses to dial for 5 s after a failure"


def test_node_that_nobody_connects_to_is_a_deadline() -> None:
    with pytest.raises(DeadlineError, match="connecting to 1 other nodes"):
        joined(Door(refusals=0, visible=0))


# --- what is computed ---


def sample(at_s: float, busy_s: float, **up: int) -> Sample:
    sent = {int(name[1:]): count for name, count in up.items()}
    return Sample(at_s, sent, idle_s=10.0 + at_s, busy_s=busy_s)


def test_trace_counts_from_the_start() -> None:
    trace = Trace(
        0.0, [sample(0.0, 5.0, n0=100, n1=7), sample(1.0, 6.0, n0=200, n1=9), sample(2.0, 6.0, n0=450)]
    )
    assert trace.up_bytes(0) == 350
    assert trace.up_bytes(1) is None, "it was killed"
    assert trace.up_bytes(2) is None
    assert trace.idle == pytest.approx(2 / 3)


def test_processor_time_is_told_per_mb_that_receivers_passed_on() -> None:
    cpu = {0: Cpu(9.0, 9.0), 1: Cpu(0.3, 0.1), 2: Cpu(0.1, 0.5)}
    per_mb = bench.cpu_ms_per_mb(cpu, {0: 8_000_000, 1: 4_000_000, 2: 6_000_000})
    assert per_mb == {"node": pytest.approx(40.0), "daemon": pytest.approx(60.0)}
    assert bench.cpu_ms_per_mb({0: Cpu(1.0, 1.0), 1: Cpu(1.0, 1.0)}, {0: 1_000_000, 1: 0}) is None


@pytest.mark.parametrize(
    "size",
    [
        Size(1000, 20.0, (), 3),
        Size(1000, 20.0, (0,), 3),
        Size(1000, 20.0, (networks.MAX_NODES,), 3),
        Size(1000, 0.0, (2,), 3),
        Size(0, 20.0, (2,), 3),
    ],
)
def test_sizes_that_cannot_be_measured(size: Size) -> None:
    with pytest.raises(ConfigError):
        bench.bench_broadcast(size, lambda _: None)


def test_folders_of_dead_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MEMORY", tmp_path)
    monkeypatch.setattr(bench, "_free_bytes", lambda folder: 1 << 40)
    dead = max(psutil.pids()) + 1
    while psutil.pid_exists(dead):
        dead += 1
    for name in (f"swarm-broadcast-{dead}-x", f"swarm-broadcast-{os.getppid()}-x", "swarm-broadcast-x"):
        (tmp_path / name / "run").mkdir(parents=True)
    with bench.open_folder(QUICK) as folder:
        assert folder.parent == tmp_path
        assert list(folder.iterdir()) == []
    assert {each.name for each in tmp_path.iterdir()} == {
        f"swarm-broadcast-{os.getppid()}-x",
        "swarm-broadcast-x",
    }


# --- the whole ---


@pytest.mark.net
@pytest.mark.slow
def test_quick_bench_reports_everything(swarm: Callable[..., Any]) -> None:
    pytest.importorskip("libtorrent")
    ended = swarm("bench", "broadcast", "--quick", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["bench"] == "broadcast"
    assert report["network"] in ("namespaces", "user-space limits")
    assert [each["n"] for each in report["n"]] == list(QUICK.receivers)
    for each in report["n"]:
        assert each.keys() >= FIELDS
        assert each["bytes"] == QUICK.size_bytes
        assert each["bound_s"] == pytest.approx(QUICK.size_bytes * 8 / (QUICK.mbit * 1e6), rel=1e-3)
        assert each["ratio"] == pytest.approx(each["last_s"] / each["bound_s"], rel=1e-3)
        assert each["ratio"] > 0.7, "nobody is faster than the link, but for what it lets through at once"
        assert 0.9 < each["source_copies"] < each["n"] + 1
        assert each["unicast_s"] > 0.7 * each["n"] * each["bound_s"]
        assert each["unicast_copies"] > 0.98 * each["n"]
        assert each["libtorrent_s"] > 0.7 * each["bound_s"]
        assert each["cpu_ms_per_mb"]["node"] > 0
        assert each["cpu_ms_per_mb"]["daemon"] > 0
    churn = report["churn"]
    lost = [churn["killed"]] if report["network"] != "namespaces" else [churn["killed"], churn["silent"]]
    for each in lost:
        assert (each["n"], each["lost"]) == (QUICK.churn_receivers, 1)
        assert each["ratio"] == pytest.approx(each["last_s"] / each["bound_s"], rel=1e-3)
        assert each["ratio"] > 0.7
    first, last = (each["last_s"] for each in report["n"])
    assert report["growth"] == pytest.approx(last / first, rel=1e-2)


@pytest.mark.net
@pytest.mark.slow
def test_user_space_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtorrent")
    monkeypatch.setattr(networks, "_make", no_namespaces)
    size = Size(size_bytes=3_000_000, mbit=20.0, receivers=(2,), churn_receivers=3)
    report = bench.bench_broadcast(size, lambda _: None)
    assert report["network"] == "user-space limits"
    assert report["reasons"] == ["no namespaces: not today"]
    (each,) = report["n"]
    assert each["ratio"] > 0.9
    assert each["unicast_s"] > 2 * 0.9 * each["bound_s"]
    assert each["libtorrent_s"] > 0.9 * each["bound_s"]
    assert each["uplinks"] is None, "there is no link to look at"
    assert report["churn"]["silent"] is None, "nor to cut"
    assert report["churn"]["killed"]["lost"] == 1
    assert 0.9 < each["source_copies"] < 3


def no_namespaces(*_: object) -> networks.Network:
    raise networks.NoNamespacesError("not today")


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name
)
def test_nothing_stays_behind(
    start_swarm: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    arguments = ("--receivers", "2", "--size-mb", "8", "--mbit", "2", "--no-baselines")
    process = start_swarm("bench", "broadcast", *arguments)
    try:
        assert process.stderr is not None
        assert any("started" in line for line in process.stderr), "it never began"
        peers = [each.pid for each in psutil.process_iter() if in_namespace_of(each.pid, process.pid)]
        assert len(peers) >= 6, "three nodes and their daemons"
        process.send_signal(number)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    if number is signal.SIGKILL:
        assert namespaces_of(process.pid), "a killed process cannot clean up"
        networks.remove_leftovers()
    else:
        assert process.returncode == 130
        assert not list(Path("/dev/shm").glob(f"swarm-broadcast-{process.pid}-*"))
    assert namespaces_of(process.pid) == []
    wait_for(lambda: not any(psutil.pid_exists(each) and is_running(each) for each in peers))


def namespaces_of(process_id: int) -> list[str]:
    listed = networks.call("ip", "netns", "list").splitlines()
    return [line for line in listed if line.startswith(f"swarm-bench-{process_id}-")]


def in_namespace_of(process_id: int, bench_id: int) -> bool:
    """Whether a process is in a namespace that a bench made."""
    with contextlib.suppress(OSError):
        own = os.stat(f"/proc/{process_id}/ns/net")
        for path in Path("/run/netns").glob(f"swarm-bench-{bench_id}-*"):
            if os.path.samestat(own, path.stat()):
                return True
    return False


def is_running(process_id: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_s, "it never came"
        time.sleep(0.05)


@pytest.mark.slow
def test_command_line_needs_no_torch() -> None:
    """What the bench's own process imports; the nodes' server imports it."""
    code = "import swarm_cli.bench.broadcast.bench, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
