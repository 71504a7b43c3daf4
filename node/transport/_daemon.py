"""One life of the network stack: the `p2pd` child process, its DHT node, and everything that ends with it.

`Session.open` starts both without any bootstrap (with one that is unreachable the daemon exits); `died` waits
for the first sign of death: the child's exit, a broken control connection (hivemind's reader can die of a
race, after which its calls hang for ever while `P2P.is_alive` stays true), or memory above the limit. `stop`
leaves no process, socket or file. Restarting is `hivemind.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.logging import use_hivemind_log_handler

from node.transport._control import Control, ControlError
from node.transport._dials import DialGuard
from node.transport._sockets import SocketChannel
from protocol.errors import DeadlineError, TransportError
from protocol.messages import PeerId

__all__ = ["STACK_ERRORS", "Session"]

logger = logging.getLogger(__name__)

# hivemind logs what peers do wrong; a hostile peer must not be able to fill the log.
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.CRITICAL)
os.environ.setdefault(
    "GOLOG_LOG_LEVEL", "fatal"
)  # of the daemon, whose every line hivemind parses in our loop

STACK_ERRORS = (OSError, EOFError, ControlError, P2PDaemonError)
"""What failing calls to the daemon raise."""

_CONFIG = Path(__file__).with_name("p2pd.json")
"""No relaying for others: the flags for it do not switch it off (p2pd of hivemind 1.1.12, measured)."""
_GO_DHT = ("dht", "dhtServer", "dhtClient")
"""The daemon's own DHT keeps what strangers give it, uncounted (400,000 provider records: 184 MiB); ours is
hivemind's. Its AutoNAT service for others is off as well."""
_START_TIMEOUT_S = 15.0
_TERMINATE_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 1.0
_MEMORY_CHECK_EVERY_S = 5.0
_EXIT_GRACE_S = 0.05


class Session:
    """A running daemon with its DHT node."""

    def __init__(self, p2p: P2P, dht: DHTNode, dials: DialGuard) -> None:
        self.control = Control(p2p._daemon_listen_maddr["unix"])
        self.listener_path: str = p2p._client_listen_maddr["unix"]
        """Where the daemon delivers incoming streams; hivemind's own listener is never started."""
        self.dht = dht
        self.dials = dials
        self.dead = False
        self.channels: set[SocketChannel] = set()
        """Open streams, both ways."""
        self.scopes: set[asyncio.Timeout] = set()
        """Timeout scopes of the calls under way; they end at once when the stack dies."""
        self._p2p = p2p
        self._tasks: set[asyncio.Task[Any]] = set()
        self._broken = asyncio.Event()
        self._broken_reason = ""

    @classmethod
    async def open(
        cls,
        peer_id: PeerId,
        identity_path: Path,
        listen: str,
        open_dht: Callable[[P2P], Coroutine[Any, Any, DHTNode]],
        own: Callable[[], Sequence[str]],
    ) -> Session:
        """Start the daemon and its DHT node. `own()` gives this node's addresses, for the rule of what is
        dialled. Raises `TransportError`, leaving nothing behind."""
        launched: list[P2P] = []
        loopback = "/127." in listen or "/ip6/::1/" in listen
        dials = DialGuard(own, maps_ports=not loopback)

        class Daemon(P2P):
            """`p2pd`, reachable for cleaning up also when its start failed."""

            def __init__(self) -> None:
                super().__init__()
                launched.append(self)

            @staticmethod
            def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
                kwargs = {name: value for name, value in kwargs.items() if name not in _GO_DHT}
                arguments: list[str] = P2P._make_process_args(*args, **kwargs, f=str(_CONFIG))
                return dials.command(arguments)

        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                p2p = await Daemon.create(
                    host_maddrs=[listen],
                    identity_path=str(identity_path),
                    check_if_identity_free=False,
                    auto_nat=False,
                    use_relay=False,
                    nat_port_map=not loopback,
                    startup_timeout=_START_TIMEOUT_S,
                )
                if p2p.peer_id.to_base58() != peer_id:
                    raise TransportError(f"{identity_path} holds the key of {p2p.peer_id}, not of {peer_id}")
                return cls(p2p, await open_dht(p2p), dials)
        except BaseException as error:
            for each in launched:
                await _stop(each)
            dials.close()
            if isinstance(error, TimeoutError):
                raise DeadlineError("starting the network daemon p2pd", _START_TIMEOUT_S) from None
            if isinstance(error, STACK_ERRORS):
                raise TransportError(f"the network daemon p2pd did not start: {error}") from error
            raise

    @property
    def process_id(self) -> int:
        """Of the daemon."""
        return int(self._p2p._child.pid)

    def spawn(self, work: Coroutine[Any, Any, None], *, endless: bool = False) -> asyncio.Task[None]:
        """Run `work` until it ends or this session does, which it does with `endless` work that ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            name = getattr(task.get_coro(), "__qualname__", task)
            if task.cancelled():
                return
            if task.exception() is not None:
                self.break_down(f"{name} failed: {task.exception()!r}")
            elif endless:
                self.break_down(f"{name} has ended")

        task.add_done_callback(ended)
        return task

    def break_down(self, reason: str) -> None:
        """Declare this session dead."""
        self._broken_reason = self._broken_reason or reason
        self._broken.set()

    async def died(self, max_memory_bytes: int) -> str:
        """Wait for the end of this session; returns why."""
        client = self._p2p._client.control
        signs = {
            asyncio.ensure_future(self._p2p._child.wait()): "the daemon exited",
            asyncio.ensure_future(self._broken.wait()): "",
            client._read_task: "the control connection broke",
            client._write_task: "the control connection broke",
            self._p2p._reader_task: "the daemon closed its output",
        }
        own = list(signs)[:2]
        try:
            while True:
                done, _ = await asyncio.wait(
                    signs, timeout=_MEMORY_CHECK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    await asyncio.wait(own[:1], timeout=_EXIT_GRACE_S)  # usually the cause of the other signs
                    return next((reason for task, reason in signs.items() if task.done() and reason), "") or (
                        self._broken_reason
                    )
                used_bytes = await asyncio.to_thread(_resident_bytes, self.process_id)
                if used_bytes > max_memory_bytes:
                    limit_mib = max_memory_bytes >> 20
                    return f"the daemon uses {used_bytes >> 20} MiB, above its limit of {limit_mib} MiB"
                _forget_done_handlers(client)
        finally:
            for task in own:
                task.cancel()

    async def stop(self) -> None:
        """End every call, task, process and file of this session, within about 3 s."""
        self.dead = True
        now_s = asyncio.get_running_loop().time()
        for scope in self.scopes:
            if not scope.expired():
                scope.reschedule(now_s)
        for channel in list(self.channels):
            channel.abort()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        self.dht.is_alive = False
        await _stop(self._p2p)
        self.dials.close()


async def _stop(p2p: P2P) -> None:
    client = p2p._client.control if p2p._client is not None else None
    ending = [p2p._reader_task, *((client._read_task, client._write_task) if client is not None else ())]
    for task in (task for task in ending if task is not None):
        task.cancel()
    if client is not None:
        _fail_pending_calls(client)
    child = p2p._child
    if child is not None:
        for signal, timeout_s in ((child.terminate, _TERMINATE_TIMEOUT_S), (child.kill, _KILL_TIMEOUT_S)):
            if child.returncode is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                signal()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(child.wait()), timeout_s)
        # Otherwise its pipes are closed by the garbage collector, after the loop: "Event loop is closed".
        child._transport.close()
    # Their exceptions are fetched here, or asyncio reports them as never retrieved.
    await asyncio.gather(*(task for task in ending if task is not None), return_exceptions=True)
    p2p._terminate()
    for address in (getattr(p2p, name, None) for name in ("_daemon_listen_maddr", "_client_listen_maddr")):
        if address is not None:
            with contextlib.suppress(OSError):
                os.remove(address["unix"])


def _fail_pending_calls(client: Any) -> None:
    """hivemind waits for these for ever; with an exception its tasks end."""
    for call in client._pending_calls.values():
        if not call.done():
            call.set_exception(P2PDaemonError("the network daemon is gone"))
            call.exception()
    for task in client._handler_tasks.values():
        task.cancel()
    client._handler_tasks.clear()


def _forget_done_handlers(client: Any) -> None:
    """hivemind keeps the task of each request that its peer cancelled."""
    for call_id in [call_id for call_id, task in client._handler_tasks.items() if task.done()]:
        client._handler_tasks.pop(call_id, None)


def _resident_bytes(process_id: int) -> int:
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.Error:
        return 0
