"""The trainer: one step from one batch, or no change at all.

For: forward and backward over micro-batches whose gradients add up to that of the whole batch, AdamW with a
clipped norm, and the numbers that describe the step (`metrics.py`). A step is one update of the optimiser, or
several that are one version (`slow_fast.py`), and may be shorter for rollouts of unlike weight
(`ess_scaling.py`). If loss or gradient norm is not finite, parameters and optimiser stay byte-identical and
the step counts as skipped, as it does if no row has a finite advantage. An objective with statistics over the
batch gets them from a pass without gradient if there is more than one micro-batch. What learns is all
weights, or an adapter on frozen ones. A GPU that runs out of memory in a step gets smaller micro-batches.
Log-probabilities are taken at each rollout's temperature, as sampling did. Not for: choosing groups,
advantages or weights (`node/weight`, `scales.py`). Blocking; runs on one worker thread. Letters:
see `node/weight/batch.py`; V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.events import Gaps, SourceShare
from node.rollout.adapter import adapter_state, adapter_tensors, wrap
from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.claims import bounded_claims
from node.train.ess_scaling import ess_share, rate_factor, sequence_log_weights
from node.train.forward import completion_logprobs, packed
from node.train.metrics import RowSums, by_kind, by_source, gaps
from node.train.objectives import LossInputs, Plan
from node.train.objectives.ratio import MAX_LOG_RATIO
from node.train.scales import loss_scales
from node.train.settings import TrainSettings
from node.train.slow_fast import SlowFast
from node.train.stability import RollBack
from node.weight.batch import TrainingBatch
from node.weight.settings import Treatment
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
    """trainer -> events. `policy_version` is the version that the step made; without one, as before."""

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
    nonfinite: int = 0
    """Rows that were left out because their advantage is no finite number."""
    kinds: tuple[SourceShare, ...] = ()
    ess: float = 1.0
    """Of own completions, as a share (`ess_scaling.py`)."""
    gaps: Gaps | None = None
    kl_step: float | None = None
    """k3 estimate of KL(before || after) on own rollouts, nats per token; None: not measured."""
    rolled_back: RollBack | None = None
    """What was done about a bad step (`supervisor.py`)."""


class OutOfMemoryError(OurFault):
    """The device has too little memory for the trainer's weights and moments, or for one rollout at a
    time."""


@dataclass(frozen=True, eq=False)
class _Forward:
    """One pass over some rows."""

    tokens_BL: Tensor
    starts_B: Tensor
    mask_BT: Tensor
    temperature_B: Tensor
    logprobs_BT: Tensor
    entropy_BT: Tensor


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
        """Steps that this object has made and that changed the weights, but for those taken back."""
        self.slow_fast = SlowFast() if settings.slow_fast else None

    def step(self, batch: TrainingBatch) -> StepReport:
        """Train on `batch` once. Raises nothing for numbers that overflow: the report says `skipped`. Raises
        OutOfMemoryError, and then weights and optimiser are as before, unless it was the optimiser's own
        update that ran out: then some may have moved, and only a checkpoint is whole."""
        with self._on_device():
            passes = self._passes(batch)
        first, moved = passes[0], [each for each in passes if not each.skipped]
        if moved:
            self.steps += 1
            self.policy_version += 1
        else:
            self.skipped_steps += 1
        return replace(
            first,
            policy_version=self.policy_version,
            grad_norm=max(each.grad_norm for each in moved) if moved else first.grad_norm,
            train_s=sum(each.train_s for each in passes),
        )

    def _passes(self, batch: TrainingBatch) -> list[StepReport]:
        """Of one step: one update of the optimiser, or several."""
        if self.slow_fast is None:
            return [self._pass(batch)]

        def once() -> StepReport:
            nonlocal batch
            report = self._pass(batch)
            batch = batch.ingested(report.logprobs_BT)  # later passes are measured from where the step began
            return report

        passes = self.slow_fast.step(self.learning(), once)
        moved = [each for each in passes if not each.skipped]
        if moved:
            self.slow_fast.observe(moved[-1].entropy)
        return passes

    def _pass(self, batch: TrainingBatch) -> StepReport:
        """One update, or none. Leaves the version to the step."""
        began_s = time.perf_counter()
        loss, sums, logprobs_BT = self._in_memory(lambda: self.accumulate(batch), _lengths(batch))
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm))
        own_B = batch.own_B  # no claim of a peer shrinks a step, or has it taken back
        ess = ess_share(
            sequence_log_weights(logprobs_BT[own_B], batch.behaviour_BT[own_B], batch.mask_BT[own_B])
        )
        learning_rate = self.learning_rate() * (rate_factor(ess) if self.settings.ess_scaling else 1.0)
        nonfinite = int((~batch.advantages_B.isfinite()).sum())
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        skipped = not finite or nonfinite == len(batch.advantages_B)
        if not skipped:
            for group in self.optimiser.param_groups:
                group["lr"] = learning_rate
            self.optimiser.step()
            self.updates += 1
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
            sources=by_source(batch, sums, self.policy_version),
            kinds=by_kind(batch, sums, self.policy_version),
            logprobs_BT=logprobs_BT,
            train_s=time.perf_counter() - began_s,
            nonfinite=nonfinite,
            ess=ess,
            gaps=gaps(batch, logprobs_BT),
        )

    @property
    def adapted(self) -> PeftModel:
        """The model, where an adapter is trained."""
        return cast("PeftModel", self.model)

    def learning_rate(self) -> float:
        """Learning rate of the next update, before it is scaled."""
        warmup = self.settings.warmup_steps
        return self.settings.learning_rate * (min(1.0, (self.updates + 1) / warmup) if warmup else 1.0)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of what learns, for `Engine.update`: the weights by name, or the adapter (`adapter_state`).
        Later steps do not change it."""
        if self.settings.adapter is not None:
            return adapter_state(self.adapted)
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def learning(self) -> dict[str, Tensor]:
        """What learns, itself, by the names it is saved and published under; tied weights under one."""
        if self.settings.adapter is not None:
            return adapter_tensors(self.adapted)
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

    def without_gradient(self, sequences: Sequence[TokenSequence]) -> list[str]:
        """Names of what learns and has no gradient by any token of these few sequences, or but zeros (with an
        adapter those are right: one half of it begins at zero). Changes nothing. Raises ModelError for
        gradients that are no numbers, OutOfMemoryError."""
        parameters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        with self._on_device(), torch.enable_grad():
            try:
                torch.autograd.backward(self._scored(sequences).sum())
                zeros_count = self.settings.adapter is not None
                idle = [
                    name
                    for name, parameter in parameters.items()
                    if parameter.grad is None or not (zeros_count or bool(parameter.grad.any()))
                ]
                for name, parameter in parameters.items():
                    if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                        raise ModelError(
                            f"{self.policy.path} cannot be trained in {self.settings.dtype}: the gradient of "
                            f"{name} is no number on a short answer; take another model"
                        )
            finally:
                self.optimiser.zero_grad(set_to_none=True)
        return idle

    def _logprobs(
        self, sequences: Sequence[TokenSequence], lengths: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        results: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
        for places in packed(lengths, self.micro_batch_tokens):
            rows = [sequences[place] for place in places]
            for place, sequence, row_T in zip(places, rows, self._scored(rows).cpu().numpy(), strict=True):
                results[place] = row_T[: len(sequence.token_ids)].copy()
        return results

    def _scored(self, rows: Sequence[TokenSequence]) -> Tensor:
        """log pi of their tokens, [B, T], in one pass."""
        wholes = [sequence.prompt_ids + sequence.token_ids for sequence in rows]
        tokens_BL = torch.zeros(len(rows), max(map(len, wholes)), dtype=torch.int64)
        for row, whole in enumerate(wholes):
            tokens_BL[row, : len(whole)] = torch.tensor(whole)
        tokens_BL = tokens_BL.to(self.device)
        starts_B = torch.tensor([len(sequence.prompt_ids) for sequence in rows], device=self.device)
        temperature_B = torch.tensor([sequence.temperature for sequence in rows], device=self.device)
        lengths_B = torch.tensor([len(sequence.token_ids) for sequence in rows], device=self.device)
        mask_BT = torch.arange(int(lengths_B.max()), device=self.device) < lengths_B[:, None]
        return completion_logprobs(self.model, tokens_BL, starts_B, mask_BT, temperature_B)[0]

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
        passes = list(packed(lengths, self.micro_batch_tokens))
        if max(len(rows) for rows in passes) == 1:
            raise OutOfMemoryError(
                f"{self.device} has no memory for a pass over one rollout of {max(lengths)} tokens; {REMEDY}"
            ) from error
        largest = max(len(rows) * max(lengths[row] for row in rows) for rows in passes)
        self.micro_batch_tokens = min(self.micro_batch_tokens, largest) // 2
        log.warning("out of memory; training goes on with %d tokens at a time", self.micro_batch_tokens)

    def accumulate(self, batch: TrainingBatch) -> tuple[float, RowSums, Tensor]:
        """Add the gradients of the whole batch to `.grad`. Its loss, what each row contributed, and log pi of
        its completions. Changes no weights."""
        sums = RowSums.zeros(len(batch.treatments), self.device)
        kept_BT = torch.zeros(batch.mask_BT.shape)
        total = torch.zeros((), device=self.device)
        scale_B = loss_scales(batch, self.settings)
        parts = list(_micro_batches(batch, self.micro_batch_tokens))
        plans = self._plans(batch) if len(parts) > 1 else {}
        for rows in parts:
            loss = self._micro_loss(batch, rows, scale_B[rows], sums, kept_BT, plans)
            torch.autograd.backward(loss)
            total += loss.detach()
        return float(total), sums.cpu(), kept_BT

    @torch.no_grad()
    def _plans(self, batch: TrainingBatch) -> dict[Treatment, Plan]:
        """For treatments whose objective must know all of its rows, from a pass without gradient."""
        plans = {}
        for treatment in dict.fromkeys(batch.treatments):
            objective = self.settings.objective(treatment)
            if not objective.whole_batch:
                continue
            rows = [row for row, each in enumerate(batch.treatments) if each is treatment]
            lengths = _lengths(batch)
            logprobs_BT = torch.zeros(len(rows), batch.mask_BT.shape[1], device=self.device)
            for places in packed([lengths[row] for row in rows], self.micro_batch_tokens):
                found_BT = self._forward(batch, torch.tensor([rows[place] for place in places])).logprobs_BT
                logprobs_BT[places, : found_BT.shape[1]] = found_BT
            plans[treatment] = objective.plan(self._inputs(batch, torch.tensor(rows), logprobs_BT))
        return plans

    def _forward(self, batch: TrainingBatch, rows: Tensor) -> _Forward:
        """log pi of some rows, as wide as the longest of them."""
        lengths_B = batch.mask_BT[rows].sum(-1)
        width_L, width_T = int((batch.starts_B[rows] + lengths_B).max()), int(lengths_B.max())
        tokens_BL, starts_B, mask_BT, temperature_B = (
            tensor.to(self.device)
            for tensor in (
                batch.tokens_BL[rows, :width_L],
                batch.starts_B[rows],
                batch.mask_BT[rows, :width_T],
                batch.temperature_B[rows],
            )
        )
        logprobs_BT, entropy_BT = completion_logprobs(self.model, tokens_BL, starts_B, mask_BT, temperature_B)
        return _Forward(tokens_BL, starts_B, mask_BT, temperature_B, logprobs_BT, entropy_BT)

    def _inputs(self, batch: TrainingBatch, rows: Tensor, logprobs_BT: Tensor) -> LossInputs:
        """What an objective is given of some rows, as wide as their log-probabilities."""

        def take(tensor: Tensor) -> Tensor:
            found = tensor[rows]
            return (found[:, : logprobs_BT.shape[1]] if found.dim() > 1 else found).to(self.device)

        stored_BT = take(batch.ingestion_BT)
        first_use_B = stored_BT[:, 0].isnan()
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            ingestion_BT=torch.where(first_use_B[:, None], logprobs_BT.detach(), stored_BT),
            behaviour_BT=take(batch.behaviour_BT),
            behaviour_sum_B=take(batch.behaviour_sum_B),
            mask_BT=take(batch.mask_BT),
            advantages_B=take(batch.advantages_B),
            uses_B=take(batch.uses_B),
            own_mean_logprobs_N=batch.own_mean_logprobs_N.to(self.device),
            own_tokens_N=batch.own_tokens_N.to(self.device),
            rewards_B=take(batch.rewards_B),
            lags_BT=take(batch.lags(self.policy_version)),
            source_B=take(batch.source_B),
            snapshot_BT=None if batch.snapshot_BT is None else take(batch.snapshot_BT),
            ewma_BT=None if batch.ewma_BT is None else take(batch.ewma_BT),
        )
        return bounded_claims(inputs, take(batch.own_B))

    def _micro_loss(
        self,
        batch: TrainingBatch,
        rows: Tensor,
        scale_B: Tensor,
        sums: RowSums,
        kept_BT: Tensor,
        plans: Mapping[Treatment, Plan],
    ) -> Tensor:
        part = self._forward(batch, rows)
        kept_BT[rows, : part.logprobs_BT.shape[1]] = part.logprobs_BT.detach().cpu()
        inputs = self._inputs(batch, rows, part.logprobs_BT)
        scale_B = scale_B.to(self.device)
        loss = torch.zeros((), device=self.device)
        row_list = rows.tolist()
        for treatment in dict.fromkeys(batch.treatments[row] for row in row_list):
            places = torch.tensor(
                [place for place, row in enumerate(row_list) if batch.treatments[row] is treatment],
                device=self.device,
            )
            result = self.settings.objective(treatment)(inputs.rows(places), plans.get(treatment))
            scaled_BT = result.loss_BT * scale_B[places, None]
            loss = loss + scaled_BT.sum()
            sums.add(rows[places.cpu()].to(self.device), result, scaled_BT.detach())
        own = batch.own_B[rows].nonzero().squeeze(-1)
        if own.numel():
            own_rows, own = rows[own].to(self.device), own.to(self.device)
            sums.entropy_B[own_rows] = part.entropy_BT[own].sum(-1)
            if self.settings.measure_start_kl:
                self._measure_start_kl(own_rows, own, part, sums)
        return loss

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
        models: list[torch.nn.Module] = [self.model]
        if self._start is not None:
            models.append(self._start)
        for model in models:
            model.to(device)
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
            with self.adapted.disable_adapter():
                yield self.model

    @torch.no_grad()
    def _measure_start_kl(self, own_rows: Tensor, own: Tensor, part: _Forward, sums: RowSums) -> None:
        with self._start_model() as start:
            start_BT, _ = completion_logprobs(
                start, part.tokens_BL[own], part.starts_B[own], part.mask_BT[own], part.temperature_B[own]
            )
        delta_BT = start_BT - part.logprobs_BT[own]
        k3_BT = delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1.0 - delta_BT
        sums.kl_start_B[own_rows] = k3_BT.sum(-1)  # 0 where masked


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
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]  # not in its __all__
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


def _micro_batches(batch: TrainingBatch, budget_tokens: int) -> Iterator[Tensor]:
    return (torch.tensor(rows) for rows in packed(_lengths(batch), budget_tokens))


def _lengths(batch: TrainingBatch) -> list[int]:
    """Tokens of each row, prompt included."""
    lengths: list[int] = (batch.starts_B + batch.mask_BT.sum(-1)).tolist()
    return lengths
