"""Notices, inside a scoring fork, what scoring never does. A detection layer, not the boundary.

An audit hook ends the fork when the answer's code opens files for writing, touches sockets, processes or
ctypes, imports packages that were not loaded before, or when a scorer is about to execute text that is more
than arithmetic: a name such as `getattr` or `open`, a name or an attribute with a leading underscore, an
import. So an answer cannot easily reach the interpreter in order to write its own reward, and the rejection
carries a reason.

Whoever runs code in this process can defeat a hook written in Python. That nothing happens to the node then
is the work of `isolation.py`, that no other completion is touched is the work of one fork each (`worker.py`).
"""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

__all__ = ["Detector", "forbidden_name"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FORBIDDEN_EVENTS = _words(
    """
    builtins.input cpython.run_command cpython.run_file cpython.run_interactivehook cpython.run_module
    cpython.run_startup gc.get_objects gc.get_referents gc.get_referrers os.chdir os.chflags os.chmod
    os.chown os.exec os.fork os.forkpty os.getxattr os.kill os.killpg os.link os.listxattr os.lockf
    os.mkdir os.posix_spawn os.putenv os.remove os.removexattr os.rename os.rmdir os.setxattr os.spawn
    os.startfile os.symlink os.system os.truncate os.unsetenv os.utime pdb.Pdb pickle.find_class
    resource.prlimit resource.setrlimit setopencodehook signal.pthread_kill sys._current_frames
    sys.addaudithook sys.setprofile sys.settrace sys.unraisablehook code.__new__ function.__new__
    mmap.__new__ builtins.breakpoint
    """
)
_FORBIDDEN_FAMILIES = _words(
    """
    ctypes fcntl ftplib glob http imaplib msvcrt nntplib poplib pty shutil smtplib socket sqlite3
    subprocess syslog telnetlib tempfile urllib webbrowser winreg
    """
)
_READING_EVENTS = frozenset({"open", "os.listdir", "os.scandir", "os.walk", "os.fwalk"})
_OPEN_FOR_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Names that lead out of arithmetic. As attributes: ways from a value to frames, globals or string formatting.
_FORBIDDEN_NAMES = _words(
    """
    breakpoint compile delattr dir eval exec exit getattr globals help input locals memoryview object open
    quit setattr super type vars cr_await cr_code cr_frame ag_code ag_frame f_back f_builtins f_code
    f_globals f_locals func_globals gi_code gi_frame gi_yieldfrom tb_frame tb_next format format_map mro
    ctypes data_as dump tofile
    autowrap codegen doctest init_printing init_session interactive_traversal preview test ufuncify
    """
)
# Library code that builds small classes by executing text of its own.
_TRUSTED_BUILDERS = ("/collections/__init__.py", "/dataclasses.py")


def forbidden_name(code: CodeType, scope: Container[str] = ()) -> str | None:
    """The first name in `code`, or in code nested in it, that arithmetic has no use for, or None.

    `scope` holds the local names of whoever executes the code: in some scorers the answer `entry["answer"]`
    would be a perfect one. A name alone, neither called nor looked into, passes otherwise: untrained policies
    do answer with the one word "open".
    """
    for name in code.co_names:
        if name in scope:
            return name
    if [each.opname for each in dis.get_instructions(code)] == ["RESUME", "LOAD_NAME", "RETURN_VALUE"]:
        return None
    for name in code.co_names:
        if name.startswith("_") or name in _FORBIDDEN_NAMES:
            return name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found = forbidden_name(constant, scope)
            if found is not None:
                return found
    return None


class Detector:
    """What may be imported and read, noted before the forks: in a fork each page touched is copied (2 ms)."""

    def __init__(self, readable_paths: Sequence[str]) -> None:
        self._roots = tuple(os.path.join(path, "") for path in readable_paths)
        self._files = frozenset(readable_paths)
        self._packages = frozenset(name.partition(".")[0] for name in sys.modules) | {
            *sys.builtin_module_names
        }

    def arm(self, report: Callable[[str], None]) -> None:
        """For the rest of this process call `report(what)`, which must not return, on a forbidden event."""
        may_read, packages = self._may_read, self._packages

        def on_event(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "import":
                package = arguments[0].partition(".")[0]
                if package not in packages:
                    report(f"import of {package}")
            elif event == "exec":
                code = arguments[0]
                if isinstance(code, CodeType) and not _is_library_code(code, may_read):
                    name = forbidden_name(code, sys._getframe(1).f_locals)
                    if name is not None:
                        report(f"name {name}")
            elif event in _READING_EVENTS:
                if not may_read(arguments[0]) or (event == "open" and arguments[2] & _OPEN_FOR_CHANGE):
                    report(event)
            elif event in _FORBIDDEN_EVENTS or event.partition(".")[0] in _FORBIDDEN_FAMILIES:
                report(event)

        sys.addaudithook(on_event)

    def _may_read(self, path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return False
        whole = os.path.normpath(path)
        return whole in self._files or os.path.join(whole, "").startswith(self._roots)


def _is_library_code(code: CodeType, may_read: Callable[[object], bool]) -> bool:
    """A module that is being imported, or one of the few library functions that execute text of their own."""
    if code.co_name == "<module>" and os.path.isabs(code.co_filename):
        return may_read(code.co_filename)
    caller = sys._getframe(2).f_code.co_filename
    return caller.endswith(_TRUSTED_BUILDERS) and may_read(caller)
