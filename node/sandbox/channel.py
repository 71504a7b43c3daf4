"""The node's end of the environments' worker: one process, a pair of pipes for each door, and a deadline on
every read and write.

Says nothing about scores. Any trouble (worker gone, deadline, oversized or malformed frame) is a
`ChannelError`, after which only a new worker helps.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from node.sandbox.records import FRAME_HEADER_BYTES, Door, frame

__all__ = ["ChannelError", "DoorPipes", "WorkerProcess"]

_Record = TypeVar("_Record", bound=msgspec.Struct)

_BOOT = (
    "import json, os, sys; "
    "sys.path[:] = [os.path.realpath(entry) for entry in json.loads(sys.argv[1])]; "
    "from node.sandbox.worker import main; main(json.loads(sys.argv[2]))"
)
# What else the worker's environment holds. One thread: the same score on every machine.
_ENVIRONMENT = {"TZ": "UTC", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_CLOSE_S = 2.0
_COMPLAINT_BYTES = 4000


class ChannelError(Exception):
    """The worker did not answer as it must."""


class DoorPipes:
    """The pipes to one door. Used by one thread at a time."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies
        self._buffer = bytearray()
        for descriptor in (requests, replies):
            os.set_blocking(descriptor, False)

    def send(self, record: msgspec.Struct, timeout_s: float) -> None:
        """Write one frame."""
        data, end_s = memoryview(frame(record)), time.monotonic() + timeout_s
        while data:
            self._await(self._requests, select.POLLOUT, end_s)
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise ChannelError("the worker has closed its pipe") from error

    def receive(self, kind: type[_Record], max_bytes: int, timeout_s: float) -> _Record:
        """Read one frame of at most `max_bytes` and decode it strictly."""
        end_s = time.monotonic() + timeout_s
        self._fill(FRAME_HEADER_BYTES, end_s)
        size = int.from_bytes(self._buffer[:FRAME_HEADER_BYTES], "big")
        if size > max_bytes:
            raise ChannelError(f"the worker announced {size} bytes, more than {max_bytes}")
        self._fill(FRAME_HEADER_BYTES + size, end_s)
        body = bytes(self._buffer[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + size])
        del self._buffer[: FRAME_HEADER_BYTES + size]
        if self._buffer:
            raise ChannelError(f"the worker sent {len(self._buffer)} bytes that nobody asked for")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ChannelError(f"the worker sent a malformed {kind.__name__}: {error}") from error

    def _fill(self, size: int, end_s: float) -> None:
        while len(self._buffer) < size:
            self._await(self._replies, select.POLLIN, end_s)
            try:
                block = os.read(self._replies, 65536)
            except BlockingIOError:
                continue
            if not block:
                raise ChannelError("the worker has ended")
            self._buffer += block

    @staticmethod
    def _await(descriptor: int, event: int, end_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000.0):
            raise ChannelError("the worker did not answer in time")

    def hang_up(self) -> None:
        """The worker's end of this door ends."""
        os.close(self._requests)

    def close(self) -> None:
        """Nothing more is read."""
        os.close(self._replies)


class WorkerProcess:
    """A worker and the pipes to its doors. All nodes have the hash order of seed 0, so that they give an
    answer the same score."""

    def __init__(self, hash_seed: int = 0) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [entry for entry in sys.path if os.path.isabs(entry)]
        if root not in paths:  # in front, since other distributions also install a package called `node`
            paths.insert(0, root)
        pairs = {door: (os.pipe(), os.pipe()) for door in Door}
        theirs = {door: (requests[0], replies[1]) for door, (requests, replies) in pairs.items()}
        self.doors = {door: DoorPipes(requests[1], replies[0]) for door, (requests, replies) in pairs.items()}
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT),
                    *(json.dumps(paths), json.dumps(theirs)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                close_fds=True,
                pass_fds=[descriptor for pair in theirs.values() for descriptor in pair],
                cwd="/",
                env=_ENVIRONMENT | {"PYTHONHASHSEED": str(hash_seed)},
                start_new_session=True,  # Ctrl-C at the terminal is for the node, which closes us
            )
        except OSError as error:
            self._close_pipes()
            raise ChannelError(f"no process for the tasks: {error}") from error
        finally:
            for pair in theirs.values():
                for descriptor in pair:
                    os.close(descriptor)

    @property
    def pid(self) -> int:
        """Process id of the worker's supervisor; all its processes end with it."""
        return self._process.pid

    def complaint(self) -> str:
        """The end of what the worker wrote to its standard error before it locked itself in; waits a little
        for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        if self._process.stderr is None:
            return ""
        os.set_blocking(self._process.stderr.fileno(), False)
        try:
            written = os.read(self._process.stderr.fileno(), 65536)[-_COMPLAINT_BYTES:]
        except BlockingIOError:
            return ""
        lines = written.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def kill(self) -> None:
        """End the worker at once; whoever waits at a door gets a `ChannelError`. Thread-safe."""
        self._process.kill()

    def close(self) -> None:
        """End the worker and all its processes; returns when they are gone. Nobody may be at a door.

        On hang-up the worker ends by itself and each process is reaped; killing is for a stuck one.
        """
        for pipes in self.doors.values():
            pipes.hang_up()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipes in self.doors.values():
            pipes.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _close_pipes(self) -> None:
        for pipes in self.doors.values():
            pipes.hang_up()
            pipes.close()
