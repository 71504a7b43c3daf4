"""Weight updates of a running engine: sparse ones, what they cost rollouts under way, whether they arrive.

For: two states of the weights that differ in 0.5 % of their elements and take turns, so that every update is
one of that density; the time that a fixed workload loses to one update halfway; the largest difference in
log-probability between the engine and a transformers model with the same weights. Not for: how weights come
about, or travel between peers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.engine.base import Engine, EngineError, TokenSequence
from node.rollout.engine.parity import parity, probe_sequences
from node.rollout.policy import Policy
from swarm_cli.bench.workload import prompt, rollout

__all__ = ["DENSITY", "Weights", "disturbed", "seconds_with_update"]

DENSITY = 0.005
"""Share of the elements that an update changes."""
POLL_S = 0.01
"""Between two looks at how far a workload is."""


class Weights:
    """The policy's weights and slightly other ones, given to the engine by turns."""

    def __init__(self, policy: Policy) -> None:
        self._model = policy.load_model().requires_grad_(False)
        first = dict(self._model.state_dict())
        self._states = (first, disturbed(first, seed=0))
        self._version = 0
        self._sequences = probe_sequences([prompt(policy, place) for place in range(4)], policy.vocab_size)

    def update(self, engine: Engine) -> None:
        """Give the engine the other weights."""
        self._version += 1
        engine.update(self._states[self._version % 2], self._version)

    def parity(self, engine: Engine) -> float:
        """Largest difference to a transformers model with the weights that the engine was given, in nats."""
        return parity(engine, self._reference(self._version), self._sequences)

    def moved(self) -> float:
        """Largest difference that one update makes: what the probe would show, had it not arrived."""
        pairs = zip(self._reference(0), self._reference(1), strict=True)
        return max(float(np.abs(old - new).max()) for old, new in pairs)

    @torch.inference_mode()
    def _reference(self, version: int) -> list[NDArray[np.float32]]:
        return [self._logprobs(self._states[version % 2], sequence) for sequence in self._sequences]

    def _logprobs(self, state: dict[str, Tensor], sequence: TokenSequence) -> NDArray[np.float32]:
        # Every name has its tensor in `state`, tied ones the same.
        ids = torch.tensor([sequence.prompt_ids + sequence.token_ids])
        logits = torch.func.functional_call(self._model, state, (ids,), tie_weights=False).logits[0]
        first = len(sequence.prompt_ids)
        logprobs = logits[first - 1 : -1].log_softmax(-1)
        taken: NDArray[np.float32] = logprobs.gather(1, ids[0, first:, None])[:, 0].numpy()
        return taken


def disturbed(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other weights: about DENSITY of every tensor's elements is doubled. Tied tensors stay tied."""
    generator = torch.Generator().manual_seed(seed)
    moved: dict[int, Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() in moved:
            continue
        other = tensor.clone()
        count = max(1, round(DENSITY * other.numel()))
        chosen = torch.randint(other.numel(), (count,), generator=generator)
        other.view(-1)[chosen] = 2 * other.view(-1)[chosen] + torch.finfo(other.dtype).eps
        moved[tensor.data_ptr()] = other
    return {name: moved[tensor.data_ptr()] for name, tensor in state.items()}


def seconds_with_update(
    engine: Engine, prompts: Sequence[tuple[int, ...]], length: int, update: Callable[[], None] | None
) -> float:
    """Seconds for one rollout of `length` tokens for each prompt, all at once, with an update when half of
    the tokens are there."""
    generation = engine.open()
    faults: list[EngineError] = []

    def interfere(update: Callable[[], None]) -> None:
        while generation.in_flight and generation.sampled < len(prompts) * length // 2:
            time.sleep(POLL_S)
        try:
            update()
        except EngineError as error:
            faults.append(error)

    worker = threading.Thread(target=interfere, args=(update,), name="bench-update")
    began_s = time.perf_counter()
    try:
        generation.start([rollout(prompt_ids, length) for prompt_ids in prompts])
        if update is not None:
            worker.start()
        while generation.in_flight:
            generation.wait()
        took_s = time.perf_counter() - began_s
    finally:
        generation.close()
        if worker.ident is not None:
            worker.join()
    if faults:
        raise faults[0]
    return took_s
