"""What the network daemon may dial: each of its connects and datagrams is asked about here, and most refused.

    daemon --connect(address)--> kernel --notification--> this thread: the rule --> goes on, or EPERM

libp2p dials addresses that strangers announced (identify), by any transport it knows, and no flag of the
daemon stops it. So it starts behind a filter of system calls (seccomp user notification, Linux 5.5), which a
small program installs before it becomes the daemon. The rule is `may_dial`'s, for TCP; what this node itself
asked for (`permit`) goes as well; names are looked up by the node, so DNS is refused; datagrams are refused
but for those that ask a home router for a port. The daemon is no liar itself: an address that changes between
question and answer does not matter.

Not for machines whose system calls are not known, or that allow no filter: `missing` then says why, and the
daemon dials as it likes. Cannot tell WebSocket from TCP to the same public address.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import select
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from cachetools import LRUCache

from node.syscalls import ALLOW, RETURN, instruction, known_calls, on_call, prologue
from node.transport._addresses import may_dial

__all__ = ["DialGuard", "problem"]

Address = tuple[str, int]
"""IP address and port."""

_NOTIFY: Final = 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTIFICATION, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_CALLS = ("connect", "sendto", "sendmsg", "sendmmsg")
_PIDFD_GETFD = "pidfd_getfd"
_HANDSHAKE_S = 15.0
_MAX_SOCKADDR, _MAX_MESSAGES = 128, 16
_PERMITTED = 1024
_DNS_PORT = 53
_ROUTERS: Final = (("239.255.255.250", 1900),)
"""Where UPnP asks; NAT-PMP asks at a port of a private address."""
_NAT_PMP_PORT = 5351

_SHIM = """
import ctypes, os, socket, sys
path, call, code = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
asked = socket.socket(socket.AF_UNIX)
asked.connect(path)
libc = ctypes.CDLL(None, use_errno=True)
held = ctypes.create_string_buffer(code, len(code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(code) // 8, ctypes.addressof(held))
libc.prctl(38, 1, 0, 0, 0)
listener = libc.syscall(call, 1, 8, ctypes.byref(program))
os.write(asked.fileno(), b"%d %d" % (listener, ctypes.get_errno()))
os.read(asked.fileno(), 1)
os.execv(sys.argv[4], sys.argv[4:])
"""
"""Installs the filter (no new privileges, SECCOMP_SET_MODE_FILTER with a listener), tells the descriptor by
`write`, which is not filtered, and becomes the daemon once it was fetched."""


def problem(call: str, address: Address, own: Sequence[str], permitted: bool, maps_ports: bool) -> str:
    """Why the daemon may not do this `call` with an IP address, in a word; "" if it may. `own` are this
    node's addresses; `maps_ports`: it asks a home router for a port."""
    host, port = ipaddress.ip_address(address[0]), address[1]
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    to_router = maps_ports and (
        (str(host), port) in _ROUTERS or (port == _NAT_PMP_PORT and host.is_private and not host.is_loopback)
    )
    if to_router:
        return ""
    if call != "connect":
        return "datagram"
    if permitted:
        return ""
    if port == _DNS_PORT:
        return "dns"
    return "" if may_dial(f"/ip{host.version}/{host}/tcp/{port}", own) else "address"


class DialGuard:
    """Of one daemon. `own()` gives this node's addresses, on any thread."""

    def __init__(self, own: Callable[[], Sequence[str]], *, maps_ports: bool) -> None:
        self.missing = ""
        """Why this daemon's dials are not asked about; "" while they are."""
        self.refused: Counter[str] = Counter()
        """By reason."""
        self._own = own
        self._maps_ports = maps_ports
        self._permitted: LRUCache[Address, None] = LRUCache(_PERMITTED)
        self._folder = ""
        self._wake, self._woken = os.pipe()
        self._thread: threading.Thread | None = None
        self._calls = known_calls() or {}

    def permit(self, host: str, port: int) -> None:
        """This node wants it dialled."""
        self._permitted[str(ipaddress.ip_address(host)), port] = None

    def command(self, arguments: list[str]) -> list[str]:
        """What starts the daemon of `arguments` behind the filter."""
        if sys.platform != "linux" or not self._calls:
            self.missing = f"no table of system calls for {sys.platform} on {os.uname().machine}"
            return arguments
        program = prologue()
        for name in _CALLS:
            program += on_call(self._calls[name], [instruction(RETURN, _NOTIFY)])
        program.append(instruction(RETURN, ALLOW))
        self._folder = tempfile.mkdtemp(prefix="swarm-dials-")
        door = socket.socket(socket.AF_UNIX)
        door.bind(f"{self._folder}/door")
        door.listen(1)
        self._thread = threading.Thread(target=self._run, args=(door,), name="dials", daemon=True)
        self._thread.start()
        filtering = [f"{self._folder}/door", str(self._calls["seccomp"]), b"".join(program).hex()]
        return [sys.executable, "-ISc", _SHIM, *filtering, *arguments]

    def close(self) -> None:
        """End the thread; a daemon that still lives dials nothing from then on."""
        os.close(self._woken)
        if self._thread is not None:
            self._thread.join(1.0)
        os.close(self._wake)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self, door: socket.socket) -> None:
        listener = -1
        try:
            with door:
                listener = self._fetched(door)
            if listener >= 0:
                self._serve(listener)
        except OSError as error:
            self.missing = self.missing or f"the filter cannot be served: {error.strerror or error}"
        finally:
            if listener >= 0:
                os.close(listener)

    def _fetched(self, door: socket.socket) -> int:
        """The listener's descriptor in this process; -1 where there is none, and `missing` says why."""
        ready, _, _ = select.select([door.fileno(), self._wake], [], [], _HANDSHAKE_S)
        if door.fileno() not in ready:
            self.missing = "the daemon did not start"
            return -1
        asked, _ = door.accept()
        with asked:
            asked.settimeout(_HANDSHAKE_S)
            pid, _, _ = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            theirs, failure = map(int, asked.recv(64).split())
            try:
                if theirs < 0:
                    self.missing = f"this system allows no filter: {os.strerror(failure)}"
                    return -1
                return self._descriptor_of(pid, theirs)
            finally:
                with contextlib.suppress(OSError):
                    asked.send(b"!")

    def _descriptor_of(self, pid: int, theirs: int) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        process = os.pidfd_open(pid)
        try:
            ours = int(libc.syscall(self._calls[_PIDFD_GETFD], process, theirs, 0))
        finally:
            os.close(process)
        if ours < 0:
            # Filtered and nobody to answer: it would fail at its first dial, in words that say nothing.
            os.kill(pid, 9)
            raise OSError(ctypes.get_errno(), f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        return ours

    def _serve(self, listener: int) -> None:
        names = {self._calls[name]: name for name in _CALLS}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self._wake in events or events.get(listener, 0) & (select.POLLHUP | select.POLLERR):
                return
            notification = bytearray(_NOTIFICATION.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, notification)
            except OSError:  # the thread that asked is gone
                continue
            number, thread, _, call, _, _, *arguments = _NOTIFICATION.unpack(notification)
            refused = self._refusal(names.get(call, ""), thread, arguments)
            if refused:
                self.refused[refused] += 1
            answer = _RESPONSE.pack(number, 0, -1 if refused else 0, 0 if refused else _CONTINUE)
            with contextlib.suppress(OSError):
                fcntl.ioctl(listener, _SEND, bytearray(answer))

    def _refusal(self, call: str, thread: int, arguments: Sequence[int]) -> str:
        """Why not, "" for nothing."""
        try:
            with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
                named = _named(call, arguments, lambda at, size: os.pread(memory.fileno(), size, at))
        except (OSError, OverflowError, struct.error):
            return "unreadable"
        for address in map(_ip_address, named):
            if address is None:
                continue
            permitted = address in self._permitted
            if found := problem(call, address, self._own(), permitted, self._maps_ports):
                return found
        return ""


def _named(call: str, arguments: Sequence[int], read: Callable[[int, int], bytes]) -> list[bytes]:
    """The socket addresses of a call; none for sockets that are connected."""
    if call == "connect":
        spans = [(arguments[1], arguments[2])]
    elif call == "sendto":
        spans = [(arguments[4], arguments[5])]
    else:
        count = min(arguments[2], _MAX_MESSAGES + 1) if call == "sendmmsg" else 1
        if count > _MAX_MESSAGES:
            raise struct.error("more messages than are looked at")
        spans = [struct.unpack("=QI", read(arguments[1] + 64 * each, 12)) for each in range(count)]
    return [read(at, min(size & 0xFFFFFFFF, _MAX_SOCKADDR)) for at, size in spans if at]


def _ip_address(raw: bytes) -> Address | None:
    """Of a sockaddr; None for families that are not IP."""
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[4:8])), int.from_bytes(raw[2:4], "big")
    if family == socket.AF_INET6:
        return str(ipaddress.IPv6Address(raw[8:24])), int.from_bytes(raw[2:4], "big")
    return None
