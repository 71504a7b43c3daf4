"""The vLLM engine: continuous batching on GPUs and CPU servers, behind the interface of `transformers`.

For: generation that never restarts for new weights. Every rollout is a request of its own to vLLM's
asynchronous engine (`_vllm_process`), at most `max_concurrent` at a time (`_vllm_generation`); `update` sends
only what changed (`_vllm_patch`) between two decoding steps, or a new adapter (`_vllm_adapters`). A token's
`versions` entry is the version that sampled it. Log-probabilities are those of the distribution that was
sampled from, after temperature and top-p; greedy ones are at temperature 1. A process that dies or hangs is
started again with the current weights, and what was in flight goes on there.

Weights and rollouts under way (`in_flight`): `continue` goes on with the cache of the old weights, and then
only rollouts of a single version are exact; `recompute` computes their caches anew at once; `recycle` stops
them and goes on behind what they have as new requests. With the last two every token is exactly of its
version. With an adapter, `continue` ends a rollout with the adapter it began with, and the others recycle.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.config import VllmConfig
from node.events import NoticeLevel
from node.rollout.adapter import AdapterSpec
from node.rollout.engine._vllm_adapters import Adapter, AdapterFolders, lora_arguments
from node.rollout.engine._vllm_arguments import shared_arguments
from node.rollout.engine._vllm_generation import VllmGeneration
from node.rollout.engine._vllm_life import SCORERS, Life
from node.rollout.engine._vllm_patch import Mirror, TensorPatch, WeightsDoNotFit
from node.rollout.engine._vllm_process import EngineDied, VllmProcess, require_vllm, together
from node.rollout.engine._vllm_scores import TEMPERATURE
from node.rollout.engine.base import (
    BrokenWeightsError,
    Engine,
    EngineError,
    Generation,
    GenerationRequest,
    TokenSequence,
    check_request,
    check_sequences,
)
from node.rollout.policy import Policy
from protocol.errors import ConfigError, ModelError

__all__ = ["VllmEngine"]

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before a start, by how many deaths count."""
DEATHS_COUNT_S = 3600.0
"""How long one does. A success would be too little to forget it for: one request may kill every process, and
others succeed in between."""
MAX_TEMPERATURE = 2.0
"""vLLM's own limit."""


class VllmEngine(Engine):
    """Blocks in the constructor until the model is loaded. `sleeps` prepares vLLM for giving a GPU's memory
    away in `sleep`. Random numbers come from the process, whose seed is made of `seed`, the version and how
    many were started before it. Raises ConfigError without vLLM, ModelError for a folder that it cannot use,
    EngineError when it cannot be started."""

    name = "vllm"
    probe_each = True

    def __init__(
        self,
        policy: Policy,
        settings: VllmConfig,
        *,
        in_flight: Literal["continue", "recompute", "recycle"] = "continue",
        adapter: AdapterSpec | None = None,
        sleeps: bool = False,
        seed: int = 0,
        notice: Callable[[NoticeLevel, str], None] | None = None,
    ) -> None:
        require_vllm()
        self.dtype = settings.dtype
        self.update_stall_s = 0.0
        """How long the last update kept generation waiting, from pause to resume."""
        self.patch_bytes = 0
        """Size of the last update as sent."""
        self._policy = policy
        self._settings = settings
        self.in_flight = in_flight
        """May be changed between updates."""
        self._adapter = adapter
        self._sleeps = sleeps
        self._seed = seed
        self._notice = notice or _log_notice
        self.policy_version = 0
        self.context = min(policy.max_positions, settings.max_context)
        shapes = policy.tensor_shapes()
        self._mirror = Mirror(shapes, getattr(torch, settings.dtype))
        self.folders = None if adapter is None else AdapterFolders(adapter, policy.path, shapes)
        """Where adapters are written; None where whole weights are sent."""
        self.life: Life | None = None
        """The process that runs; None before the first and between two."""
        self._life_lock = threading.RLock()
        self._exclusive = threading.Lock()
        """Held by whatever stops generation or lets it go on, and by `logprobs`: nothing enters while weights
        change, and scores are of one version. Taken before the lock of the life, never after."""
        self._awake = threading.Event()
        """Set while scoring is possible."""
        self._awake.set()
        self._paused = False
        self._closing = threading.Event()
        self.lost = False
        """No process runs and none will be started any more; every call raises EngineError."""
        self._lives = 0
        """Processes that were started, or nearly."""
        self._deaths: list[float] = []
        """When, on the monotonic clock."""
        self._refused = False
        """The last process did not take the weights of an update, whole."""
        self._cause = ""
        self._tell_of_lower_context()
        try:
            self._living()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Processes of the running engine, the scheduler's first."""
        life = self.life
        return [] if life is None else life.process.pids

    # --- generation and scoring ----------------------------------------------------------------------------

    def open(self, *, greedy: bool = False) -> Generation:
        return VllmGeneration(
            self._policy,
            greedy=greedy,
            attempt=self._attempt,
            living=lambda: self.life,
            check=self._check_request,
        )

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """As the interface says; waits while the engine sleeps."""
        check_sequences(sequences, self._policy.vocab_size, self.context)
        while True:
            self._awake.wait()
            with self._exclusive:
                if self._awake.is_set():
                    results = self._attempt(
                        lambda life: together([_score(life, sequence) for sequence in sequences])
                    )
                    break
        for scored in results:
            if np.isnan(scored).any():
                raise BrokenWeightsError(self.policy_version)
        return results

    # --- weights -------------------------------------------------------------------------------------------

    def update(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        with self._exclusive:
            if self.folders is not None:
                self._adapt(self.folders, state, policy_version)
                return
            try:
                fitted = self._mirror.fit(state)
            except WeightsDoNotFit as error:
                raise EngineError(f"weights do not fit the engine: {error}") from None
            patches = self._mirror.changes(fitted)
            with self._life_lock:  # a process that another thread starts has the old weights or the new ones
                self._attempt(lambda life: self._take(life, patches, fitted, policy_version))
                self._mirror.commit(fitted, patches)

    def reload(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        with self._exclusive:
            self._mirror.known = False
        self.update(state, policy_version)

    async def _take(
        self, life: Life, patches: list[TensorPatch], fitted: Mapping[str, Tensor], policy_version: int
    ) -> None:
        """Between two decoding steps. A patch that fails is followed at once by everything; when that fails
        too, the process has weights that nobody knows, and ends. One more process may try."""
        began_s = time.monotonic()
        await life.wake(weights_only=True)
        await life.halt(stop=self.in_flight == "recycle", recompute=self.in_flight == "recompute")
        try:
            try:
                await life.patch(patches, policy_version, self.dtype, whole=not self._mirror.known)
            except Exception as error:
                life.process.raise_if_dead()
                self._mirror.known = False
                self._notice(
                    NoticeLevel.WARNING, f"an update of the engine failed and is sent whole: {error}"
                )
                await life.patch(self._mirror.everything(fitted), policy_version, self.dtype, whole=True)
        except EngineDied:
            raise
        except Exception as error:
            life.process.kill()
            cause = f"the engine does not take version {policy_version}: {error}"
            if self._refused:
                raise self._give_up(cause) from error
            self._refused = True
            raise EngineDied(cause) from error
        self._refused = False
        self.policy_version = policy_version
        await life.go_on(enter=not self._paused)
        self.update_stall_s = time.monotonic() - began_s
        self.patch_bytes = sum(patch.payload_bytes for patch in patches)

    def _adapt(self, folders: AdapterFolders, state: Mapping[str, Tensor], policy_version: int) -> None:
        try:
            adapter = folders.write(state, policy_version)
        except ValueError as error:
            raise EngineError(f"weights do not fit the engine: {error}") from None
        try:
            with self._life_lock:  # as in `update`
                self._attempt(lambda life: self._take_adapter(life, adapter))
                folders.newest = adapter
        except BaseException:
            adapter.remove()
            raise
        self.patch_bytes = sum(tensor.nbytes for tensor in state.values())

    async def _take_adapter(self, life: Life, adapter: Adapter) -> None:
        began_s = time.monotonic()
        await life.wake(weights_only=True)
        await life.adapt(adapter)
        self.policy_version = adapter.policy_version
        if self.in_flight != "continue":
            await life.stop(list(life.legs.values()))
        await life.drop_adapters()
        self.update_stall_s = time.monotonic() - began_s

    # --- pause, sleep and close ----------------------------------------------------------------------------

    def pause(self) -> None:
        """As the interface says. Rollouts stop and keep their tokens; scoring goes on."""
        with self._exclusive:
            self._paused = True
            self._attempt(_rest)

    def resume(self) -> None:
        with self._exclusive:
            self._paused = False
            self._attempt(lambda life: life.go_on(enter=True))

    def sleep(self) -> None:
        """As the interface says, for an engine opened with `sleeps` on a GPU; otherwise a pause. Scoring
        waits; an update takes the memory of the weights back, not that of the cache."""
        with self._exclusive:
            self._awake.clear()
            self._paused = True
            try:
                self._attempt(self._lie_down)
            except BaseException:
                self._awake.set()
                raise

    async def _lie_down(self, life: Life) -> None:
        await _rest(life)
        if self._sleeps and not life.process.on_cpu:
            await life.sleep()

    def wake(self) -> None:
        with self._exclusive:
            self._paused = False
            self._attempt(_rise)
            self._awake.set()

    def close(self) -> None:
        self._closing.set()
        self._awake.set()
        life = self.life
        if life is not None:
            life.process.close()
        with self._life_lock:
            pass  # a start under way ends soon, as it hears of this, and closes its process
        if self.folders is not None:
            self.folders.close()

    # --- life and death ------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[Life], Coroutine[Any, Any, Result]]) -> Result:
        """Do `work` in the living process; when it dies of it, again in its successor."""
        while True:
            life = self._living()
            try:
                return life.process.run(work(life))
            except EngineDied as error:
                self._bury(life, str(error))

    def _living(self) -> Life:
        """The running process, or a new one. Raises EngineError when closed or after too many deaths."""
        with self._life_lock:
            self._raise_if_closed()
            if self.lost:
                raise EngineError(self._cause)
            if self.life is not None and self.life.process.dead:
                self._bury(self.life, self.life.process.obituary())
            while self.life is None:
                deaths = len(self._deaths)
                if deaths > self._settings.max_restarts:
                    raise self._give_up(f"vLLM ended or did not start {deaths} times; {self._cause}")
                self._closing.wait(BACKOFF_S[min(deaths, len(BACKOFF_S) - 1)])
                self._raise_if_closed()
                try:
                    self.life = self._born()
                except (EngineDied, ModelError) as error:
                    if self._lives == 1:
                        raise  # the very first start: nothing to recover
                    self._raise_if_closed()
                    self._deaths.append(time.monotonic())
                    self._cause = str(error)
            if self._closing.is_set():  # meanwhile; `close` may have seen no process
                self.life.process.close()
            self._raise_if_closed()
            return self.life

    def _raise_if_closed(self) -> None:
        if self._closing.is_set():
            raise EngineError("the engine is closed")

    def _give_up(self, cause: str) -> EngineError:
        self.lost, self._cause = True, cause
        return EngineError(cause)

    def _bury(self, life: Life, cause: str) -> None:
        with self._life_lock:
            if self.life is not life or self._closing.is_set():
                return
            self.life = None
            now_s = time.monotonic()
            self._deaths = [at_s for at_s in self._deaths if now_s - at_s < DEATHS_COUNT_S] + [now_s]
            self._cause = cause
            self._notice(
                NoticeLevel.WARNING, f"{cause}; it is started again with version {self.policy_version}"
            )
            life.process.close()

    def _born(self) -> Life:
        """A process with the current weights. Raises EngineDied, ModelError, ConfigError."""
        settings = self._settings
        self._lives += 1
        process = VllmProcess(
            self._arguments,
            start_timeout_s=settings.start_timeout_s,
            deadline_s=settings.deadline_s,
            notice=self._notice,
            closing=self._closing,
        )
        life = Life(process, settings.max_concurrent, self.policy_version)
        try:
            process.run(self.settle(life))
        except BaseException:
            process.close()
            raise
        return life

    async def settle(self, life: Life) -> None:
        """Give a new process the newest weights, and let rollouts in unless paused. Raises EngineDied."""
        await life.engine.get_supported_tasks()  # once; requests then enter without a wait
        weights = self._mirror.weights
        adapter = None if self.folders is None else self.folders.newest
        try:
            if weights is not None:
                await life.patch(
                    self._mirror.everything(weights), self.policy_version, self.dtype, whole=True
                )
                self._mirror.known = True
            elif adapter is not None:
                await life.adapt(adapter)
            else:
                await life.label(self.policy_version)
        except Exception as error:
            life.process.raise_if_dead()
            raise EngineDied(f"a new engine does not take version {self.policy_version}: {error}") from error
        if not self._paused:
            life.gate.set()

    def _arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """For vLLM's AsyncEngineArgs. Raises ConfigError for settings that do not go together."""
        settings = self._settings
        own: dict[str, Any] = {} if on_cpu else {"enable_sleep_mode": self._sleeps}
        if self._adapter is not None:
            if not on_cpu and settings.dtype == "float32":
                raise ConfigError(
                    "vllm.dtype is 'float32' and vLLM computes adapters on a GPU in 16 bits only; set it to "
                    "'bfloat16', or policy.tuning to 'full'"
                )
            own |= lora_arguments(self._adapter)
        return (
            shared_arguments(settings, self._policy, self._policy.path, on_cpu=on_cpu)
            | own
            | {
                "skip_tokenizer_init": True,  # tokens in, tokens out
                "seed": self._process_seed(),
                # One more than is ever computed: vLLM scores a sequence only where one more token would fit.
                "max_model_len": self.context + 1,
                "max_num_seqs": settings.max_concurrent + SCORERS,
                "logprobs_mode": "processed_logprobs",
            }
        )

    def _process_seed(self) -> int:
        """31 bits; another one after every death, so that nothing is drawn twice."""
        text = f"{self._seed}/{self.policy_version}/{self._lives}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1

    # --- what fits -----------------------------------------------------------------------------------------

    def _tell_of_lower_context(self) -> None:
        """Where somebody chose it."""
        chosen = self._settings.max_context
        if self.context < chosen != VllmConfig.model_fields["max_context"].default:
            self._notice(
                NoticeLevel.INFO,
                f"vllm.max_context {chosen} is more than the {self.context} positions of "
                f"{self._policy.path}; {self.context} are used",
            )

    def _check_request(self, request: GenerationRequest) -> None:
        check_request(request, self._policy.vocab_size, self.context)
        if request.sampling.temperature > MAX_TEMPERATURE:
            raise EngineError(
                f"temperature {request.sampling.temperature:g} is too high for vLLM, which allows "
                f"{MAX_TEMPERATURE:g} at most; set rollout.engine to 'transformers' for more"
            )


async def _rest(life: Life) -> None:
    await life.halt(stop=True)
    await life.go_on(enter=False)


async def _rise(life: Life) -> None:
    await life.wake()
    await life.go_on(enter=True)


async def _score(life: Life, sequence: TokenSequence) -> NDArray[np.float32]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,  # those of the given tokens, never a distribution
        extra_args={TEMPERATURE: float(sequence.temperature)},
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async with life.scorers:
        tokens = sequence.prompt_ids + sequence.token_ids
        (output,) = [output async for output in life.outputs(tokens, params)]
    flat: Any = output.prompt_logprobs
    first = len(sequence.prompt_ids)
    scored = np.asarray(flat.logprobs[first - 1 :], dtype=np.float32)
    if len(scored) != len(sequence.token_ids):
        raise EngineError(f"vLLM gave {len(scored)} scores for {len(sequence.token_ids)} tokens")
    return scored


def _log_notice(level: NoticeLevel, text: str) -> None:
    logger.log(logging.WARNING if level == "warning" else logging.INFO, text)
