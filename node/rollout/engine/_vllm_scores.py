"""Inside vLLM's worker: log-probabilities of given tokens at the temperature that the request names.

vLLM scores the tokens of a prompt at temperature 1, whatever the request says. Without this the whole
vocabulary of each token would have to leave the worker to be scaled outside: 823 MiB in the node's process
for one sequence of 100 tokens of SmolLM2; now nothing for eight of them, as at temperature 1. The logits of a
request that bears `TEMPERATURE` in its `extra_args` are divided before they become log-probabilities;
what is returned is one value a token. Both of vLLM's runners are covered: the first (on a CPU) goes request
by request, the second (on a GPU) has the rows of all requests in one batch. Requests without the key stay as
they are. Not for sampled tokens, whose values vLLM gives after temperature by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TEMPERATURE", "row_temperatures", "scaled_rows", "score_at_temperature"]

TEMPERATURE = "murmuration_score_temperature"
"""Key in `SamplingParams.extra_args`."""


def score_at_temperature() -> None:
    """Change both runners; twice is once. Raises AttributeError or ImportError for a vLLM that is built
    differently: then no score may be believed."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner._get_prompt_logprobs_dict, "scales"):
        GPUModelRunner._get_prompt_logprobs_dict = _by_request(GPUModelRunner._get_prompt_logprobs_dict)
    if not hasattr(PromptLogprobsWorker.compute_prompt_logprobs, "scales"):
        PromptLogprobsWorker.add_request = _noting(PromptLogprobsWorker.add_request)
        PromptLogprobsWorker.compute_prompt_logprobs = _by_row(PromptLogprobsWorker.compute_prompt_logprobs)


def _temperature(params: Any) -> float:
    """Which a request asks to be scored at; 1 where it does not."""
    value = (getattr(params, "extra_args", None) or {}).get(TEMPERATURE, 1.0)
    return float(value) if isinstance(value, float) and 0 < value < float("inf") else 1.0


# --- the first runner: one request after the other ----------------------------------------------------------


def _by_request(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def scored(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        waiting: dict[str, int] = self.num_prompt_logprobs
        by_request = {
            name: _temperature(getattr(self.requests.get(name), "sampling_params", None)) for name in waiting
        }
        found: dict[str, Any] = {}
        try:
            for temperature in sorted(set(by_request.values())):
                some = {name: waiting[name] for name in waiting if by_request[name] == temperature}
                self.num_prompt_logprobs = some
                found |= _at(temperature, self.sampler, functools.partial(original, self, *args, **kwargs))
                for name, each in by_request.items():
                    if each == temperature and name not in some:
                        waiting.pop(name)  # complete
        finally:
            self.num_prompt_logprobs = waiting
        return found

    scored.scales = True  # type: ignore[attr-defined]
    return scored


def _at(temperature: float, sampler: Any, score: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if temperature == 1.0:
        return score()
    plain = sampler.compute_logprobs
    sampler.compute_logprobs = lambda logits: plain(logits.to(torch.float32) / temperature)
    try:
        return score()
    finally:
        del sampler.compute_logprobs  # of the object; the class's own is there again


# --- the second runner: rows of all requests at once --------------------------------------------------------


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_request(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        original(self, req_id, req_idx, sampling_params)
        if not hasattr(self, "score_temperatures"):
            self.score_temperatures = np.ones(self.max_num_reqs, dtype=np.float32)
        self.score_temperatures[req_idx] = _temperature(sampling_params)

    return add_request


def _by_row(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def compute(self: Any, logits_fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        batch = kwargs["input_batch"] if "input_batch" in kwargs else args[1]
        rows = row_temperatures(
            getattr(self, "score_temperatures", None), batch.idx_mapping_np, batch.query_start_loc_np
        )
        return original(self, logits_fn if rows is None else scaled_rows(logits_fn, rows), *args, **kwargs)

    compute.scales = True  # type: ignore[attr-defined]
    return compute


def row_temperatures(
    by_place: np.ndarray[Any, Any] | None,
    places: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any] | None:
    """The temperature of each row of a batch, None where all are 1. `by_place`: of each place that a request
    can have; `places`: of the requests of the batch; `starts`: their first rows, and the end."""
    if by_place is None or bool((by_place[places] == 1.0).all()):
        return None
    return np.repeat(by_place[places], np.diff(starts[: len(places) + 1]))


def scaled_rows(
    logits_fn: Callable[[Tensor], Tensor], rows: np.ndarray[Any, Any]
) -> Callable[[Tensor], Tensor]:
    """`logits_fn`, which is given the rows of a batch piece by piece in order, with each row divided by its
    temperature; rows beyond those given are padding."""
    done = 0

    def scaled(hidden: Tensor) -> Tensor:
        nonlocal done
        logits = logits_fn(hidden)
        some = np.ones(len(logits), dtype=np.float32)
        known = rows[done : done + len(logits)]
        some[: len(known)] = known
        done += len(logits)
        return logits.to(torch.float32) / torch.from_numpy(some).to(logits.device)[:, None]

    return scaled
