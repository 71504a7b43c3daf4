"""Rollouts in flight on the vLLM engine.

For: `VllmEngine.open`. Every rollout is a job that goes through vLLM in one or more legs: a leg that is
stopped (a token budget is spent, weights change, the engine sleeps) leaves its tokens with log-probabilities
and versions, and the next one begins behind them. vLLM hands over tokens now and then, the rest when a leg
ends. When the process dies, tokens that have arrived are kept if the weights are still those that the leg
began with, so every one's version is known; otherwise the leg is lost and begins again. Random numbers come
from the engine's own seed: a request's seed is recorded, not used. Not for: weights, or starting processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from node.rollout.engine._vllm_life import Leg, Life
from node.rollout.engine.base import (
    BrokenWeightsError,
    EngineError,
    Generation,
    GenerationRequest,
    Prefix,
    finished_rollout,
)
from node.rollout.policy import Policy
from protocol.messages import Rollout

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

__all__ = ["VllmGeneration"]

HANDOVER_TOKENS = 16
"""Tokens of a leg between two handovers: how exactly a budget is kept, and what a death costs a rollout."""


@dataclass(eq=False)
class _Job:
    """One rollout on its way."""

    request: GenerationRequest
    end_tokens: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    life: Life | None = None
    """Where it is being worked on."""
    task: asyncio.Task[None] | None = None

    @property
    def complete(self) -> bool:
        ended = bool(self.token_ids) and self.token_ids[-1] in self.end_tokens
        return ended or len(self.token_ids) >= self.request.sampling.max_new_tokens


class VllmGeneration(Generation):
    """`attempt` runs a coroutine in the living process, and again in its successor when it dies of it;
    `living` gives the process if there is one; `check` raises EngineError for a request that cannot fit."""

    def __init__(
        self,
        policy: Policy,
        *,
        greedy: bool,
        attempt: Callable[[Callable[[Life], Coroutine[Any, Any, None]]], None],
        living: Callable[[], Life | None],
        check: Callable[[GenerationRequest], None],
    ) -> None:
        self._policy = policy
        self._greedy = greedy
        self._attempt = attempt
        self._living = living
        self._check = check
        self._groups: dict[int, list[_Job]] = {}
        self._tickets = 0
        self.sampled = 0
        self._goal: int | None = None
        """Value of `sampled` at which generation holds."""
        self._held = False
        self._holding: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._fault: Exception | None = None
        self._closed = False

    # --- what callers see ----------------------------------------------------------------------------------

    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        if self._closed:
            raise EngineError("the generation is closed")
        for request in requests:
            self._check(request)
        tickets = list(range(self._tickets, self._tickets + len(requests)))
        self._tickets += len(requests)
        self._groups |= {
            ticket: list(self._jobs_of(request)) for ticket, request in zip(tickets, requests, strict=True)
        }
        life = self._living()
        if life is not None:
            with contextlib.suppress(RuntimeError):  # its loop just closed; `wait` finds the successor
                life.process.loop.call_soon_threadsafe(self.launch, life)
        return tickets

    def _jobs_of(self, request: GenerationRequest) -> Iterator[_Job]:
        for prefix in request.prefixes or [Prefix((), (), ())] * request.n:
            have = list(prefix.token_ids), list(prefix.logprobs), list(prefix.versions)
            yield _Job(request, self._policy.end_token_ids, *have)

    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        self._goal = None if tokens is None else self.sampled + tokens
        if self._groups and not self._closed:
            self._attempt(self._advance)
        if self._fault is not None:
            raise self._fault
        tickets = sorted(ticket for ticket, jobs in self._groups.items() if _complete(jobs))
        return [
            (ticket, [self._rollout(job) for job in jobs])
            for ticket, jobs in [(ticket, self._groups.pop(ticket)) for ticket in tickets]
        ]

    @property
    def in_flight(self) -> int:
        if self._closed:
            return 0
        return sum(not job.complete for jobs in list(self._groups.values()) for job in jobs)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        life = self._living()
        if life is not None:
            with contextlib.suppress(RuntimeError):  # its loop just closed, and ended them
                life.process.loop.call_soon_threadsafe(self._end, life)

    # --- on the loop of the process ------------------------------------------------------------------------

    async def _advance(self, life: Life) -> None:
        """Until there is news for the caller."""
        if self._holding is not None and not self._holding.done():
            await self._holding
        self._news = asyncio.Event()
        self._held = self._goal is not None and self.sampled >= self._goal
        self.launch(life)
        while not (self._closed or self._held or self._fault or any(map(_complete, self._groups.values()))):
            self._news.clear()
            await self._news.wait()
        if self._holding is not None and not self._holding.done():
            await self._holding

    def launch(self, life: Life) -> None:
        """Put every job to work that is not; slots are given in this order."""
        if self._held or self._closed:
            return
        for jobs in list(self._groups.values()):
            for job in jobs:
                if job.life is not life and not job.complete:
                    job.life = life
                    job.task = life.process.loop.create_task(self._work(life, job))

    def _end(self, life: Life) -> None:
        for jobs in self._groups.values():
            for job in jobs:
                if job.life is life and job.task is not None:
                    job.task.cancel()
        self._news.set()

    async def _work(self, life: Life, job: _Job) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with life.slots:
                while not job.complete:
                    while not life.gate.is_set():
                        await life.gate.wait()
                    if self._held:
                        break
                    await self._leg(life, job)
        except EngineDeadError:
            pass  # goes on in the successor
        except Exception as error:  # raised by `wait`
            self._fault = error
        finally:
            if job.life is life:
                job.life = None
            self._news.set()

    async def _leg(self, life: Life, job: _Job) -> None:
        """One request to vLLM: to the end of the rollout, or until it is stopped."""
        params = self._params(job)
        leg = life.enter(self)
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] | None = None
        try:
            prompt = job.request.prompt_ids + tuple(job.token_ids)
            async with aclosing(life.outputs(prompt, params, leg)) as outputs:
                async for output in outputs:
                    completion: Any = output.outputs[0]
                    token_ids += completion.token_ids
                    logprobs += completion.logprobs.logprobs
                    leg.begun = leg.begun or bool(token_ids)
                    self._count(life, len(completion.token_ids))
                    if not output.finished:
                        continue
                    if completion.finish_reason not in ("stop", "length", "abort"):
                        raise EngineError(f"vLLM broke off a rollout: {completion.finish_reason}")
                    versions = _versions(leg, completion.weight_versions or ())
        finally:
            if versions is None and life.unchanged(leg):
                versions = [leg.version] * len(token_ids)
            if versions is not None:
                # The tokens last: with them the job may be complete, and be read on another thread.
                job.logprobs += logprobs
                job.versions += versions
                job.token_ids += token_ids
            life.leave(leg)

    def _params(self, job: _Job) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = job.request.sampling
        have = len(job.token_ids)
        return SamplingParams(
            temperature=0.0 if self._greedy else float(sampling.temperature),
            top_p=1.0 if self._greedy else float(sampling.top_p),
            max_tokens=sampling.max_new_tokens - have,
            min_tokens=max(0, job.request.min_new_tokens - have),
            logprobs=0,
            ignore_eos=True,  # the model's own list of end tokens; ours has the charter's, too
            stop_token_ids=list(job.end_tokens),
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=HANDOVER_TOKENS,
        )

    def _count(self, life: Life, tokens: int) -> None:
        self.sampled += tokens
        if self._goal is not None and self.sampled >= self._goal and not self._held:
            self._held = True
            self._holding = life.process.loop.create_task(self._hold(life))
            self._news.set()

    async def _hold(self, life: Life) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        with contextlib.suppress(EngineDeadError):  # holds all the more
            await life.stop([leg for leg in life.legs.values() if leg.owner is self])

    # --- what comes out ------------------------------------------------------------------------------------

    def _rollout(self, job: _Job) -> Rollout:
        ids, logprobs, versions = job.token_ids, job.logprobs, job.versions
        if not len(ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"vLLM gave {len(ids)} tokens {len(logprobs)} log-probabilities and {len(versions)} versions"
            )
        for logprob, version in zip(logprobs, versions, strict=True):
            if math.isnan(logprob):
                raise BrokenWeightsError(version)
        return finished_rollout(self._policy, job.request.seed, ids, logprobs, versions)


def _complete(jobs: Sequence[_Job]) -> bool:
    return all(job.complete for job in jobs)


def _versions(leg: Leg, spans: Sequence[Any]) -> list[int]:
    """The version of each token of a leg that vLLM finished. With an adapter a leg has a single one."""
    return [
        int(span.version) if leg.adapter is None else leg.version
        for span in spans
        for _ in range(span.start, span.end)
    ]
