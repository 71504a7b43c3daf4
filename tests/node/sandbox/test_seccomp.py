"""The system call filter, installed in a forked process of the test's own."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from node.sandbox import linux
from node.sandbox.seccomp import seccomp_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

ONE_MIB = 1 << 20


def outcome(action: Callable[[], object]) -> int:
    """Exit status of a child that runs `action` behind the filter; negative when a signal ended it."""
    program = seccomp_program(mapping_bytes=16 * ONE_MIB)
    if program is None:
        pytest.skip(f"no system call table for machine {os.uname().machine!r}")
    pid = os.fork()
    if pid == 0:
        try:
            linux.no_new_privileges()
            linux.set_seccomp_filter(program)
            action()
        except OSError as error:
            os._exit(error.errno or 1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "action",
    [
        lambda: sum(range(100_000)),
        lambda: bytearray(8 * ONE_MIB),
        lambda: Path(__file__).read_bytes(),
        lambda: os.listdir("/"),
        lambda: os.urandom(8),
        lambda: __import__("time").sleep(0),
    ],
)
def test_computing_and_reading_pass(action: Callable[[], object]) -> None:
    assert outcome(action) == 0


@pytest.mark.parametrize(
    "action",
    [
        socket.socket,
        socket.socketpair,
        os.fork,
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.kill(os.getppid(), 0),
        lambda: os.open("/dev/null", os.O_WRONLY),
        lambda: os.open("/nowhere", os.O_RDONLY | os.O_CREAT),
        lambda: os.unlink("/nowhere"),
        lambda: os.mkdir("/nowhere/either"),
        lambda: mmap.mmap(-1, 17 * ONE_MIB),
        lambda: os.memfd_create("x"),
        lambda: linux.unshare(linux.CLONE_NEWUSER),
    ],
)
def test_what_scoring_never_does_is_fatal(action: Callable[[], object]) -> None:
    assert outcome(action) == -signal.SIGSYS


def test_unlisted_calls_fail_without_harm() -> None:
    assert outcome(lambda: os.sched_setaffinity(0, {0})) == 1  # EPERM


def test_no_table_for_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.uname_result(("Linux", "host", "6", "1", "mips"))
    monkeypatch.setattr(os, "uname", lambda: names)
    assert seccomp_program(ONE_MIB) is None
