"""The embedded engine: sampling with a key-value cache on a private copy of the weights.

For: every machine that has torch; float32 on a CPU by default, other devices and types by argument. How rows
are batched is in `continuous.py`; this file holds the weights, scores, and decides whose turn it is. Scored
sequences are padded on the right, where a causal model needs no mask. Between two tokens other threads get
their turn: `update` first, then `logprobs` and other generations; so a token's `versions` entry is the
version that produced it. With `in_flight` other than `continue`, rollouts under way have their caches
computed anew before their next token, not inside `update`, which stays short.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from node.rollout.adapter import AdapterSpec, adapter_tensors, wrap
from node.rollout.engine.base import (
    BrokenWeightsError,
    Engine,
    EngineError,
    Generation,
    TokenSequence,
    check_sequences,
)
from node.rollout.engine.continuous import ContinuousBatch, WeightsChanged
from node.rollout.policy import Policy
from protocol.errors import ModelError

__all__ = ["TransformersEngine"]


class TransformersEngine(Engine):
    """Samples with the transformers library. `max_rows` bounds the rollouts that one generation samples at a
    time, `max_batch_tokens` the padded tokens of a pass over prompts or scored sequences. With `adapter` the
    policy's own weights stay, and `update` takes an adapter's state."""

    name = "transformers"

    def __init__(
        self,
        policy: Policy,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        in_flight: Literal["continue", "recompute", "recycle"] = "continue",
        adapter: AdapterSpec | None = None,
        max_rows: int = 256,
        max_batch_tokens: int = 16_384,
    ) -> None:
        self.dtype = dtype
        self.context = policy.max_positions
        self._policy = policy
        self._device = torch.device(device)
        model = policy.load_model(device, dtype)
        self._model: torch.nn.Module = model
        self._weights: dict[str, Tensor] = dict(model.named_parameters())
        """What `update` copies into."""
        self._known_names = frozenset(model.state_dict())
        if adapter is not None:
            self._model = wrapped = wrap(model, adapter)
            self._weights = adapter_tensors(wrapped)
            self._known_names = frozenset(self._weights)
        self._model.requires_grad_(False)
        self.policy_version = 0
        self.in_flight = in_flight
        """May be changed before a generation is opened."""
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._turns = threading.Condition()
        self._busy = False
        self._paused = False
        self._updates_waiting = 0
        self._closed = False

    def require_cache(self) -> None:
        """Raise ModelError for a model whose layers keep anything but keys and values: this engine joins,
        splits and trims what they keep, row by row. A pass over two tokens tells."""
        ids_RL = torch.zeros((1, 2), dtype=torch.long, device=self._device)
        try:
            with torch.no_grad():
                cache = self._model(input_ids=ids_RL, use_cache=True).past_key_values
            places = {layer.keys.shape[-2] for layer in cache.layers}
        except (AttributeError, TypeError, IndexError):
            places = set()
        if places != {2}:
            raise ModelError(
                f"{self._policy.path} is a {self._policy.model_type} model, some of whose layers keep no "
                "key-value cache, which the transformers engine needs; set rollout.engine = 'vllm'"
            )

    # --- generation ----------------------------------------------------------------------------------------

    def open(self, *, greedy: bool = False) -> Generation:
        if self._closed:
            raise EngineError("the engine is closed")
        return ContinuousBatch(
            self._policy,
            self._next_logits,
            device=self._device,
            exact=self.in_flight != "continue",
            max_rows=self._max_rows,
            max_batch_tokens=self._max_batch_tokens,
            greedy=greedy,
        )

    def _next_logits(
        self,
        ids_RL: Tensor,
        mask_RL: Tensor | None,
        positions_RL: Tensor,
        cache: DynamicCache,
        only_version: int | None,
    ) -> tuple[Tensor, int]:
        with self._turn(generating=True):
            if only_version not in (None, self.policy_version):
                raise WeightsChanged
            logits_RV = self._model(
                input_ids=ids_RL,
                attention_mask=mask_RL,
                position_ids=positions_RL,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            return logits_RV, self.policy_version

    # --- scoring -------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        check_sequences(sequences, self._policy.vocab_size, self.context)
        results: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)

        def tokens_of(place: int) -> int:
            return len(sequences[place].prompt_ids) + len(sequences[place].token_ids)

        batch: list[int] = []
        for place in sorted(range(len(sequences)), key=tokens_of):
            if batch and (len(batch) + 1) * tokens_of(place) > self._max_batch_tokens:
                self._score_batch(sequences, batch, results)
                batch = []
            batch.append(place)
        if batch:
            self._score_batch(sequences, batch, results)
        return results

    def _score_batch(
        self, sequences: Sequence[TokenSequence], batch: Sequence[int], results: list[NDArray[np.float32]]
    ) -> None:
        chosen = [sequences[place] for place in batch]
        width = max(len(sequence.prompt_ids) + len(sequence.token_ids) for sequence in chosen)
        shortest = min(len(sequence.prompt_ids) for sequence in chosen)
        ids = np.full((len(chosen), width), self._policy.pad_token_id, dtype=np.int64)
        for row, sequence in enumerate(chosen):
            whole = sequence.prompt_ids + sequence.token_ids
            ids[row, : len(whole)] = whole
        ids_BL = torch.from_numpy(ids).to(self._device)
        temperature_B = torch.tensor([sequence.temperature for sequence in chosen]).to(self._device)
        with torch.inference_mode(), self._turn(generating=False):
            logits_BLV = self._model(
                input_ids=ids_BL, use_cache=False, logits_to_keep=width - shortest + 1
            ).logits[:, :-1]
            logprobs_BLV = torch.log_softmax(logits_BLV.float() / temperature_B[:, None, None], dim=-1)
            logprobs_BL = logprobs_BLV.gather(-1, ids_BL[:, shortest:, None]).squeeze(-1)
        logprobs = logprobs_BL.cpu().numpy().astype(np.float32)
        for row, (place, sequence) in enumerate(zip(batch, chosen, strict=True)):
            start = len(sequence.prompt_ids) - shortest
            scored = logprobs[row, start : start + len(sequence.token_ids)]
            if np.isnan(scored).any():
                raise BrokenWeightsError(self.policy_version)
            results[place] = scored.copy()

    # --- weights and turns ---------------------------------------------------------------------------------

    def update(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        unknown = sorted(set(state) - self._known_names)
        missing = sorted(set(self._weights) - set(state))
        if unknown or missing:
            raise EngineError(f"weights do not fit the engine: unknown {unknown[:3]}, missing {missing[:3]}")
        for name, parameter in self._weights.items():
            if state[name].shape != parameter.shape:
                shapes = f"{tuple(state[name].shape)}, not {tuple(parameter.shape)}"
                raise EngineError(f"weights do not fit the engine: {name} is {shapes}")
        with self._turns:
            self._updates_waiting += 1
            self._turns.wait_for(lambda: self._closed or not self._busy)
            self._updates_waiting -= 1
            if self._closed:
                raise EngineError("the engine is closed")
            with torch.no_grad():  # other threads wait for the condition's lock meanwhile
                for name, parameter in self._weights.items():
                    parameter.copy_(state[name])
            self.policy_version = policy_version
            self._turns.notify_all()

    def pause(self) -> None:
        with self._turns:
            self._paused = True
            self._turns.wait_for(lambda: not self._busy)

    def resume(self) -> None:
        with self._turns:
            self._paused = False
            self._turns.notify_all()

    def close(self) -> None:
        with self._turns:
            if self._closed:
                return
            self._closed = True
            self._turns.notify_all()
            self._turns.wait_for(lambda: not self._busy)
            self._weights = {}
            del self._model

    @contextmanager
    def _turn(self, *, generating: bool) -> Iterator[None]:
        """One forward pass at a time; generation gives way to updates and to `pause`."""
        with self._turns:
            self._turns.wait_for(
                lambda: (
                    self._closed
                    or (not self._busy and not (generating and (self._paused or self._updates_waiting)))
                )
            )
            if self._closed:
                raise EngineError("the engine is closed")
            self._busy = True
        try:
            yield
        finally:
            with self._turns:
                self._busy = False
                self._turns.notify_all()
