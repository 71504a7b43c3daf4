"""Continuous batching on a transformers model: rollouts join and leave the batch at every step.

For: `transformers.py`. One `step` feeds the newest token of every row, computes the prompts of rows that have
just been let in, and samples one token per row. The key-value cache is one tensor per layer: rows of unequal
lengths stand side by side, padded on the left, and columns that no row needs any more are cut off. Prompts
(with a prefix behind them) that are equal are computed once. What a row draws depends on its request's seed,
its place and its position alone, so company changes nothing. Not for turns between threads and not for
weights: `forward` is the engine's.

When the weights change, rows go on with the cache they have (`continue`), or all caches are computed anew
from prompt and tokens before the next token (`recompute` and `recycle`, which are one thing here).

Letters: R rows of the batch, S slots (row of the result arrays), P prompts, L columns of the cache, V
vocabulary, T tokens of a rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from node.rollout.engine.base import (
    BrokenWeightsError,
    EngineError,
    Generation,
    GenerationRequest,
    Prefix,
    check_request,
    finished_rollout,
)
from node.rollout.engine.sampling import sample_tokens
from node.rollout.policy import Policy
from protocol.messages import Rollout

__all__ = ["ContinuousBatch", "Forward", "WeightsChanged", "left_padded"]

_NOTHING = Prefix((), (), ())
JOIN_SHARE = 2
"""Waiting rows are let in once half of the room is free: a pass over few prompts costs as much as one
over many, and as a step."""


Forward = Callable[[Tensor, Tensor | None, Tensor, DynamicCache, int | None], tuple[Tensor, int]]
"""One pass of the engine's model over token ids [R, L] with mask, positions and cache: the logits behind the
last column and the version that gave them. Raises WeightsChanged, with nothing computed, when that is not the
version of the last argument."""


class WeightsChanged(Exception):
    """The cache of a pass is of another version than the weights."""


@dataclass(eq=False)
class _Group:
    """A request in flight."""

    ticket: int
    request: GenerationRequest
    uniforms_NT: Tensor
    """A draw for each position of each rollout."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    def prefix(self, place: int) -> Prefix:
        """What a rollout begins with."""
        return self.request.prefixes[place] if self.request.prefixes else _NOTHING

    @property
    def limit(self) -> int:
        """Most tokens of a rollout."""
        return self.request.sampling.max_new_tokens


_Row = tuple[_Group, int]
"""One rollout: a group and the place in it."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """The rows that are being sampled. Immutable; only the cache grows in place."""

    cache: DynamicCache
    oldest_version: int
    """Version of the weights that computed the cache."""
    padding_R: Tensor
    """Columns of the cache before a row's first token."""
    padded: bool
    slots_R: Tensor
    lengths_R: Tensor
    """Tokens of the rollout so far."""
    limits_R: Tensor
    minimums_R: Tensor
    temperature_R: Tensor
    top_p_R: Tensor
    newest_R: Tensor
    """The token that is fed next; meaningless before the first is sampled."""
    logits_RV: Tensor
    versions_R: Tensor
    """Version of the weights that gave the logits."""
    cuts: bool
    """Some row has a nucleus below 1."""
    has_minimums: bool
    """Some row has a minimum length."""

    def select(self, kept: Tensor) -> _Batch:
        """These rows only, without the columns that only others needed, and without logits."""
        _change(self.cache, lambda tensor: tensor[kept])
        chosen = {name: value[kept] for name, value in vars(self).items() if name.endswith("_R")}
        return replace(self, logits_RV=self.logits_RV[:0], **chosen)._trimmed()

    def joined(self, other: _Batch) -> _Batch:
        """Both, side by side."""
        width = max(self.width, other.width)
        both: dict[str, Any] = {
            name: torch.cat([value, getattr(other, name)])
            for name, value in vars(self).items()
            if name.endswith(("_R", "_RV"))
        }
        both["padding_R"] = torch.cat([each.padding_R + (width - each.width) for each in (self, other)])
        for ours, theirs in zip(_layers(self.cache), _layers(other.cache), strict=True):
            ours.keys = torch.cat([_widened(ours.keys, width), _widened(theirs.keys, width)])
            ours.values = torch.cat([_widened(ours.values, width), _widened(theirs.values, width)])
        return replace(
            self,
            oldest_version=min(self.oldest_version, other.oldest_version),
            cuts=self.cuts or other.cuts,
            has_minimums=self.has_minimums or other.has_minimums,
            **both,
        )._trimmed()

    @property
    def width(self) -> int:
        """Columns of the cache."""
        return int(_layers(self.cache)[0].keys.shape[-2])

    def _trimmed(self) -> _Batch:
        least, most = (int(value) for value in torch.aminmax(self.padding_R))
        if least:
            _change(self.cache, lambda tensor: tensor[..., least:, :])
        return replace(self, padding_R=self.padding_R - least, padded=most > least)


def _layers(cache: DynamicCache) -> list[Any]:
    """Each with `keys` and `values` [R, heads, L, head size]: a pass has filled them."""
    return cache.layers


def _change(cache: DynamicCache, change: Callable[[Tensor], Tensor]) -> None:
    for layer in _layers(cache):
        layer.keys, layer.values = change(layer.keys), change(layer.values)


def _widened(tensor: Tensor, width: int) -> Tensor:
    return pad(tensor, (0, 0, width - tensor.shape[-2], 0))


class ContinuousBatch(Generation):
    """A generation of the transformers engine; it works only inside `wait`, on the caller's thread."""

    def __init__(
        self,
        policy: Policy,
        forward: Forward,
        *,
        device: torch.device,
        exact: bool,
        max_rows: int,
        max_batch_tokens: int,
        greedy: bool,
    ) -> None:
        self._policy = policy
        self._forward = forward
        self._device = device
        self._ends_E = torch.tensor(policy.end_token_ids, device=device)
        self._exact = exact
        """Compute the caches anew when the weights have changed."""
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._greedy = greedy
        self._tickets = 0
        self.sampled = 0
        self._in_flight = 0
        self._closed = False
        self._queue: deque[_Row] = deque()
        self._running: dict[int, _Row] = {}
        """By slot."""
        self._free = list(range(max_rows))
        """Slots."""
        self._batch: _Batch | None = None
        self._complete: list[_Group] = []

        def results(dtype: torch.dtype) -> Tensor:
            return torch.zeros((max_rows, 0), dtype=dtype, device=device)

        self._tokens_ST, self._versions_ST = results(torch.int64), results(torch.int64)
        self._logprobs_ST, self._uniforms_ST = results(torch.float32), results(torch.float64)

    @property
    def in_flight(self) -> int:
        return 0 if self._closed else self._in_flight

    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        if self._closed:
            raise EngineError("this generation is closed; open another")
        for request in requests:
            check_request(request, self._policy.vocab_size, self._policy.max_positions)
        first = self._tickets
        for request in requests:
            generator = torch.Generator().manual_seed(request.seed)  # on the CPU: every device draws the same
            shape = (request.n, request.sampling.max_new_tokens)
            draws_NT = torch.rand(shape, generator=generator, dtype=torch.float64)
            group = _Group(self._tickets, request, draws_NT)
            self._tickets += 1
            self._in_flight += request.n
            self._queue.extend(
                (group, place) for place in range(request.n) if not self._is_complete(group, place)
            )
        return list(range(first, self._tickets))

    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        limit = None if tokens is None else self.sampled + tokens
        with torch.inference_mode():
            while self.in_flight and not self._complete and (limit is None or self.sampled < limit):
                self._feed()
                self._admit()
                self._sample()
        complete, self._complete = sorted(self._complete, key=lambda group: group.ticket), []
        return [(each.ticket, [each.rollouts[place] for place in range(each.request.n)]) for each in complete]

    def close(self) -> None:
        self._closed = True

    # --- rows come -----------------------------------------------------------------------------------------

    def _is_complete(self, group: _Group, place: int) -> bool:
        """Whether the prefix is a whole rollout; it then is one."""
        prefix = group.prefix(place)
        ended = prefix.token_ids[-1:] and prefix.token_ids[-1] in self._policy.end_token_ids
        if len(prefix.token_ids) < group.limit and not ended:
            return False
        self._end((group, place), prefix.token_ids, prefix.logprobs, prefix.versions)
        return True

    def _admit(self) -> None:
        """Let waiting rows in, where there are slots for enough of them."""
        count = min(len(self._free), len(self._queue))
        if not count or (count < len(self._queue) and self._batch and count < self._max_rows // JOIN_SHARE):
            return
        rows = [self._queue.popleft() for _ in range(count)]
        slots = self._free[-count:]
        del self._free[-count:]
        self._running.update(zip(slots, rows, strict=True))
        self._reserve(max(group.limit for group, _ in rows))
        columns, taken = self._uniforms_ST.shape[1], torch.tensor(slots)
        self._uniforms_ST[taken] = torch.cat(
            [
                pad(group.uniforms_NT[[place for _, place in one]], (0, columns - group.limit))
                for group, one in groupby(rows, key=itemgetter(0))
            ]
        ).to(self._device)
        begun: list[tuple[int, tuple[int, ...]]] = []
        for slot, (group, place) in zip(slots, rows, strict=True):
            prefix = group.prefix(place)
            begun.append((slot, prefix.token_ids))
            if length := len(prefix.token_ids):
                self._tokens_ST[slot, :length] = torch.tensor(prefix.token_ids)
                self._logprobs_ST[slot, :length] = torch.tensor(prefix.logprobs)
                self._versions_ST[slot, :length] = torch.tensor(prefix.versions)
        self._prefill(begun)

    def _reserve(self, columns: int) -> None:
        missing = columns - self._tokens_ST.shape[1]
        if missing > 0:
            more = (0, missing)
            self._tokens_ST, self._versions_ST = pad(self._tokens_ST, more), pad(self._versions_ST, more)
            self._logprobs_ST, self._uniforms_ST = pad(self._logprobs_ST, more), pad(self._uniforms_ST, more)

    def _prefill(self, rows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Rows by slot, each with the tokens it has, into the batch: prompt and tokens are computed, equal
        ones once."""
        slots_of: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for slot, ids in rows:
            whole = self._running[slot][0].request.prompt_ids + ids
            slots_of.setdefault(whole, []).append((slot, len(ids)))
        wholes: list[tuple[int, ...]] = []
        for whole in sorted(slots_of, key=len):
            if wholes and (len(wholes) + 1) * len(whole) > self._max_batch_tokens:
                self._prefill_pass(wholes, slots_of)
                wholes = []
            wholes.append(whole)
        self._prefill_pass(wholes, slots_of)

    def _prefill_pass(
        self, wholes: Sequence[tuple[int, ...]], slots_of: Mapping[tuple[int, ...], Sequence[tuple[int, int]]]
    ) -> None:
        ids_PL, mask_PL = left_padded(wholes, self._policy.pad_token_id, self._device)
        padded = len(wholes[0]) < len(wholes[-1])
        cache = DynamicCache()  # without the config: whole rows, sliding windows are left to the mask
        logits_PV, version = self._forward(
            ids_PL, mask_PL if padded else None, (mask_PL.cumsum(-1) - 1).clamp_(min=0), cache, None
        )
        rows = [(place, slot, done) for place, whole in enumerate(wholes) for slot, done in slots_of[whole]]
        prompts_R, slots_R, lengths_R = torch.tensor(rows, device=self._device).unbind(-1)
        _change(cache, lambda tensor: tensor[prompts_R])
        requests = [self._running[slot][0].request for _, slot, _ in rows]

        def per_row(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=self._device)

        batch = _Batch(
            cache=cache,
            oldest_version=version,
            padding_R=(ids_PL.shape[1] - mask_PL.sum(-1))[prompts_R],
            padded=padded,
            slots_R=slots_R,
            lengths_R=lengths_R,
            limits_R=per_row([request.sampling.max_new_tokens for request in requests]),
            minimums_R=per_row([request.min_new_tokens for request in requests]),
            temperature_R=per_row([request.sampling.temperature for request in requests]),
            top_p_R=per_row([request.sampling.top_p for request in requests]),
            newest_R=torch.zeros_like(slots_R),
            logits_RV=logits_PV[prompts_R],
            versions_R=torch.full_like(slots_R, version),
            cuts=any(request.sampling.top_p < 1 for request in requests),
            has_minimums=any(request.min_new_tokens for request in requests),
        )
        self._batch = batch if self._batch is None else self._batch.joined(batch)

    # --- tokens come ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """The newest token of every row through the model."""
        batch = self._batch
        if batch is None:
            return
        width = batch.width
        positions_R = width - batch.padding_R
        columns_L = torch.arange(width + 1, device=self._device)
        try:
            logits_RV, version = self._forward(
                batch.newest_R[:, None],
                (columns_L >= batch.padding_R[:, None]).long() if batch.padded else None,
                positions_R[:, None],
                batch.cache,
                batch.oldest_version if self._exact else None,
            )
        except WeightsChanged:
            self._batch = None
            tokens = self._tokens_ST.tolist()
            lengths = batch.lengths_R.tolist()
            self._prefill(
                [
                    (slot, tuple(tokens[slot][:length]))
                    for slot, length in zip(batch.slots_R.tolist(), lengths, strict=True)
                ]
            )
        else:
            versions_R = torch.full_like(batch.slots_R, version)
            self._batch = replace(batch, logits_RV=logits_RV, versions_R=versions_R)

    def _sample(self) -> None:
        """One token for every row; those that end leave."""
        batch = self._batch
        if batch is None:
            return
        if batch.has_minimums:
            early_R = batch.lengths_R < batch.minimums_R
            batch.logits_RV[early_R.nonzero(), self._ends_E] = -torch.inf
        place = (batch.slots_R, batch.lengths_R)
        tokens_R, logprobs_R = sample_tokens(
            batch.logits_RV,
            self._uniforms_ST[place],
            batch.temperature_R,
            batch.top_p_R if batch.cuts else None,
            greedy=self._greedy,
        )
        if bool(logprobs_R.isnan().any()):
            raise BrokenWeightsError(int(batch.versions_R.max()))
        self._tokens_ST[place], self._logprobs_ST[place] = tokens_R, logprobs_R
        self._versions_ST[place] = batch.versions_R
        self.sampled += tokens_R.shape[0]
        batch = replace(batch, newest_R=tokens_R, lengths_R=batch.lengths_R + 1)
        ended_R = torch.isin(tokens_R, self._ends_E) | (batch.lengths_R >= batch.limits_R)
        ended = ended_R.nonzero().squeeze(-1)
        if not ended.shape[0]:
            self._batch = batch
            return
        self._collect(batch.slots_R[ended], batch.lengths_R[ended])
        alive = (~ended_R).nonzero().squeeze(-1)
        self._batch = batch.select(alive) if alive.shape[0] else None

    def _collect(self, slots_E: Tensor, lengths_E: Tensor) -> None:
        """Rows that have ended, out of the result arrays."""
        tokens = self._tokens_ST[slots_E].cpu().numpy()
        logprobs = self._logprobs_ST[slots_E].cpu().numpy()
        versions = self._versions_ST[slots_E].cpu().numpy()
        for place, (slot, length) in enumerate(zip(slots_E.tolist(), lengths_E.tolist(), strict=True)):
            self._free.append(slot)
            cut = (place, slice(length))
            self._end(self._running.pop(slot), tokens[cut], logprobs[cut], versions[cut])

    def _end(self, row: _Row, token_ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike) -> None:
        group, place = row
        seed = group.request.seed
        group.rollouts[place] = finished_rollout(self._policy, seed, token_ids, logprobs, versions)
        self._in_flight -= 1
        if len(group.rollouts) == group.request.n:
            self._complete.append(group)


def left_padded(
    sequences: Sequence[tuple[int, ...]], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both [P, L], the last token of every sequence in the last column."""
    width = max(len(sequence) for sequence in sequences)
    ids_PL = np.full((len(sequences), width), pad_token_id, dtype=np.int64)
    mask_PL = np.zeros((len(sequences), width), dtype=np.int64)
    for place, sequence in enumerate(sequences):
        ids_PL[place, width - len(sequence) :] = sequence
        mask_PL[place, width - len(sequence) :] = 1
    return torch.from_numpy(ids_PL).to(device), torch.from_numpy(mask_PL).to(device)
