"""Where the event stream leaves the node: a file, and a local socket for whoever watches.

`bus.subscribe(JsonlSink(run_dir.metrics))` appends one JSON line an event. `SocketSink` serves a Unix socket
that only this user can open: an attacher first gets a bounded recent history (the newest snapshot of each
kind, the last steps, groups and notices), then every event as it happens, in the same JSON lines.

Not a control channel: a client that sends a byte is disconnected. Not allowed to hurt the node: a reader that
does not keep up is dropped, a full disk costs lines and is counted. Both sinks are called on the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from io import FileIO
from pathlib import Path

from node.events import Evaluated, Event, NodeStarted, encode_event
from protocol.errors import AddressError

__all__ = ["JsonlSink", "SocketSink"]

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_READERS = 16
MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""What one reader may leave unread; above the whole history, so that attaching alone never drops a reader."""
CLOSE_TIMEOUT_S = 1.0

HISTORY_LINES = {
    "NodeStarted": 1,
    "StagesSeen": 1,
    "PeersSeen": 1,
    "Health": 1,
    "NodeStopped": 1,
    "Evaluated/before": 1,
    "Evaluated": 100,
    "StepDone": 240,
    "GroupJudged": 100,
    "Notice": 100,
}
"""How many lines of each kind an attacher gets; kinds are kept apart, so that snapshots never push out
steps."""
MAX_KIND_BYTES = 1024 * 1024


class JsonlSink:
    """Appends one line per event and flushes it. At `max_bytes` the file is set aside as `<name>.1`,
    replacing the one before, so that a long run fills at most twice that; the new file again begins with
    NodeStarted."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.lost_lines = 0
        """Lines the disk refused."""
        self._max_bytes = max_bytes
        self._first_line = b""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._bytes = os.fstat(self._file.fileno()).st_size
        self._torn = self._bytes > 0 and not _ends_with_newline(path)  # the last run was killed within a line

    def __call__(self, event: Event) -> None:
        """Append `event`. Never raises for a disk that is full or gone, nor for want of descriptors."""
        line = encode_event(event)
        if isinstance(event, NodeStarted):
            self._first_line = line
        try:
            if self._bytes + len(line) > self._max_bytes and self._bytes:
                self._rotate()
            self._write(b"\n" + line if self._torn else line)
        except OSError:
            self.lost_lines += 1

    def close(self) -> None:
        """Close the file; a later event would open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        written = self._file.write(data)
        self._bytes += written
        self._torn = written != len(data)
        if self._torn:
            raise OSError(f"{self.path}: {written} of {len(data)} bytes written")

    def _rotate(self) -> None:
        self.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._bytes = 0
        self._torn = False
        self._write(self._first_line)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class _History:
    """The newest lines of each kind, bounded in lines and bytes, given back in the order they came."""

    def __init__(self) -> None:
        self._kinds: dict[str, deque[tuple[int, bytes]]] = {}
        self._kind_bytes: dict[str, int] = {}
        self._count = 0

    def add(self, event: Event, line: bytes) -> None:
        kind = type(event).__name__
        if isinstance(event, Evaluated) and event.moment == "before":
            kind = "Evaluated/before"
        lines = self._kinds.setdefault(kind, deque())
        self._count += 1
        lines.append((self._count, line))
        total = self._kind_bytes.get(kind, 0) + len(line)
        while len(lines) > HISTORY_LINES.get(kind, 1) or (total > MAX_KIND_BYTES and len(lines) > 1):
            total -= len(lines.popleft()[1])
        self._kind_bytes[kind] = total

    def bytes(self) -> bytes:
        ordered = sorted(entry for lines in self._kinds.values() for entry in lines)
        return b"".join(line for _, line in ordered)


class _Reader(asyncio.Protocol):
    """One attacher. Sends only; whatever it says ends the connection."""

    def __init__(self, sink: SocketSink) -> None:
        self._sink = sink
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.WriteTransport):
            raise TypeError(f"expected a writable transport, got {transport!r}")
        self._transport = transport
        self._sink._attach(self, transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sink._detach(self)


class SocketSink:
    """Serves the event stream at `path`, which must lie in a folder that is closed to others (0700)."""

    def __init__(self, path: Path, *, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.path = path
        self.dropped_readers = 0
        """Readers cut off because they did not keep up, or came when MAX_READERS were attached."""
        self._max_unread_bytes = max_unread_bytes
        self._history = _History()
        self._readers: dict[_Reader, asyncio.WriteTransport] = {}
        self._server: asyncio.Server | None = None
        self._all_gone = asyncio.Event()

    @property
    def readers(self) -> int:
        """How many are attached now."""
        return len(self._readers)

    def __call__(self, event: Event) -> None:
        """Remember `event` and send it to every reader. Works before `start`, which then serves it as
        history."""
        line = encode_event(event)
        self._history.add(event, line)
        for transport in tuple(self._readers.values()):
            if transport.is_closing():
                continue
            if transport.get_write_buffer_size() + len(line) > self._max_unread_bytes:
                self.dropped_readers += 1
                transport.abort()
            else:
                transport.write(line)

    async def start(self) -> None:
        """Bind and listen. Raises AddressError when the folder is open to others, the path is taken or too
        long."""
        _close_folder(self.path.parent)
        _clear_stale(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)  # before listen(): nobody can connect in between
        except OSError as error:
            listener.close()
            raise AddressError(f"cannot open the event socket {self.path}: {error}") from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Reader(self), sock=listener)

    async def close(self) -> None:
        """Let readers take what they were sent, at most CLOSE_TIMEOUT_S, then remove the socket."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for transport in tuple(self._readers.values()):
            transport.close()
        if self._readers:
            self._all_gone.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), CLOSE_TIMEOUT_S)
        for transport in tuple(self._readers.values()):
            transport.abort()
        self.path.unlink(missing_ok=True)

    def _attach(self, reader: _Reader, transport: asyncio.WriteTransport) -> None:
        if len(self._readers) >= MAX_READERS or self._server is None:
            self.dropped_readers += 1
            transport.abort()
            return
        self._readers[reader] = transport
        transport.write(self._history.bytes())

    def _detach(self, reader: _Reader) -> None:
        self._readers.pop(reader, None)
        if not self._readers:
            self._all_gone.set()


def _close_folder(folder: Path) -> None:
    """Make `folder` for this user alone, or refuse one that others can enter."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise AddressError(f"cannot make the socket folder {folder}: {error}") from error
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid() or mode & 0o077:
        raise AddressError(
            f"socket folder {folder} (mode {mode:04o}, owner {found.st_uid}) is open to others; "
            f"run: chmod 700 {folder}"
        )


def _clear_stale(path: Path) -> None:
    """Remove a socket that nobody serves any more; refuse a path that is in use or not a socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise AddressError(f"{path} exists and is not a socket; move it away")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise AddressError(f"cannot tell whether {path} is in use: {error}") from error
    raise AddressError(f"another node already serves {path}; stop it or choose another name")
