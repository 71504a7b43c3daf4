"""The walls of the scoring worker, from the inside: what it can still see, and how it locks itself in.

Order: `readable_view` lists the directories of the loaded libraries; `enter_namespaces` moves the process
into new mount, network, pid, ipc and host-name namespaces whose whole file system is that list, read-only;
`lock_down` drops root, every capability and, through landlock, every file right but reading there;
`limit_fork` sets the limits and the system call filter of one fork. Each wall stands without the others:
where a container forbids one, the worker goes on with the rest and says so.

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
    "enter_namespaces",
    "limit_fork",
    "lock_down",
    "memory_bytes",
    "readable_view",
]

_NOBODY = 65534
_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
)
_STAGING = "/proc"  # always there, never holds a library, and not needed once the root is replaced
_ADDRESS_SPACE_FACTOR = 2  # a fork over its memory limit is refused; over twice that, allocation itself fails


def readable_view(hidden_paths: Sequence[str] = ()) -> tuple[str, ...]:
    """Absolute paths that lazy imports may need: library directories and the loaded packages outside them."""
    libraries = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    libraries |= {
        entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages", "lib-dynload"}
    }
    view = {os.path.realpath(path) for path in libraries if path and os.path.isdir(path)}
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


def _inside(path: str, directory: str) -> bool:
    return path.startswith(os.path.join(directory, ""))


def enter_namespaces(view: Sequence[str], hidden_paths: Sequence[str]) -> None:
    """Leave the machine's namespaces; the next fork is process 1 of an empty pid namespace.

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
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("sandbox", _STAGING, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
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


def lock_down(view: Sequence[str], limits: SandboxLimits, *, own_root: bool, landlock: bool) -> list[str]:
    """Give up root, capabilities and file rights, for good. Returns what could not be given up, as sentences.

    `own_root`: the process sees only `view`, so an ordinary user can reach all of it.
    """
    missing: list[str] = []
    with contextlib.suppress(OSError):
        os.nice(limits.niceness)
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
    if landlock:
        try:
            linux.restrict_with_landlock(view)
        except OSError as error:
            missing.append(f"no landlock: {error}")
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
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    if seccomp_filter is not None:
        linux.set_seccomp_filter(seccomp_filter)


def memory_bytes() -> tuple[int, int]:
    """This process's address space and resident memory; call it while /proc is still there."""
    try:
        size, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(size) * page_bytes, int(resident) * page_bytes
