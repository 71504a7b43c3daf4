"""System calls by number, and classic BPF to choose among them: what filters of system calls are made of.

The tables are the kernel's stable ABI; a machine whose architecture is not listed has no filter. For the
sandbox's forks (`node/sandbox/seccomp.py`) and the network daemon's dials (`node/transport/_dials.py`).
"""

from __future__ import annotations

import os
import struct
from typing import Final

__all__ = [
    "ALLOW",
    "JUMP_ANY_BIT",
    "JUMP_EQUAL",
    "JUMP_GREATER",
    "KILL_PROCESS",
    "RETURN",
    "argument",
    "instruction",
    "known_calls",
    "on_call",
    "prologue",
]

_LOAD_WORD, JUMP_EQUAL, JUMP_GREATER, _JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = (
    0x20,
    0x15,
    0x25,
    0x35,
    0x45,
    0x06,
)
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
ALLOW: Final = 0x7FFF0000
KILL_PROCESS: Final = 0x80000000
_X32_BIT: Final = 0x40000000


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One of BPF."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def argument(position: int, high: bool = False) -> bytes:
    """Load half of a 64-bit argument; both architectures are little-endian."""
    return instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * position + (4 if high else 0))


def on_call(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body`, which must end in a return, when the loaded call is `number`."""
    return [instruction(JUMP_EQUAL, number, 0, len(body)), *body]


def known_calls() -> dict[str, int] | None:
    """Numbers by name on this machine, None where they are not known."""
    known = _ARCHITECTURES.get(os.uname().machine)
    return known[1] if known is not None else None


def prologue() -> list[bytes]:
    """Kills foreign architectures (32-bit calls on x86-64, x32), and loads the call's number."""
    architecture, _ = _ARCHITECTURES[os.uname().machine]
    return [
        instruction(_LOAD_WORD, _OFFSET_ARCHITECTURE),
        instruction(JUMP_EQUAL, architecture, 1, 0),
        instruction(RETURN, KILL_PROCESS),
        instruction(_LOAD_WORD, _OFFSET_NUMBER),
        instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        instruction(RETURN, KILL_PROCESS),
    ]


def _table(text: str) -> dict[str, int]:
    pairs = (pair.split("=") for pair in text.split())
    return {name: int(number) for name, number in pairs}


_X86_64: Final = _table("""
    accept=43 accept4=288 access=21 acct=163 add_key=248 adjtimex=159 arch_prctl=158 bind=49 bpf=321
    brk=12 capset=126 chmod=90 chown=92 chroot=161 clock_getres=229 clock_gettime=228 clock_nanosleep=230
    clock_settime=227 clone=56 clone3=435 close=3 connect=42 creat=85 delete_module=176 dup=32 dup2=33
    dup3=292 execve=59 execveat=322 exit=60 exit_group=231 faccessat=269 faccessat2=439 fadvise64=221
    fanotify_init=300 fchmod=91 fchmodat=268 fchown=93 fchownat=260 fcntl=72 finit_module=313 fork=57
    fsmount=432 fsopen=430 fspick=433 fstat=5 ftruncate=77 futex=202 futex_waitv=449 getcpu=309 getcwd=79
    getdents64=217 getegid=108 geteuid=107 getgid=104 getitimer=36 getpid=39 getrandom=318 getrusage=98
    gettid=186 gettimeofday=96 getuid=102 init_module=175 inotify_init1=294 io_uring_enter=426
    io_uring_register=427 io_uring_setup=425 ioctl=16 kcmp=312 kexec_file_load=320 kexec_load=246
    keyctl=250 kill=62 lchown=94 link=86 linkat=265 listen=50 lseek=8 lstat=6 madvise=28 membarrier=324
    memfd_create=319 memfd_secret=447 mkdir=83 mkdirat=258 mknod=133 mknodat=259 mmap=9 mount=165
    mount_setattr=442 move_mount=429 mprotect=10 mq_open=240 mremap=25 msgget=68 msgsnd=69 munmap=11
    name_to_handle_at=303 nanosleep=35 newfstatat=262 open=2 open_by_handle_at=304 open_tree=428
    openat=257 perf_event_open=298 personality=135 pidfd_getfd=438 pidfd_open=434 pidfd_send_signal=424
    pivot_root=155 poll=7 ppoll=271 pread64=17 prlimit64=302 process_madvise=440 process_vm_readv=310
    process_vm_writev=311 pselect6=270 ptrace=101 quotactl=179 read=0 readlink=89 readlinkat=267 readv=19
    reboot=169 recvfrom=45 recvmmsg=299 recvmsg=47 rename=82 renameat=264 renameat2=316 request_key=249
    restart_syscall=219 rmdir=84 rseq=334 rt_sigaction=13 rt_sigprocmask=14 rt_sigqueueinfo=129
    rt_sigreturn=15 rt_tgsigqueueinfo=297 sched_getaffinity=204 sched_yield=24 seccomp=317 select=23
    semget=64 semop=65 sendmmsg=307 sendmsg=46 sendto=44 set_robust_list=273 set_tid_address=218
    setdomainname=171 setfsgid=123 setfsuid=122 setgid=106 setgroups=116 sethostname=170 setitimer=38
    setns=308 setregid=114 setresgid=119 setresuid=117 setreuid=113 setrlimit=160 settimeofday=164
    setuid=105 shmat=30 shmctl=31 shmget=29 sigaltstack=131 socket=41 socketpair=53 stat=4 statx=332
    swapoff=168 swapon=167 symlink=88 symlinkat=266 sysinfo=99 tgkill=234 time=201 times=100 tkill=200
    truncate=76 umount2=166 uname=63 unlink=87 unlinkat=263 unshare=272 userfaultfd=323 utime=132
    utimensat=280 utimes=235 vfork=58 write=1 writev=20
""")

_AARCH64: Final = _table("""
    accept=202 accept4=242 acct=89 add_key=217 adjtimex=171 bind=200 bpf=280 brk=214 capset=91 chroot=51
    clock_getres=114 clock_gettime=113 clock_nanosleep=115 clock_settime=112 clone=220 clone3=435
    close=57 connect=203 delete_module=106 dup=23 dup3=24 execve=221 execveat=281 exit=93 exit_group=94
    faccessat=48 faccessat2=439 fadvise64=223 fanotify_init=262 fchmod=52 fchmodat=53 fchown=55
    fchownat=54 fcntl=25 finit_module=273 fsmount=432 fsopen=430 fspick=433 fstat=80 ftruncate=46
    futex=98 futex_waitv=449 getcpu=168 getcwd=17 getdents64=61 getegid=177 geteuid=175 getgid=176
    getitimer=102 getpid=172 getrandom=278 getrusage=165 gettid=178 gettimeofday=169 getuid=174
    init_module=105 inotify_init1=26 io_uring_enter=426 io_uring_register=427 io_uring_setup=425 ioctl=29
    kcmp=272 kexec_file_load=294 kexec_load=104 keyctl=219 kill=129 linkat=37 listen=201 lseek=62
    madvise=233 membarrier=283 memfd_create=279 memfd_secret=447 mkdirat=34 mknodat=33 mmap=222 mount=40
    mount_setattr=442 move_mount=429 mprotect=226 mq_open=180 mremap=216 msgget=186 msgsnd=189 munmap=215
    nanosleep=101 newfstatat=79 open_tree=428 openat=56 perf_event_open=241 personality=92
    pidfd_getfd=438 pidfd_open=434 pidfd_send_signal=424 pivot_root=41 ppoll=73 pread64=67 prlimit64=261
    process_madvise=440 process_vm_readv=270 process_vm_writev=271 pselect6=72 ptrace=117 quotactl=60
    read=63 readlinkat=78 readv=65 reboot=142 recvfrom=207 recvmmsg=243 recvmsg=212 renameat=38
    renameat2=276 request_key=218 restart_syscall=128 rseq=293 rt_sigaction=134 rt_sigprocmask=135
    rt_sigqueueinfo=138 rt_sigreturn=139 rt_tgsigqueueinfo=240 sched_getaffinity=123 sched_yield=124
    seccomp=277 semget=190 semop=193 sendmmsg=269 sendmsg=211 sendto=206 set_robust_list=99
    set_tid_address=96 setdomainname=162 setfsgid=152 setfsuid=151 setgid=144 setgroups=159
    sethostname=161 setitimer=103 setns=268 setregid=143 setresgid=149 setresuid=147 setreuid=145
    setrlimit=164 settimeofday=170 setuid=146 shmat=196 shmctl=195 shmget=194 sigaltstack=132 socket=198
    socketpair=199 statx=291 swapoff=225 swapon=224 symlinkat=36 sysinfo=179 tgkill=131 times=153
    tkill=130 truncate=45 umount2=39 uname=160 unlinkat=35 unshare=97 userfaultfd=282 utimensat=88
    write=64 writev=66
""")

# machine -> (AUDIT_ARCH_..., system call numbers)
_ARCHITECTURES: Final = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
