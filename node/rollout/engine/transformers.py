"""The embedded engine: batched sampling with a key-value cache on a private copy of the weights.

For: every machine that has torch; float32 on a CPU by default, other devices and types by argument.
`generate` refills nothing and schedules nothing: it takes requests, computes each distinct prompt once,
expands the cache to the rollouts and samples until all have ended. Prompts are padded on the left, scored
sequences on the right (where a causal model needs no mask). Between two tokens other threads get their turn:
`update` first, then `logprobs` and waiting generations; so a token's `versions` entry is the version that
produced it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from node.rollout.engine.base import Engine, EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.sampling import sample_tokens
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Rollout

__all__ = ["TransformersEngine"]


@dataclass
class _Rows:
    """Rollouts still being sampled; R shrinks as they end."""

    places_R: Tensor
    """Row in the output arrays."""
    positions_R: Tensor
    """Position of the token that is fed next."""
    limits_R: Tensor
    temperature_R: Tensor
    top_p_R: Tensor | None
    uniforms_RT: Tensor
    mask_RL: Tensor | None
    """1 where the cache holds a real token; None when no prompt was padded."""

    def select(self, kept: Tensor) -> _Rows:
        return _Rows(
            places_R=self.places_R[kept],
            positions_R=self.positions_R[kept],
            limits_R=self.limits_R[kept],
            temperature_R=self.temperature_R[kept],
            top_p_R=None if self.top_p_R is None else self.top_p_R[kept],
            uniforms_RT=self.uniforms_RT[kept],
            mask_RL=None if self.mask_RL is None else self.mask_RL[kept],
        )


class TransformersEngine(Engine):
    """Samples with the transformers library. `max_rows` bounds the rollouts, `max_batch_tokens` the padded
    tokens that one forward pass sees."""

    name = "transformers"

    def __init__(
        self,
        policy: Policy,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        policy_version: int = 0,
        max_rows: int = 256,
        max_batch_tokens: int = 16_384,
    ) -> None:
        self.dtype = dtype
        self._policy = policy
        self._device = torch.device(device)
        self._model = policy.load_model(device, dtype).requires_grad_(False)
        self._config = self._model.config
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._known_names = frozenset(self._model.state_dict())
        self._version = policy_version
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._turns = threading.Condition()
        self._busy = False
        self._paused = False
        self._updates_waiting = 0
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._version

    # --- generation ----------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[list[Rollout]]:
        for request in requests:
            self._check_tokens(request.prompt_ids, request.sampling.max_new_tokens)
            if request.n < 1:
                raise EngineError(f"a generation request asks for {request.n} rollouts; ask for at least 1")
        groups: list[list[Rollout]] = []
        batch: list[GenerationRequest] = []
        for request in requests:
            if batch and sum(held.n for held in batch) + request.n > self._max_rows:
                groups += self._generate_batch(batch, greedy)
                batch = []
            batch.append(request)
        if batch:
            groups += self._generate_batch(batch, greedy)
        return groups

    def _generate_batch(self, requests: Sequence[GenerationRequest], greedy: bool) -> list[list[Rollout]]:
        prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
        place_of = {prompt: place for place, prompt in enumerate(prompts)}
        counts = torch.tensor([request.n for request in requests])
        prompt_of_R = torch.tensor([place_of[request.prompt_ids] for request in requests]).repeat_interleave(
            counts
        )
        prompt_of_R = prompt_of_R.to(self._device)
        steps = max(request.sampling.max_new_tokens for request in requests)
        ids_PL, mask_PL = self._left_padded(prompts)
        lengths_P = mask_PL.sum(-1)
        padded = bool((lengths_P != ids_PL.shape[1]).any())
        mask_RL = torch.nn.functional.pad(mask_PL, (0, steps), value=1)[prompt_of_R] if padded else None
        rows = self._rows(requests, counts, steps, lengths_P[prompt_of_R], mask_RL)

        shape = (int(counts.sum()), steps)
        tokens_RT = torch.zeros(shape, dtype=torch.int64, device=self._device)
        logprobs_RT = torch.zeros(shape, dtype=torch.float32, device=self._device)
        lengths_R = torch.zeros(shape[0], dtype=torch.int64, device=self._device)
        versions_T: list[int] = []

        with torch.inference_mode():
            cache = DynamicCache(config=self._config)
            with self._turn(generating=True):
                logits_PV = self._model(
                    input_ids=ids_PL,
                    attention_mask=mask_PL if padded else None,
                    position_ids=(mask_PL.cumsum(-1) - 1).clamp_(min=0),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                versions_T.append(self._version)
            logits_RV = logits_PV[prompt_of_R]
            cache.batch_select_indices(prompt_of_R)
            for step in range(steps):
                tokens_R, chosen_R = sample_tokens(
                    logits_RV, rows.uniforms_RT[:, step], rows.temperature_R, rows.top_p_R, greedy=greedy
                )
                if bool(chosen_R.isnan().any()):
                    raise _broken_weights(versions_T[-1])
                tokens_RT[rows.places_R, step] = tokens_R
                logprobs_RT[rows.places_R, step] = chosen_R
                lengths_R[rows.places_R] += 1
                alive_R = (tokens_R != self._policy.eos_token_id) & (rows.limits_R > step + 1)
                alive = int(alive_R.sum())
                if alive == 0:
                    break
                if alive < alive_R.shape[0]:
                    kept = alive_R.nonzero().squeeze(-1)
                    rows = rows.select(kept)
                    tokens_R = tokens_R[kept]
                    cache.batch_select_indices(kept)
                with self._turn(generating=True):
                    logits_RV = self._model(
                        input_ids=tokens_R[:, None],
                        attention_mask=None
                        if rows.mask_RL is None
                        else rows.mask_RL[:, : ids_PL.shape[1] + step + 1],
                        position_ids=rows.positions_R[:, None] + step,
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                    ).logits[:, -1]
                    versions_T.append(self._version)
        return self._rollouts(requests, tokens_RT, logprobs_RT, lengths_R, versions_T)

    def _left_padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        width = max(len(prompt) for prompt in prompts)
        ids_PL = np.full((len(prompts), width), self._policy.pad_token_id, dtype=np.int64)
        mask_PL = np.zeros((len(prompts), width), dtype=np.int64)
        for place, prompt in enumerate(prompts):
            ids_PL[place, width - len(prompt) :] = prompt
            mask_PL[place, width - len(prompt) :] = 1
        return torch.from_numpy(ids_PL).to(self._device), torch.from_numpy(mask_PL).to(self._device)

    def _rows(
        self,
        requests: Sequence[GenerationRequest],
        counts: Tensor,
        steps: int,
        positions_R: Tensor,
        mask_RL: Tensor | None,
    ) -> _Rows:
        uniforms = []
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)  # on the CPU: every device draws the same
            draws = torch.rand(
                (request.n, request.sampling.max_new_tokens), generator=generator, dtype=torch.float64
            )
            uniforms.append(torch.nn.functional.pad(draws, (0, steps - draws.shape[1])))

        def per_row(values: list[float]) -> Tensor:
            return torch.tensor(values).repeat_interleave(counts).to(self._device)

        cut = any(request.sampling.top_p < 1 for request in requests)
        return _Rows(
            places_R=torch.arange(int(counts.sum()), device=self._device),
            positions_R=positions_R,
            limits_R=per_row([request.sampling.max_new_tokens for request in requests]),
            temperature_R=per_row([float(request.sampling.temperature) for request in requests]),
            top_p_R=per_row([float(request.sampling.top_p) for request in requests]) if cut else None,
            uniforms_RT=torch.cat(uniforms).to(self._device),
            mask_RL=mask_RL,
        )

    def _rollouts(
        self,
        requests: Sequence[GenerationRequest],
        tokens_RT: Tensor,
        logprobs_RT: Tensor,
        lengths_R: Tensor,
        versions_T: list[int],
    ) -> list[list[Rollout]]:
        tokens = tokens_RT.cpu().numpy()
        logprobs = logprobs_RT.cpu().numpy().astype("<f4")
        lengths = lengths_R.tolist()
        versions = np.asarray(versions_T, dtype="<u4")
        groups: list[list[Rollout]] = []
        place = 0
        for request in requests:
            group = []
            for _ in range(request.n):
                length = lengths[place]
                ids = tokens[place, :length]
                group.append(
                    Rollout(
                        text=self._policy.decode(ids.tolist()),
                        token_ids=ids.astype("<u4").tobytes(),
                        logprobs=logprobs[place, :length].tobytes(),
                        versions=versions[:length].tobytes(),
                        finish=FinishReason.STOP
                        if ids[-1] == self._policy.eos_token_id
                        else FinishReason.LENGTH,
                        reward=0.0,
                        seed=request.seed,
                    )
                )
                place += 1
            groups.append(group)
        return groups

    # --- scoring -------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        for sequence in sequences:
            self._check_tokens(sequence.prompt_ids, 0)
            self._check_tokens(sequence.prompt_ids + sequence.token_ids, 0)
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
                raise _broken_weights(self._version)
            results[place] = scored.copy()

    # --- weights and turns ---------------------------------------------------------------------------------

    def update(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        unknown = sorted(set(state) - self._known_names)
        missing = sorted(set(self._parameters) - set(state))
        if unknown or missing:
            raise EngineError(f"weights do not fit the engine: unknown {unknown[:3]}, missing {missing[:3]}")
        for name, parameter in self._parameters.items():
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
                for name, parameter in self._parameters.items():
                    parameter.copy_(state[name])
            self._version = policy_version
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
            self._parameters = {}
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

    def _check_tokens(self, token_ids: tuple[int, ...], more: int) -> None:
        if not token_ids:
            raise EngineError("a prompt is empty; a policy needs at least one token to begin with")
        if min(token_ids) < 0 or max(token_ids) >= self._policy.vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self._policy.vocab_size)
            raise EngineError(f"token id {bad} is outside the vocabulary of {self._policy.vocab_size}")
        if len(token_ids) + more > self._policy.max_positions:
            raise EngineError(
                f"{len(token_ids)} tokens plus {more} new ones exceed the {self._policy.max_positions} "
                "positions of this policy; lower max_new_tokens"
            )


def _broken_weights(policy_version: int) -> EngineError:
    return EngineError(
        f"version {policy_version} gives logits that are NaN or infinite; load an earlier checkpoint"
    )
