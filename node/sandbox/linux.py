"""Thin, typed wrappers around the Linux calls that Python 3.11 does not offer.

Only what `isolation.py` needs: prctl, unshare, mount, pivot_root, capabilities and landlock. Each function
raises `OSError` with the name of the call, so that a missing wall is reported with its cause. Importing this
module on another system is harmless; calling into it raises `OSError(ENOSYS)`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "detach_mount",
    "drop_capabilities",
    "mount",
    "no_new_privileges",
    "pivot_root",
    "restrict_with_landlock",
    "set_dumpable",
    "set_parent_death_signal",
    "set_seccomp_filter",
    "unshare",
]

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_SECUREBITS_ALL_LOCKED = 0b1110_1111  # noroot, no setuid fixup, keep-caps off, no ambient raise, each locked
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_POSSIBLE_CAPABILITY = 63

# The same on every architecture which joined after the unified syscall table, x86-64 and aarch64 included.
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_READ_FILE = 1 << 2
_LANDLOCK_READ_DIR = 1 << 3
_LANDLOCK_NET_ALL = 0b11  # bind and connect, TCP
_LANDLOCK_SCOPE_ALL = 0b11  # abstract sockets and signals
# All file rights known to ABI 1, 2, 3-4, 5 and later.
_LANDLOCK_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NEWEST_KNOWN_ABI = 6

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
else:
    _libc = None


def _call(name: str, *arguments: Any) -> int:
    if _libc is None:
        raise OSError(errno.ENOSYS, f"{name}: this system is {sys.platform}, not Linux")
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return _call("prctl", ctypes.c_int(option), *padded)


def _syscall(number: int, *arguments: Any) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def set_parent_death_signal(signal_number: int) -> None:
    """Have the kernel send `signal_number` to this process when its parent thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def set_dumpable(dumpable: bool) -> None:
    """Forbid (or allow) core dumps, ptrace and foreign reads of this process's /proc entry."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def no_new_privileges() -> None:
    """Make setuid programs and file capabilities worthless for this process and its children, for good."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new, empty ones."""
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2); `kind` is the file system, None for binds and remounts."""
    try:
        _call(
            "mount",
            os.fsencode(source),
            os.fsencode(target),
            os.fsencode(kind) if kind else None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        )
    except OSError as error:
        raise OSError(
            error.errno, f"mount of {source!r} on {target!r}: {os.strerror(error.errno or 0)}"
        ) from error


def detach_mount(target: str) -> None:
    """Take `target` out of the tree even where it is busy."""
    _call("umount2", os.fsencode(target), ctypes.c_int(_MNT_DETACH))


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace."""
    number = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root: no syscall number known for {os.uname().machine}")
    _syscall(number, os.fsencode(new_root), os.fsencode(put_old))


def drop_capabilities() -> None:
    """Give up every capability in every set; root without them is an ordinary user."""
    for capability in range(_LAST_POSSIBLE_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # past the last one that this kernel knows
                break
            if error.errno != errno.EPERM:  # not ours to drop: then we do not hold it either
                raise
    try:
        _prctl(_PR_SET_SECUREBITS, _SECUREBITS_ALL_LOCKED)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    try:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    nothing = ctypes.create_string_buffer(struct.pack("=6I", 0, 0, 0, 0, 0, 0))
    _call("capset", header, nothing)


def restrict_with_landlock(readable_paths: Sequence[str]) -> None:
    """From now on this process and its children may only read below `readable_paths`, and use no TCP port."""
    abi = _syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    file_rights = (1 << _LANDLOCK_FS_BITS[min(abi, 5)]) - 1
    attributes = struct.pack(
        "=QQQ",
        file_rights,
        _LANDLOCK_NET_ALL if abi >= 4 else 0,
        _LANDLOCK_SCOPE_ALL if abi >= _NEWEST_KNOWN_ABI else 0,
    )
    size = 24 if abi >= _NEWEST_KNOWN_ABI else 16 if abi >= 4 else 8
    ruleset = _syscall(
        _SYS_LANDLOCK_CREATE_RULESET,
        ctypes.create_string_buffer(attributes),
        ctypes.c_size_t(size),
        ctypes.c_uint(0),
    )
    try:
        for path in readable_paths:
            rights = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, handle))
                _syscall(
                    _SYS_LANDLOCK_ADD_RULE,
                    ctypes.c_int(ruleset),
                    ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH),
                    rule,
                    ctypes.c_uint(0),
                )
            finally:
                os.close(handle)
        _syscall(_SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def set_seccomp_filter(program: bytes) -> None:
    """Install a classic BPF program as this process's system call filter; needs `no_new_privileges` first."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class _Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    wrapper = _Program(len(program) // 8, ctypes.addressof(instructions))
    _call(
        "prctl",
        ctypes.c_int(_PR_SET_SECCOMP),
        ctypes.c_ulong(_SECCOMP_MODE_FILTER),
        ctypes.byref(wrapper),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
