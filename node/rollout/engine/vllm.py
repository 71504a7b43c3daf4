"""The vLLM engine: continuous batching on GPUs and CPU servers, behind the interface of `transformers`.

For: generation that never restarts for new weights. Every rollout is a request of its own to vLLM's
asynchronous engine (`_vllm_process`), at most `max_concurrent` at a time; `update` sends only what changed
(`_vllm_patch`) between two decoding steps. A token's `versions` entry is the version that sampled it.
Log-probabilities are those of the distribution that was sampled from, after temperature and top-p; greedy
ones are at temperature 1. Random numbers come from the engine's own seed: a request's seed is recorded, not
used (on a CPU it can kill vLLM). A process that dies or hangs is started again with the current weights, and
what it was generating is generated anew.

Weights and requests under way (`in_flight`): `recompute` computes their cache anew, so every token is exactly
of its version; `continue` goes on with the old cache, and then only rollouts of a single version are exact.
For that to hold, requests without a first token begin again when new weights come, and the key of every
cached block names the update it was made under.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.config import VllmConfig
from node.rollout.engine._vllm_patch import Mirror, TensorPatch, WeightsDoNotFit, batches
from node.rollout.engine._vllm_process import EngineDied, VllmProcess, require_vllm
from node.rollout.engine.base import Engine, EngineError, GenerationRequest, TokenSequence
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Rollout

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

__all__ = ["VllmEngine"]

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before the first, second ... start in a row; a success in between begins again at the first."""


@dataclass
class _Job:
    """One rollout on its way through the engine."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] | None = None
    """Of every token; None until the rollout is complete."""

    def begin_again(self) -> None:
        self.token_ids, self.logprobs, self.versions = [], [], None


@dataclass
class _Life:
    """One vLLM process with what its loop needs."""

    process: VllmProcess
    slots: asyncio.Semaphore
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Open while new requests may enter."""
    update: int = 0
    """Number of the last complete weight update, as the worker counts."""
    labels: itertools.count[int] = field(default_factory=itertools.count)
    tokenless: set[str] = field(default_factory=set)
    """Labels of requests that have no token yet."""
    stale: set[str] = field(default_factory=set)
    """Labels of requests that must begin again under new weights."""


class VllmEngine(Engine):
    """Blocks in the constructor until the model is loaded. Raises ConfigError without vLLM, ModelError for a
    folder that it cannot use, EngineError when it cannot be started."""

    name = "vllm"

    def __init__(
        self,
        policy: Policy,
        settings: VllmConfig,
        *,
        seed: int = 0,
        policy_version: int = 0,
        notice: Callable[[str, str], None] | None = None,
    ) -> None:
        require_vllm()
        self.dtype = settings.dtype
        self.update_stall_s = 0.0
        """How long the last update kept generation waiting, from pause to resume."""
        self.patch_bytes = 0
        """Size of the last update as sent."""
        self._policy = policy
        self._settings = settings
        self._seed = seed
        self._notice = notice or _log_notice
        self._version = policy_version
        self._context = min(policy.max_positions, settings.max_context)
        self._mirror = Mirror(policy.tensor_shapes(), getattr(torch, settings.dtype))
        self._life: _Life | None = None
        self._life_lock = threading.RLock()
        self._exclusive = threading.Lock()
        """Held by `update` and by `logprobs`: scores are of one version."""
        self._paused = False
        self._closing = threading.Event()
        self._deaths = 0
        self._cause = ""
        self._living()

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def pids(self) -> list[int]:
        """Processes of the running engine, the scheduler's first."""
        life = self._life
        return [] if life is None else life.process.pids

    # --- generation ----------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[list[Rollout]]:
        for request in requests:
            self._check_tokens(request.prompt_ids, request.sampling.max_new_tokens)
            if request.n < 1:
                raise EngineError(f"a generation request asks for {request.n} rollouts; ask for at least 1")
        groups = [[_Job(request) for _ in range(request.n)] for request in requests]
        jobs = [job for group in groups for job in group]
        self._attempt(lambda life: self._work(life, jobs, greedy))
        return [[self._rollout(job) for job in group] for group in groups]

    async def _work(self, life: _Life, jobs: Sequence[_Job], greedy: bool) -> None:
        await _together([self._finish(life, job, greedy) for job in jobs if job.versions is None])

    async def _finish(self, life: _Life, job: _Job, greedy: bool) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = job.request.sampling
        params = SamplingParams(
            temperature=0.0 if greedy else float(sampling.temperature),
            top_p=1.0 if greedy else float(sampling.top_p),
            max_tokens=sampling.max_new_tokens,
            logprobs=0,
            ignore_eos=True,  # the model's own list of end tokens; ours is the tokenizer's
            stop_token_ids=[self._policy.eos_token_id],
            detokenize=False,
            flat_logprobs=True,
            # The first token, and then all the others at the end.
            output_kind=RequestOutputKind.DELTA,
            stream_interval=2**31,
        )
        async with life.slots:
            while job.versions is None:
                await life.gate.wait()
                label = str(next(life.labels))
                job.begin_again()
                life.tokenless.add(label)
                try:
                    await self._stream(life, job, params, label)
                finally:
                    life.tokenless.discard(label)
                    life.stale.discard(label)

    async def _stream(self, life: _Life, job: _Job, params: SamplingParams, label: str) -> None:
        """Fill the job; leaves it incomplete when new weights came before its first token."""
        async with aclosing(self._outputs(life, job.request.prompt_ids, params, label)) as outputs:
            async for output in outputs:
                if label in life.stale:
                    return
                life.tokenless.discard(label)
                completion: Any = output.outputs[0]
                job.token_ids += completion.token_ids
                job.logprobs += completion.logprobs.logprobs
                if not output.finished:
                    continue
                if completion.finish_reason not in ("stop", "length"):
                    raise EngineError(f"vLLM broke off a rollout: {completion.finish_reason}")
                job.versions = [
                    int(span.version)
                    for span in completion.weight_versions
                    for _ in range(span.start, span.end)
                ]

    async def _outputs(
        self, life: _Life, prompt_ids: tuple[int, ...], params: SamplingParams, label: str
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=f"update {life.update}")
        try:
            async with aclosing(life.process.engine.generate(prompt, params, label)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError:
            raise  # the watch over this call knows more
        except Exception as error:
            raise EngineError(f"vLLM failed at a request: {error.__cause__ or error}") from error

    def _rollout(self, job: _Job) -> Rollout:
        ids = np.asarray(job.token_ids, dtype="<u4")
        logprobs = np.asarray(job.logprobs, dtype="<f4")
        versions = np.asarray(job.versions, dtype="<u4")
        if not ids.shape == logprobs.shape == versions.shape:
            raise EngineError(
                f"vLLM gave {len(ids)} tokens {len(logprobs)} log-probabilities and {len(versions)} versions"
            )
        if np.isnan(logprobs).any():
            raise _broken_weights(int(versions[-1]))
        return Rollout(
            text=self._policy.decode(ids.tolist()),
            token_ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
            versions=versions.tobytes(),
            finish=FinishReason.STOP if ids[-1] == self._policy.eos_token_id else FinishReason.LENGTH,
            reward=0.0,
            seed=job.request.seed,
        )

    # --- scoring -------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        for sequence in sequences:
            self._check_tokens(sequence.prompt_ids, 0)
            self._check_tokens(sequence.prompt_ids + sequence.token_ids, 1)
        with self._exclusive:
            results = self._attempt(lambda life: self._score_all(life, sequences))
        for scored in results:
            if np.isnan(scored).any():
                raise _broken_weights(self._version)
        return results

    async def _score_all(self, life: _Life, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return await _together([self._score(life, sequence) for sequence in sequences])

    async def _score(self, life: _Life, sequence: TokenSequence) -> NDArray[np.float32]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        plain = sequence.temperature == 1.0
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            # vLLM scores at temperature 1; for another one the whole distribution is needed.
            prompt_logprobs=0 if plain else -1,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with life.slots:
            await life.gate.wait()
            label = str(next(life.labels))
            tokens = sequence.prompt_ids + sequence.token_ids
            (output,) = [output async for output in self._outputs(life, tokens, params, label)]
        flat: Any = output.prompt_logprobs
        first = len(sequence.prompt_ids)
        if plain:
            return np.asarray(flat.logprobs[first - 1 :], dtype=np.float32)
        scored = np.empty(len(sequence.token_ids), dtype=np.float32)
        for place in range(len(scored)):
            begin, end = flat.start_indices[first + place], flat.end_indices[first + place]
            scaled = np.asarray(flat.logprobs[begin:end], dtype=np.float64) / sequence.temperature
            # The token itself comes first and once more among all.
            scored[place] = scaled[0] - np.logaddexp.reduce(scaled[1:])
        return scored

    # --- weights -------------------------------------------------------------------------------------------

    def update(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        with self._exclusive:
            try:
                fitted = self._mirror.fit(state)
            except WeightsDoNotFit as error:
                raise EngineError(f"weights do not fit the engine: {error}") from None
            patches = self._mirror.changes(fitted)
            self._attempt(lambda life: self._take(life, patches, fitted, policy_version))
            self._mirror.commit(fitted, patches)

    def reload(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        with self._exclusive:
            self._mirror.forget()
        self.update(state, policy_version)

    async def _take(
        self, life: _Life, patches: list[TensorPatch], fitted: Mapping[str, Tensor], policy_version: int
    ) -> None:
        """Between two decoding steps. A patch that fails is followed at once by everything; when that fails
        too, the process has weights that nobody knows, and ends."""
        began_s = time.monotonic()
        await self._halt(life)
        try:
            try:
                await self._send(life, patches, policy_version, whole=not self._mirror.known)
            except Exception as error:
                life.process.raise_if_dead()
                self._mirror.forget()
                self._notice("warning", f"an update of the engine failed and is sent whole: {error}")
                await self._send(life, self._mirror.everything(fitted), policy_version, whole=True)
        except EngineDied:
            raise
        except Exception as error:
            life.process.kill()
            raise EngineError(f"the engine does not take version {policy_version}: {error}") from error
        self._version = policy_version
        await self._go_on(life)
        self.update_stall_s = time.monotonic() - began_s
        self.patch_bytes = sum(patch.payload_bytes for patch in patches)

    async def _send(
        self, life: _Life, patches: Sequence[TensorPatch], policy_version: int, *, whole: bool
    ) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = life.process.engine
        if not patches:
            await engine.update_weight_version(str(policy_version))
            return
        await engine.start_weight_update()
        for batch in batches(patches):
            info = {
                "base": 0 if whole else life.update,
                "update": life.update + 1,
                "dtype": self.dtype,
                "tensors": [patch.record() for patch in batch],
            }
            await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await engine.finish_weight_update(weight_version=str(policy_version))
        life.update += 1

    async def _halt(self, life: _Life) -> None:
        life.gate.clear()
        clear = self._settings.in_flight == "recompute"
        await life.process.engine.pause_generation(mode="keep", clear_cache=clear)
        if not clear and life.tokenless:
            life.stale |= life.tokenless
            await life.process.engine.abort(sorted(life.tokenless))

    async def _go_on(self, life: _Life) -> None:
        if not self._paused:
            await life.process.engine.resume_generation()
            life.gate.set()

    # --- pause and close -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """As the interface says; scoring waits as well."""

        async def work(life: _Life) -> None:
            life.gate.clear()
            await life.process.engine.pause_generation(mode="keep", clear_cache=False)

        self._paused = True
        self._attempt(work)

    def resume(self) -> None:
        self._paused = False
        self._attempt(self._go_on)

    def close(self) -> None:
        self._closing.set()
        life = self._life
        if life is not None:
            life.process.close()

    # --- life and death ------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[_Life], Coroutine[Any, Any, Result]]) -> Result:
        """Do `work` in the living process; when it dies of it, again in its successor."""
        while True:
            life = self._living()
            try:
                result = life.process.run(work(life))
            except EngineDied as error:
                self._bury(life, str(error))
            else:
                self._deaths = 0
                return result

    def _living(self) -> _Life:
        """The running process, or a new one. Raises EngineError when closed or after too many deaths."""
        with self._life_lock:
            if self._closing.is_set():
                raise EngineError("the engine is closed")
            if self._life is not None and self._life.process.dead:
                self._bury(self._life, self._life.process.obituary())
            while self._life is None:
                if self._deaths > self._settings.max_restarts:
                    raise EngineError(f"vLLM was started {self._deaths} times in a row; {self._cause}")
                self._closing.wait(BACKOFF_S[min(self._deaths, len(BACKOFF_S) - 1)])
                if self._closing.is_set():
                    raise EngineError("the engine is closed")
                try:
                    self._life = self._born()
                except EngineDied as error:
                    if self._deaths == 0 and not self._mirror.known and not self._cause:
                        raise  # the very first start: nothing to recover
                    self._deaths += 1
                    self._cause = str(error)
            return self._life

    def _bury(self, life: _Life, cause: str) -> None:
        with self._life_lock:
            if self._life is not life or self._closing.is_set():
                return
            self._life = None
            self._deaths += 1
            self._cause = cause
            self._notice("warning", f"{cause}; it is started again with version {self._version}")
            life.process.close()

    def _born(self) -> _Life:
        """A process with the current weights. Raises EngineDied, ModelError."""
        settings = self._settings
        process = VllmProcess(
            self._arguments,
            start_timeout_s=settings.start_timeout_s,
            deadline_s=settings.deadline_s,
            notice=self._notice,
        )
        life = _Life(process, asyncio.Semaphore(settings.max_concurrent))
        held = self._mirror.held()

        async def settle() -> None:
            if held is None:
                await process.engine.update_weight_version(str(self._version))
            else:
                await self._send(life, self._mirror.everything(held), self._version, whole=True)
                self._mirror.remember()
            if not self._paused:
                life.gate.set()
            else:
                await process.engine.pause_generation(mode="keep", clear_cache=False)

        try:
            process.run(settle())
        except BaseException:
            process.close()
            raise
        return life

    def _arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """For vLLM's AsyncEngineArgs."""
        settings = self._settings
        own: dict[str, Any] = (
            {"enforce_eager": True, "kv_cache_memory_bytes": settings.kv_cache_mib * 2**20}
            if on_cpu
            else {"gpu_memory_utilization": settings.gpu_memory_share}
        )
        return own | {
            "model": str(self._policy.path),
            "skip_tokenizer_init": True,  # tokens in, tokens out
            "generation_config": "vllm",  # not the folder's sampling defaults
            "trust_remote_code": False,
            "enable_prompt_embeds": False,
            "load_format": "safetensors",
            "use_tqdm_on_load": False,
            "dtype": settings.dtype,
            "seed": self._seed % 2**31,
            "max_model_len": self._context,
            "max_num_seqs": settings.max_concurrent,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }

    def _check_tokens(self, token_ids: tuple[int, ...], more: int) -> None:
        if not token_ids:
            raise EngineError("a prompt is empty; a policy needs at least one token to begin with")
        if min(token_ids) < 0 or max(token_ids) >= self._policy.vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self._policy.vocab_size)
            raise EngineError(f"token id {bad} is outside the vocabulary of {self._policy.vocab_size}")
        if len(token_ids) + more > self._context:
            raise EngineError(
                f"{len(token_ids)} tokens plus {more} new ones exceed the {self._context} positions of this "
                "engine; lower max_new_tokens, or raise vllm.max_context up to what the policy has"
            )


async def _together(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, or the first error with the rest cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _broken_weights(policy_version: int) -> EngineError:
    return EngineError(
        f"version {policy_version} gives logits that are NaN or infinite; load an earlier checkpoint"
    )


def _log_notice(level: str, text: str) -> None:
    logger.log(logging.WARNING if level == "warning" else logging.INFO, text)
