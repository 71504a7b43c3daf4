"""Where views come from: a node's socket, a growing metrics file, or the replay of a recorded one.

A `Feed` reads lines, folds them into its immutable `view` and nothing else; the app looks at `view` whenever
it wants to draw. A socket that closes shows `gone` and is tried again every RETRY_S. Lines that are no events
(or longer than MAX_LINE_BYTES) are counted in the view and skipped: what is read here never stops the screen.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import msgspec

from node.events import Event, decode_event
from swarm_cli.dashboard.view import Link, NodeView, fold, inert_event, lose_line, set_link

__all__ = ["Feed", "FileFeed", "LineSplitter", "ReplayFeed", "SocketFeed", "read_event"]

MAX_LINE_BYTES = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
OVERLONG = b"\0"
"""Stands for a line that was too long; it is no event, so it is counted like any other that cannot be
read."""
RETRY_S = 1.0
FOLLOW_S = 0.25
"""How often a growing file is looked at."""
SILENT_S = 10.0
"""A file that does not grow for this long belongs to a node that is gone: a running one writes twice a
second."""
MAX_PAUSE_S = 5.0
"""A replay never waits longer than this between two events."""


class LineSplitter:
    """Cuts chunks of bytes into lines, holding at most MAX_LINE_BYTES of an unfinished one."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def split(self, chunk: bytes) -> list[bytes]:
        """The complete lines that `chunk` finishes, without newline; empty ones are left out, too long ones
        come out as OVERLONG."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines and self._skipping:
            lines[0] = OVERLONG
            self._skipping = False
        if self._skipping:
            self._rest = b""
        elif len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
            self._skipping = True
        return [line for line in lines if line]


def read_event(line: bytes) -> Event | None:
    """The event of one line, its text inert; None when the line is no event."""
    try:
        event: Event = decode_event(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return inert_event(event)


class Feed(ABC):
    """One node's events as a view that is always complete and never changes in place."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._view = NodeView(label=label)

    @property
    def view(self) -> NodeView:
        return self._view

    @abstractmethod
    async def run(self) -> None:
        """Keep `view` up to date until cancelled or, for a replay, until the end."""

    def _take(self, lines: Iterable[bytes]) -> None:
        view = self._view
        for line in lines:
            event = read_event(line)
            view = lose_line(view) if event is None else fold(view, event)
        self._view = view

    def _set_link(self, link: Link) -> None:
        self._view = set_link(self._view, link)


class SocketFeed(Feed):
    """Attached to a running node (`node.telemetry.SocketSink`); attaches again when it went away."""

    def __init__(self, path: Path, label: str = "", *, retry_s: float = RETRY_S) -> None:
        super().__init__(label or path.stem)
        self.path = path
        self._retry_s = retry_s

    async def run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self.path))
            except OSError:
                if self._view.link is not Link.STOPPED:
                    # CONNECTING stays until a first attachment: a node that still starts is not "gone"
                    self._set_link(Link.CONNECTING if self._view.started is None else Link.GONE)
            else:
                try:
                    await self._read(reader)
                finally:
                    writer.close()
                if self._view.link is Link.LIVE:
                    self._set_link(Link.GONE)
            await asyncio.sleep(self._retry_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Fold lines until the node closes. The node sends its history first, so the view starts afresh with
        the first bytes, and what was on the screen stays until then."""
        splitter = LineSplitter()
        fresh = True
        with contextlib.suppress(OSError):
            while chunk := await reader.read(READ_BYTES):
                if fresh:
                    self._view = NodeView(label=self._label, link=Link.LIVE)
                    fresh = False
                self._take(splitter.split(chunk))


class FileFeed(Feed):
    """A metrics file that grows: everything in it, then what is appended."""

    def __init__(self, path: Path, label: str = "", *, follow_s: float = FOLLOW_S) -> None:
        super().__init__(label or path.parent.name)
        self.path = path
        self._follow_s = follow_s

    async def run(self) -> None:
        splitter = LineSplitter()
        offset = 0
        silent_s = 0.0
        while True:
            try:
                chunk = _read_from(self.path, offset)
            except OSError:
                self._set_link(Link.CONNECTING if self._view.started is None else Link.GONE)
                await asyncio.sleep(self._follow_s)
                continue
            if chunk is None:  # shorter than what was read: another file took its name
                splitter, offset = LineSplitter(), 0
                continue
            if not chunk:
                silent_s += self._follow_s
                if silent_s > SILENT_S and self._view.link is Link.LIVE:
                    self._set_link(Link.GONE)
                await asyncio.sleep(self._follow_s)
                continue
            silent_s = 0.0
            offset += len(chunk)
            if self._view.stopped is None:
                self._set_link(Link.LIVE)
            self._take(splitter.split(chunk))
            await asyncio.sleep(0)


def _read_from(path: Path, offset: int) -> bytes | None:
    """The next bytes of a file, b"" at its end, None when it became shorter than `offset`."""
    with path.open("rb") as file:
        if file.seek(0, 2) < offset:
            return None
        file.seek(offset)
        return file.read(READ_BYTES)


class ReplayFeed(Feed):
    """A recorded metrics file, at `speed` times the time it took; 0 shows its end at once."""

    def __init__(self, path: Path, label: str = "", *, speed: float = 0.0) -> None:
        super().__init__(label or path.stem)
        self.path = path
        self._speed = speed

    async def run(self) -> None:
        self._set_link(Link.REPLAY)
        splitter = LineSplitter()
        offset = 0
        while chunk := _read_from(self.path, offset):
            offset += len(chunk)
            await self._play(splitter.split(chunk))
        await self._play(splitter.split(b"\n"))  # a last line without its newline
        self._set_link(Link.ENDED)

    async def _play(self, lines: list[bytes]) -> None:
        if self._speed <= 0:
            self._take(lines)
            await asyncio.sleep(0)
            return
        for line in lines:
            shown_at = self._view.at
            event = read_event(line)
            if event is None:
                self._view = lose_line(self._view)
                continue
            if shown_at and event.at > shown_at:
                await asyncio.sleep(min(MAX_PAUSE_S, (event.at - shown_at) / 1000 / self._speed))
            self._view = fold(self._view, event)
