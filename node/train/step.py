"""The trainer: one optimiser step from one batch, or no change at all.

For: forward and backward over micro-batches whose gradients add up to that of the whole batch, AdamW with a
clipped norm, and the numbers that describe the step. If loss or gradient norm is not finite, parameters and
optimiser stay byte-identical and the step counts as skipped. What learns is all weights, or an adapter on
frozen ones. A GPU that runs out of memory in a step gets smaller micro-batches. Log-probabilities are taken
at each rollout's temperature, as sampling did; one log-softmax serves loss and entropy. Not for: choosing
groups, advantages or weights (`batch.py` has them all in one factor). Blocking; runs on one worker thread.
Letters: see `batch.py`; V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.events import SourceShare
from node.rollout.adapter import adapter_state, adapter_tensors, wrap
from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.batch import TrainingBatch
from node.train.groups import OWN_SOURCE
from node.train.objectives import LossInputs, TokenLoss
from node.train.settings import TrainSettings, Treatment
from protocol.errors import ConfigError, ModelError, OurFault

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["OutOfMemoryError", "StepReport", "Trainer"]

log = logging.getLogger(__name__)
Result = TypeVar("Result")
REMEDY = "set policy.tuning to 'lora' or policy.sharing to 'sequential', or choose a smaller policy"


@dataclass(frozen=True, eq=False)
class StepReport:
    """trainer -> events. `policy_version` is the version the trainer has now."""

    policy_version: int
    skipped: bool
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    """Mean entropy of the distribution on own tokens, nats; 0 without own tokens."""
    kl_start: float
    """k3 estimate of KL(current || start) on own tokens, nats per token."""
    tokens: int
    sources: tuple[SourceShare, ...]
    logprobs_BT: Tensor
    """log pi of the batch's completions before the step, on the CPU; meaningless where masked."""
    train_s: float


class OutOfMemoryError(OurFault):
    """The device has too little memory for the trainer's weights and moments, or for one rollout at a
    time."""


@dataclass(frozen=True, eq=False)
class _RowSums:
    """Per row of the batch: sums over its tokens, detached."""

    loss_B: Tensor
    kept_B: Tensor
    weight_B: Tensor
    weight_squared_B: Tensor
    gap_B: Tensor
    entropy_B: Tensor
    kl_start_B: Tensor

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> _RowSums:
        return cls(*(torch.zeros(count, device=device) for _ in range(7)))


class Trainer:
    """Owns the weights that learn, their optimiser and what they started from."""

    def __init__(self, policy: Policy, settings: TrainSettings, *, policy_version: int = 0) -> None:
        self.policy = policy
        self.settings = settings
        self.policy_version = policy_version
        self.skipped_steps = 0
        self.micro_batch_tokens = settings.micro_batch_tokens
        """Halved whenever the device runs out of memory, until the process ends: a fact of the machine and
        not of the training, so checkpoints do not hold it."""
        self.device = torch.device(settings.device)
        self._rest = torch.device("cpu") if settings.by_turns else self.device
        """Where the weights lie between two pieces of work."""
        self.model: PreTrainedModel | PeftModel = policy.load_model(self._rest, settings.dtype)
        self._start: PreTrainedModel | None = None
        if settings.adapter is not None:
            self.model = wrap(self.model, settings.adapter)
        elif settings.measure_start_kl:
            self._start = policy.load_model(self._rest, settings.dtype).requires_grad_(False)
        if settings.recompute:
            _recompute_layers(self.model)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = _optimiser(self._parameters, settings)
        self.updates = 0
        """Optimiser steps made since the optimiser was new; drives the warm-up."""
        self.steps = 0
        """Steps that this object has made and that changed the weights."""

    def step(self, batch: TrainingBatch) -> StepReport:
        """Train on `batch` once. Raises nothing for numbers that overflow: the report says `skipped`. Raises
        OutOfMemoryError, and then weights and optimiser are as before, unless it was the optimiser's own
        update that ran out: then some may have moved, and only a checkpoint is whole."""
        with self._on_device():
            return self._step(batch)

    def _step(self, batch: TrainingBatch) -> StepReport:
        began_s = time.perf_counter()
        loss, sums, logprobs_BT = self._in_memory(lambda: self._accumulate(batch), _lengths(batch))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm))
        learning_rate = self.learning_rate()
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if skipped:
            self.skipped_steps += 1
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate
            self.optimiser.step()
            self.updates += 1
            self.steps += 1
            self.policy_version += 1
        self.optimiser.zero_grad(set_to_none=True)
        own_tokens = max(int(batch.mask_BT[batch.own_B].sum()), 1)
        return StepReport(
            policy_version=self.policy_version,
            skipped=skipped,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=float(sums.entropy_B.sum()) / own_tokens,
            kl_start=float(sums.kl_start_B.sum()) / own_tokens,
            tokens=int(batch.mask_BT.sum()),
            sources=_source_shares(batch, sums),
            logprobs_BT=logprobs_BT,
            train_s=time.perf_counter() - began_s,
        )

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        warmup = self.settings.warmup_steps
        return self.settings.learning_rate * (min(1.0, (self.updates + 1) / warmup) if warmup else 1.0)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of what learns, for `Engine.update`: the weights by name, or the adapter (`adapter_state`).
        Later steps do not change it."""
        if self.settings.adapter is not None:
            return adapter_state(self.model)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def learning(self) -> dict[str, Tensor]:
        """What learns, itself, by the names it is saved and published under; tied weights under one."""
        if self.settings.adapter is not None:
            return adapter_tensors(self.model)
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def take(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        """Go on as this version, with exactly these weights and the moments as they are. Raises ModelError
        for other names or shapes, and then changes nothing."""
        learning = self.learning()
        # Tied weights are published under each of their names, and learn under one.
        if any(name not in state or state[name].shape != tensor.shape for name, tensor in learning.items()):
            raise ModelError(
                f"version {policy_version} holds tensors of other names or shapes than {self.policy.path}"
            )
        for name, tensor in learning.items():
            tensor.copy_(state[name])
        self.policy_version = policy_version

    def adopt(self, state: Mapping[str, Tensor], policy_version: int) -> None:
        """Go on as this version, with exactly these weights, which this training did not lead to: the moments
        say nothing of them, so the optimiser is as new and the warm-up begins again. Raises ModelError as
        `take`."""
        self.take(state, policy_version)
        self.optimiser.state.clear()
        self.updates = 0

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """As `Engine.logprobs`, from the weights that learn: the reference an engine is held against. Raises
        OutOfMemoryError."""
        lengths = [len(sequence.prompt_ids) + len(sequence.token_ids) for sequence in sequences]
        with self._on_device(), torch.no_grad():
            return self._in_memory(lambda: self._logprobs(sequences, lengths), lengths)

    def _logprobs(
        self, sequences: Sequence[TokenSequence], lengths: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        results: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
        for places in _packed(lengths, self.micro_batch_tokens):
            chosen = [sequences[place] for place in places]
            tokens_BL = torch.zeros(len(places), max(lengths[place] for place in places), dtype=torch.int64)
            for row, sequence in enumerate(chosen):
                whole = sequence.prompt_ids + sequence.token_ids
                tokens_BL[row, : len(whole)] = torch.tensor(whole)
            tokens_BL = tokens_BL.to(self.device)
            starts_B = torch.tensor([len(sequence.prompt_ids) for sequence in chosen], device=self.device)
            temperature_B = torch.tensor([sequence.temperature for sequence in chosen], device=self.device)
            width_T = max(len(sequence.token_ids) for sequence in chosen)
            targets_BT = tokens_BL.gather(1, _positions(starts_B, width_T).clamp_(max=tokens_BL.shape[1] - 1))
            logprobs_BKV, places_BT = _completion_logprobs(
                self.model, tokens_BL, starts_B, temperature_B, width_T
            )
            logprobs_BT = _of_targets(logprobs_BKV, places_BT, targets_BT).cpu().numpy()
            for place, sequence, row_T in zip(places, chosen, logprobs_BT, strict=True):
                results[place] = row_T[: len(sequence.token_ids)].copy()
        return results

    def _in_memory(self, passes: Callable[[], Result], lengths: Sequence[int]) -> Result:
        """`passes` over rows of these lengths, anew with half the tokens at a time when the device runs out
        of memory."""
        while True:
            try:
                return passes()
            except torch.OutOfMemoryError as error:
                self.optimiser.zero_grad(set_to_none=True)
                self._halve(lengths, error)
            # Out of the handler nothing holds the tensors of the failed pass any more.
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _halve(self, lengths: Sequence[int], error: torch.OutOfMemoryError) -> None:
        packed = list(_packed(lengths, self.micro_batch_tokens))
        if max(len(rows) for rows in packed) == 1:
            raise OutOfMemoryError(
                f"{self.device} has no memory for a pass over one rollout of {max(lengths)} tokens; {REMEDY}"
            ) from error
        largest = max(len(rows) * max(lengths[row] for row in rows) for rows in packed)
        self.micro_batch_tokens = min(self.micro_batch_tokens, largest) // 2
        log.warning("out of memory; training goes on with %d tokens at a time", self.micro_batch_tokens)

    def _accumulate(self, batch: TrainingBatch) -> tuple[float, _RowSums, Tensor]:
        """Gradients of the whole batch in `.grad`, its loss, what each row contributed, and log pi."""
        sums = _RowSums.zeros(len(batch.treatments), self.device)
        kept_BT = torch.zeros(batch.targets_BT.shape)
        total = torch.zeros((), device=self.device)
        for rows in _micro_batches(batch, self.micro_batch_tokens):
            loss = self._micro_loss(batch, rows, sums, kept_BT)
            torch.autograd.backward(loss)
            total += loss.detach()
        return float(total), sums, kept_BT

    def _micro_loss(self, batch: TrainingBatch, rows: Tensor, sums: _RowSums, kept_BT: Tensor) -> Tensor:
        width_L = int((batch.starts_B[rows] + batch.mask_BT[rows].sum(-1)).max())
        width_T = int(batch.mask_BT[rows].sum(-1).max())

        def take(tensor: Tensor, width: int | None = None) -> Tensor:
            chosen = tensor[rows]
            return (chosen if width is None else chosen[:, :width]).to(self.device)

        tokens_BL, starts_B = take(batch.tokens_BL, width_L), take(batch.starts_B)
        targets_BT, mask_BT = take(batch.targets_BT, width_T), take(batch.mask_BT, width_T)
        temperature_B = take(batch.temperature_B)
        logprobs_BKV, places_BT = _completion_logprobs(
            self.model, tokens_BL, starts_B, temperature_B, width_T
        )
        logprobs_BT = _of_targets(logprobs_BKV, places_BT, targets_BT)
        kept_BT[rows, :width_T] = logprobs_BT.detach().cpu()

        stored_BT = take(batch.ingestion_BT, width_T)
        first_use_B = stored_BT[:, 0].isnan()
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            ingestion_BT=torch.where(first_use_B[:, None], logprobs_BT.detach(), stored_BT),
            behaviour_BT=take(batch.behaviour_BT, width_T),
            behaviour_sum_B=take(batch.behaviour_sum_B),
            mask_BT=mask_BT,
            advantages_B=take(batch.advantages_B),
            uses_B=take(batch.uses_B),
            own_mean_logprobs_N=batch.own_mean_logprobs_N.to(self.device),
        )
        scale_B = take(batch.scale_B)
        loss = torch.zeros((), device=self.device)
        row_list = rows.tolist()
        for treatment in dict.fromkeys(batch.treatments[row] for row in row_list):
            chosen = torch.tensor(
                [place for place, row in enumerate(row_list) if batch.treatments[row] is treatment],
                device=self.device,
            )
            result = self._objective_loss(treatment, inputs.rows(chosen))
            scaled_BT = result.loss_BT * scale_B[chosen, None]
            loss = loss + scaled_BT.sum()
            _add_rows(sums, rows[chosen.cpu()].to(self.device), result, scaled_BT.detach())
        own = batch.own_B[rows].nonzero().squeeze(-1)
        if own.numel():
            own_rows, own = rows[own].to(self.device), own.to(self.device)
            self._measure_entropy(own_rows, own, logprobs_BKV, places_BT, mask_BT, sums)
            if self.settings.measure_start_kl:
                self._measure_start_kl(
                    own_rows,
                    tokens_BL[own],
                    starts_B[own],
                    temperature_B[own],
                    targets_BT[own],
                    mask_BT[own],
                    logprobs_BT[own],
                    sums,
                )
        return loss

    def _objective_loss(self, treatment: Treatment, inputs: LossInputs) -> TokenLoss:
        return self.settings.objective(treatment)(inputs)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """For work on the weights. By turns with the engine, they come from RAM and go back there. Raises
        OutOfMemoryError."""
        by_turns = self._rest != self.device
        try:
            if by_turns:
                self._move(self.device)
            yield
        except torch.OutOfMemoryError as error:
            self.optimiser.zero_grad(set_to_none=True)
            raise OutOfMemoryError(
                f"{self.device} has no memory for the trainer's weights and moments; {REMEDY}"
            ) from error
        finally:
            if by_turns:
                self._move(self._rest)
                torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        if self._start is not None:
            self._start.to(device)
        for entries in self.optimiser.state.values():
            for field, value in entries.items():
                if isinstance(value, Tensor):
                    entries[field] = value.to(device)

    @contextlib.contextmanager
    def _start_model(self) -> Iterator[torch.nn.Module]:
        """The policy as it was before the first step."""
        if self._start is not None:
            yield self._start
        else:
            with self.model.disable_adapter():
                yield self.model

    @torch.no_grad()
    def _measure_entropy(
        self,
        own_rows: Tensor,
        own: Tensor,
        logprobs_BKV: Tensor,
        places_BT: Tensor,
        mask_BT: Tensor,
        sums: _RowSums,
    ) -> None:
        for row, place in zip(own_rows.tolist(), own.tolist(), strict=True):  # all at once are two copies
            entropy_K = -(logprobs_BKV[place].exp() * logprobs_BKV[place]).sum(-1)
            sums.entropy_B[row] = torch.where(mask_BT[place], entropy_K[places_BT[place]], 0.0).sum()

    @torch.no_grad()
    def _measure_start_kl(
        self,
        own_rows: Tensor,
        tokens_BL: Tensor,
        starts_B: Tensor,
        temperature_B: Tensor,
        targets_BT: Tensor,
        mask_BT: Tensor,
        logprobs_BT: Tensor,
        sums: _RowSums,
    ) -> None:
        with self._start_model() as start:
            start_BKV, places_BT = _completion_logprobs(
                start, tokens_BL, starts_B, temperature_B, targets_BT.shape[1]
            )
        delta_BT = _of_targets(start_BKV, places_BT, targets_BT) - logprobs_BT
        k3_BT = delta_BT.clamp(-20.0, 20.0).exp() - 1.0 - delta_BT
        sums.kl_start_B[own_rows] = torch.where(mask_BT, k3_BT, 0.0).sum(-1)


def _optimiser(parameters: list[torch.nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """Raises ConfigError when bitsandbytes is asked for and cannot be used."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimiser == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **options)
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or its library does not load
        raise ConfigError(
            f"train.optimiser is 'adamw_8bit' and bitsandbytes cannot be used ({error}); pip install "
            "'murmuration[eight-bit]', or set it to 'adamw'"
        ) from None
    optimiser: torch.optim.Optimizer = AdamW8bit(parameters, **options)
    return optimiser


def _recompute_layers(model: PreTrainedModel | PeftModel) -> None:
    """Keep only the inputs of each layer for the way back and compute the rest anew. The library does so only
    in training mode; just the layers get it, so that what is inside them stays without dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _completion_logprobs(
    model: torch.nn.Module, tokens_BL: Tensor, starts_B: Tensor, temperature_B: Tensor, width_T: int
) -> tuple[Tensor, Tensor]:
    """log pi over the K positions that can predict a completion token, and where each token's prediction
    lies.

    Right padding needs no attention mask: a causal model cannot look at what comes later. Nothing here is
    given a name that need not live: these tensors are the largest of a step.
    """
    shortest = int(starts_B.min())
    kept_K = tokens_BL.shape[1] - shortest
    logprobs_BKV = torch.log_softmax(
        model(input_ids=tokens_BL, use_cache=False, logits_to_keep=kept_K + 1).logits[:, :-1].float()
        / temperature_B[:, None, None],
        dim=-1,
    )
    return logprobs_BKV, _places(starts_B, shortest, width_T, kept_K)


def _places(starts_B: Tensor, shortest: int, width_T: int, kept_K: int) -> Tensor:
    return _positions(starts_B - shortest, width_T).clamp_(max=kept_K - 1)


def _positions(starts_B: Tensor, width_T: int) -> Tensor:
    return starts_B[:, None] + torch.arange(width_T, device=starts_B.device)


def _of_targets(logprobs_BKV: Tensor, places_BT: Tensor, targets_BT: Tensor) -> Tensor:
    rows_BT = torch.arange(places_BT.shape[0], device=places_BT.device)[:, None]
    return logprobs_BKV[rows_BT, places_BT, targets_BT]


def _micro_batches(batch: TrainingBatch, budget_tokens: int) -> Iterator[Tensor]:
    return (torch.tensor(rows) for rows in _packed(_lengths(batch), budget_tokens))


def _lengths(batch: TrainingBatch) -> list[int]:
    """Tokens of each row, prompt included."""
    lengths: list[int] = (batch.starts_B + batch.mask_BT.sum(-1)).tolist()
    return lengths


def _packed(lengths: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Row indexes, long rows together, with at most `budget_tokens` padded tokens (at least one row)."""
    chosen: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        if chosen and (len(chosen) + 1) * lengths[chosen[0]] > budget_tokens:
            yield sorted(chosen)
            chosen = []
        chosen.append(row)
    if chosen:
        yield sorted(chosen)


@torch.no_grad()
def _add_rows(sums: _RowSums, rows: Tensor, result: TokenLoss, scaled_BT: Tensor) -> None:
    sums.loss_B[rows] = scaled_BT.sum(-1)
    sums.kept_B[rows] = result.kept_BT.float().sum(-1)
    sums.weight_B[rows] = result.weights_BT.sum(-1)
    sums.weight_squared_B[rows] = (result.weights_BT**2).sum(-1)
    sums.gap_B[rows] = result.log_ratio_BT.abs().sum(-1)


def _source_shares(batch: TrainingBatch, sums: _RowSums) -> tuple[SourceShare, ...]:
    tokens_B = batch.mask_BT.sum(-1)
    advantages_B = batch.advantages_B.abs()
    shares = []
    for place, (source, weight) in enumerate(zip(batch.sources, batch.lambda_S, strict=True)):
        groups = [group for group in batch.groups if group.source == source]
        rows = batch.source_B == place
        on_device = rows.to(sums.loss_B.device)
        tokens = int(tokens_B[rows].sum())
        weight_sum = float(sums.weight_B[on_device].sum())
        weight_squared = float(sums.weight_squared_B[on_device].sum())
        trust = 1.0 if source == OWN_SOURCE else sum(group.trust for group in groups) / len(groups)
        shares.append(
            SourceShare(
                source=source,
                groups=len(groups),
                tokens=tokens,
                weight=weight * trust,
                loss=float(sums.loss_B[on_device].sum()),
                kept=float(sums.kept_B[on_device].sum()) / tokens,
                ess=weight_sum**2 / (tokens * weight_squared) if weight_squared > 0 else 0.0,
                advantage_abs=float(advantages_B[rows].mean()),
                gap=float(sums.gap_B[on_device].sum()) / tokens,
            )
        )
    return tuple(shares)
