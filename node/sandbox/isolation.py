"""The walls of the scoring worker, from the inside: what it can still see, and how it locks itself in.

Order: `readable_view` lists the directories of libraries; `leave_namespaces` moves the process into new
mount, network, pid, ipc and host-name namespaces, and `build_root` makes that list, read-only, their whole
file system; `lock_down` drops root, every capability and, through landlock, every file right but reading
there; `limit_fork` sets the limits and the system call filter of one fork. Each wall stands without the
others: where a container forbids one, the worker goes on with the rest and says so.

Not here: whether the walls hold. `strength.py` measures that by trying to break out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from node.sandbox import linux

if TYPE_CHECKING:
    from collections.abc import Sequence

    from node.sandbox.records import SandboxLimits

__all__ = [
    "MemoryMeter",
    "build_root",
    "leave_namespaces",
    "limit_fork",
    "lock_down",
    "readable_view",
    "seal",
]

_NOBODY = 65534
_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
)
_SCRATCH = "/tmp"  # noqa: S108  (of a file system of its own)
_STAGING = "/proc"  # always there, never holds a library, and not needed once the root is replaced
_ADDRESS_SPACE_FACTOR = 2  # a fork over its memory limit is refused; over twice that, allocation itself fails


def readable_view(hidden_paths: Sequence[str] = (), packages: Sequence[str] = ()) -> tuple[str, ...]:
    """Absolute paths that imports may need: directories of Python's and the system's libraries, the loaded
    packages outside them, and `packages`, files or folders of those that are not loaded yet."""
    libraries = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries |= {
        entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages", "lib-dynload"}
    }
    paths = (*libraries, *packages, *_system_libraries())
    view = {os.path.realpath(path) for path in paths if path and os.path.exists(path)}
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if "." in name or not isinstance(origin, str) or not os.path.isabs(origin):
            continue
        is_package = bool(getattr(module, "__path__", None))
        path = os.path.realpath(os.path.dirname(origin) if is_package else origin)
        if os.path.exists(path):
            view.add(path)
    hidden = {os.path.realpath(path) for path in hidden_paths}
    outermost = sorted(
        path for path in view if not any(_inside(path, other) for other in view if other != path)
    )
    return tuple(
        path for path in outermost if not any(path == other or _inside(path, other) for other in hidden)
    )


def _system_libraries() -> set[str]:
    """Where the loader finds shared libraries: its index, and the folders of those that this process has."""
    found = {"/etc/ld.so.cache"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            if Path(path).name.startswith("libc.so"):
                found.add(os.path.dirname(path))
    return found


def _inside(path: str, directory: str) -> bool:
    return path.startswith(os.path.join(directory, ""))


def leave_namespaces() -> None:
    """Leave the machine's namespaces; the next fork is process 1 of an empty pid namespace, and still sees
    the machine's files (`build_root`).

    Raises `OSError`; the process is then half way through and must end.
    """
    try:
        linux.unshare(_NAMESPACES)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        user, group = os.geteuid(), os.getegid()
        linux.unshare(_NAMESPACES | linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def build_root(view: Sequence[str], hidden_paths: Sequence[str]) -> None:
    """Make `view`, read-only and without `hidden_paths`, the whole file system of this process, in a mount
    namespace of its own. Raises `OSError`; the process is then half way through and must end."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("sandbox", _STAGING, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    # Some libraries want a folder for their caches when they are imported (`seal`).
    os.makedirs(_STAGING + _SCRATCH, 0o755, exist_ok=True)
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("scratch", _STAGING + _SCRATCH, "tmpfs", flags, "size=8m,mode=700")
    with contextlib.suppress(OSError):  # not ours to give away: then we stay who we are, too
        os.chown(_STAGING + _SCRATCH, _NOBODY, _NOBODY)
    for path in view:
        target = _STAGING + path
        if os.path.isdir(path):
            os.makedirs(target, 0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            Path(target).touch(0o444)
        linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
        kept = _locked_flags(target)
        linux.mount("none", target, None, kept | linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY)
    for hidden in (os.path.realpath(path) for path in hidden_paths):
        if os.path.isdir(_STAGING + hidden) and any(_inside(hidden, path) for path in view):
            linux.mount(
                "hidden", _STAGING + hidden, "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID, "size=4k,mode=000"
            )
    os.chdir(_STAGING)
    linux.pivot_root(".", ".")
    linux.detach_mount(".")
    os.chdir("/")
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("none", "/", None, flags | linux.MS_BIND | linux.MS_REMOUNT)


def seal() -> None:
    """Nothing is imported any more, so nothing more is written. (Forks may write no byte anyway.)"""
    with contextlib.suppress(OSError):
        os.chmod(_SCRATCH, 0o500)


def _locked_flags(target: str) -> int:
    """Flags that a user namespace must repeat when it remounts; the kernel refuses to weaken them."""
    current = os.statvfs(target).f_flag
    pairs = (
        (os.ST_NODEV, linux.MS_NODEV),
        (os.ST_NOEXEC, linux.MS_NOEXEC),
        (os.ST_NOATIME, 1024),
        (os.ST_NODIRATIME, 2048),
        (os.ST_RELATIME, 1 << 21),
    )
    return linux.MS_NOSUID | sum(flag for seen, flag in pairs if current & seen)


def lock_down(view: Sequence[str], *, own_root: bool) -> list[str]:
    """Give up root and capabilities, for good. Returns what could not be given up, as sentences.

    `own_root`: the process sees only `view`, so an ordinary user can reach all of it.
    """
    missing: list[str] = []
    if os.geteuid() == 0:
        if own_root or all(_others_may_read(path) for path in view):
            try:
                os.setgroups([])
                os.setresgid(_NOBODY, _NOBODY, _NOBODY)
                os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            except OSError as error:
                missing.append(f"still runs as uid 0, without capabilities ({error})")
        else:
            missing.append(
                "still runs as uid 0, without capabilities (others may not read the Python libraries)"
            )
    for step in (linux.drop_capabilities, linux.no_new_privileges):
        try:
            step()
        except OSError as error:
            missing.append(str(error))
    with contextlib.suppress(OSError):
        linux.set_dumpable(False)
    return missing


def _others_may_read(path: str) -> bool:
    parts = (Path(path), *Path(path).parents)
    return all(part.stat().st_mode & (stat.S_IXOTH if part.is_dir() else stat.S_IROTH) for part in parts)


def limit_fork(limits: SandboxLimits, base_bytes: int, seccomp_filter: bytes | None) -> None:
    """Set the limits and the system call filter of this fork. Raises `OSError` when one cannot be set."""
    address_space = base_bytes + _ADDRESS_SPACE_FACTOR * limits.memory_bytes
    for kind, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))
    # SIGXCPU at the soft limit tells a timeout from other deaths; at the hard limit it would be SIGKILL.
    # The hard one leaves room for the answer; whoever forked lowers it once the environment's part is done.
    hard_s = limits.derive_cpu_s + limits.cpu_s + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limits.derive_cpu_s, hard_s))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    if seccomp_filter is not None:
        linux.set_seccomp_filter(seccomp_filter)


class MemoryMeter:
    """Address space and resident memory of this process, also once /proc is out of sight. Made by the process
    that it is about."""

    def __init__(self) -> None:
        self._statm: int | None = None
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Bytes of both; zeros where the system does not tell."""
        if self._statm is None:
            return 0, 0
        size, resident, *_ = os.pread(self._statm, 256, 0).split()
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return int(size) * page_bytes, int(resident) * page_bytes

    def close(self) -> None:
        """Nothing more is asked."""
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None
