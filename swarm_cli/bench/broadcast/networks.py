"""Links like those of homes, on one machine: a network namespace per node, joined by a bridge.

    node's namespace: uplink (tbf: up) ==veth== port (tbf: down) in the hub's namespace, all ports on a bridge

The kernel does the shaping, both ways, with a queue like a home router's. Needs root, `ip` and `tc`. The hub
is a namespace too, so that nothing of the machine's own network is touched; names carry our process id, and
what a killed run left is removed by the next one. Where this cannot be, all nodes share the loopback device
and must limit themselves. Not for delay and loss: `netem` is in few kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from protocol.errors import OurFault

__all__ = [
    "MAX_NODES",
    "Network",
    "NoNamespacesError",
    "Site",
    "call",
    "enter",
    "open_network",
    "remove_leftovers",
    "sent_bytes",
    "set_link",
]

MAX_NODES = 200
BURST = "32kb"
QUEUE = "100ms"
"""What may wait in front of a full link before packets are dropped."""
_DEVICE = "uplink"
"""A name that no device of the machine has, so that theirs are never counted."""
_CONGESTION_CONTROL = ("cubic", "reno")
"""What TCP does at nearly all homes, or its ancestor where namespaces may not have it. BBR, if that is the
machine's own, sends every packet by a timer: too much work for one machine that is seventeen."""
_FILTERS = ("iptables", "ip6tables", "arptables")
"""A machine with containers sends what crosses a bridge through its firewall; these links have none."""
_PREFIX = "swarm-bench"
_NAME = re.compile(rf"{_PREFIX}-([0-9]+)-[0-9a-f]+-(?:hub|[0-9]+)")
_COMMAND_S = 20.0
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Site:
    """Where one node runs."""

    address: str
    namespace: str | None = None


@dataclass(frozen=True)
class Network:
    """Sites that reach each other. `cap_mbit`: what each must keep to by itself, 0 where the kernel sees to
    it."""

    kind: str
    sites: tuple[Site, ...]
    cap_mbit: float = 0.0
    reason: str = ""
    """Why there are no namespaces."""


class NoNamespacesError(Exception):
    """Says why namespaces cannot be used here."""


@contextlib.contextmanager
def open_network(nodes: int, mbit: float) -> Iterator[Network]:
    """A network of so many nodes, gone after the block: of namespaces where they can be made."""
    prefix = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        try:
            remove_leftovers()
            network = _make(prefix, nodes, mbit)
        except NoNamespacesError as error:
            # All on the loopback device, which has no limits.
            network = Network("user-space limits", (Site("127.0.0.1"),) * nodes, mbit, str(error))
        yield network
    finally:
        _remove(lambda name: name.startswith(f"{prefix}-"))


def remove_leftovers() -> None:
    """Delete the namespaces of runs whose process is gone."""
    _remove(lambda name: not psutil.pid_exists(int(_NAME.fullmatch(name)[1])))  # type: ignore[index]


def enter(namespace: str) -> None:
    """Move this process, which must have one thread, into a namespace for good. Raises OSError."""
    with Path("/run/netns", namespace).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter namespace {namespace}: {os.strerror(number)}")


def set_link(site: Site, *, up: bool) -> None:
    """Cut a node off, or plug it in again, without a word to anybody. Raises OurFault."""
    if site.namespace is None:
        raise OurFault("a node on the loopback device cannot be cut off")
    try:
        call("ip", "-n", site.namespace, "link", "set", _DEVICE, "up" if up else "down")
    except NoNamespacesError as error:
        raise OurFault(f"a node of the bench cannot be cut off: {error}") from None


def sent_bytes(process_id: int) -> int | None:
    """What the node whose process this is has sent over its link, headers included; None once it is gone."""
    try:
        text = Path(f"/proc/{process_id}/net/dev").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == _DEVICE:
            return int(numbers.split()[8])
    return None


def _make(prefix: str, nodes: int, mbit: float) -> Network:
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces need root")
    hub = f"{prefix}-hub"
    call("ip", "netns", "add", hub)
    call("ip", "-n", hub, "link", "add", "hub", "type", "bridge", "mcast_snooping", "0")
    call("ip", "-n", hub, "link", "set", "hub", "up")
    for name in _FILTERS:
        _set(hub, f"net.bridge.bridge-nf-call-{name}", "0")
    shaping = ("tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", BURST, "latency", QUEUE)
    sites = []
    for number in range(nodes):
        name, port, address = f"{prefix}-{number}", f"port{number}", f"10.213.0.{number + 1}"
        call("ip", "netns", "add", name)
        any(_set(name, "net.ipv4.tcp_congestion_control", each) for each in _CONGESTION_CONTROL)
        veth = ("name", port, "netns", hub, "type", "veth", "peer", "name", _DEVICE, "netns", name)
        call("ip", "link", "add", *veth)
        call("ip", "-n", name, "address", "add", f"{address}/24", "dev", _DEVICE)
        for namespace, device in ((name, "lo"), (name, _DEVICE)):
            call("ip", "-n", namespace, "link", "set", device, "up")
        call("ip", "-n", hub, "link", "set", port, "master", "hub", "up")
        for namespace, device in ((name, _DEVICE), (hub, port)):
            call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaping)
        sites.append(Site(address, name))
    return Network("namespaces", tuple(sites))


def _set(namespace: str, key: str, value: str) -> bool:
    """Whether the kernel took a setting of this namespace."""
    with contextlib.suppress(NoNamespacesError):
        call("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", f"{key}={value}")
        return True
    return False


def call(*command: str) -> str:
    """What a command prints. Raises NoNamespacesError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespacesError(f"`{command[0]}` did not run: {error}") from None
    if done.returncode:
        words = " ".join(done.stderr.split())[:200]
        raise NoNamespacesError(f"`{' '.join(command)}` failed: {words}")
    return done.stdout


def _remove(chosen: Callable[[str], bool]) -> None:
    try:
        listed = call("ip", "netns", "list")
    except NoNamespacesError:
        return
    for name in (line.split()[0] for line in listed.splitlines() if line.strip()):
        if _NAME.fullmatch(name) and chosen(name):
            with contextlib.suppress(NoNamespacesError):
                call("ip", "netns", "delete", name)
