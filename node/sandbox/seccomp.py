"""The system call filter of one scoring fork, assembled as classic BPF.

Three answers: a short list of calls that pure computation needs is allowed (`open` only for reading, `mmap`
and `mremap` only up to the memory limit); calls that scoring never makes and an attack does kill the process
on the spot, which the worker sees as SIGSYS and reports as `forbidden`; anything else fails with EPERM, so
that a library which probes for a feature goes on without it. Foreign architectures (32-bit calls on x86-64,
x32) are killed.

A machine whose system calls are not known (`node/syscalls.py`) gets no filter and is told so.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from node.syscalls import (
    ALLOW,
    JUMP_ANY_BIT,
    JUMP_EQUAL,
    JUMP_GREATER,
    KILL_PROCESS,
    RETURN,
    argument,
    instruction,
    known_calls,
    on_call,
    prologue,
)

__all__ = ["seccomp_program"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ALLOWED = _words(
    """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 exit exit_group
    faccessat faccessat2 fadvise64 fcntl fstat futex futex_waitv getcpu getcwd getdents64 getegid geteuid
    getgid getitimer getpid getrandom getrusage gettid gettimeofday getuid ioctl lseek lstat madvise
    membarrier mprotect munmap nanosleep newfstatat poll ppoll pread64 pselect6 read readlink readlinkat
    readv restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn sched_getaffinity sched_yield
    select set_robust_list set_tid_address setitimer sigaltstack stat statx sysinfo time times uname write
    writev
    """
)

_KILLED = _words(
    """
    accept accept4 acct add_key adjtimex bind bpf capset chmod chown chroot clock_settime clone clone3
    connect creat delete_module execve execveat fanotify_init fchmod fchmodat fchown fchownat finit_module
    fork fsmount fsopen fspick ftruncate init_module inotify_init1 io_uring_enter io_uring_register
    io_uring_setup kcmp kexec_file_load kexec_load keyctl kill lchown link linkat listen memfd_create
    memfd_secret mkdir mkdirat mknod mknodat mount mount_setattr move_mount mq_open msgget msgsnd
    name_to_handle_at open_by_handle_at open_tree perf_event_open personality pidfd_getfd pidfd_open
    pidfd_send_signal pivot_root prlimit64 process_madvise process_vm_readv process_vm_writev ptrace
    quotactl reboot recvfrom recvmmsg recvmsg rename renameat renameat2 request_key rmdir rt_sigqueueinfo
    rt_tgsigqueueinfo seccomp semget semop sendmmsg sendmsg sendto setdomainname setfsgid setfsuid setgid
    setgroups sethostname setns setregid setresgid setresuid setreuid setrlimit settimeofday setuid shmat
    shmctl shmget socket socketpair swapoff swapon symlink symlinkat tgkill tkill truncate umount2 unlink
    unlinkat unshare userfaultfd utime utimensat utimes vfork
    """
)


_REFUSE: Final = 0x00050000 | errno.EPERM
_OPEN_FOR_CHANGE: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _read_only_open(position: int) -> list[bytes]:
    return [
        argument(position),
        instruction(JUMP_ANY_BIT, _OPEN_FOR_CHANGE, 0, 1),
        instruction(RETURN, KILL_PROCESS),
        instruction(RETURN, ALLOW),
    ]


def _at_most(position: int, limit: int) -> list[bytes]:
    return [
        argument(position, high=True),
        instruction(JUMP_EQUAL, 0, 0, 2),
        argument(position),
        instruction(JUMP_GREATER, limit, 0, 1),
        instruction(RETURN, KILL_PROCESS),
        instruction(RETURN, ALLOW),
    ]


def seccomp_program(mapping_bytes: int) -> bytes | None:
    """The filter, or None where the calls are not known; one mapping may be `mapping_bytes` long."""
    numbers = known_calls()
    if numbers is None:
        return None
    limit = min(mapping_bytes, 0xFFFFFFFF)
    program = prologue()
    bounded = {
        "mmap": _at_most(1, limit),
        "mremap": _at_most(2, limit),
        "openat": _read_only_open(2),
        "open": _read_only_open(1),
    }
    for name, body in bounded.items():
        if name in numbers:
            program += on_call(numbers[name], body)
    for names, verdict in ((_ALLOWED, ALLOW), (_KILLED, KILL_PROCESS)):
        for name in names:
            if name in numbers:
                program += on_call(numbers[name], [instruction(RETURN, verdict)])
    program.append(instruction(RETURN, _REFUSE))
    return b"".join(program)
