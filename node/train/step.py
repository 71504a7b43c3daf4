"""The trainer: one optimiser step from one batch, or no change at all.

For: forward and backward over micro-batches whose gradients add up to that of the whole batch, AdamW with a
clipped norm, and the numbers that describe the step. If loss or gradient norm is not finite, parameters and
optimiser stay byte-identical and the step counts as skipped. Log-probabilities are taken at each rollout's
temperature, as sampling did; one log-softmax serves loss and entropy. Not for: choosing groups, advantages or
weights (`batch.py` has them all in one factor). Blocking; runs on one worker thread. Letters: see `batch.py`;
V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from node.events import SourceShare
from node.rollout.policy import Policy
from node.train.batch import TrainingBatch
from node.train.groups import OWN_SOURCE
from node.train.objectives import LossInputs, TokenLoss
from node.train.settings import TrainSettings, Treatment

__all__ = ["StepReport", "Trainer"]


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
    """Owns the weights that learn, their optimiser and the frozen start copy."""

    def __init__(self, policy: Policy, settings: TrainSettings, *, policy_version: int = 0) -> None:
        self.policy = policy
        self.settings = settings
        self.policy_version = policy_version
        self.skipped_steps = 0
        self.model = policy.load_model(settings.device, settings.dtype)
        self.device = torch.device(settings.device)
        self._start = None
        if settings.measure_start_kl:
            self._start = policy.load_model(settings.device, settings.dtype).requires_grad_(False)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Optimiser steps made since the optimiser was new; drives the warm-up."""

    def step(self, batch: TrainingBatch) -> StepReport:
        """Train on `batch` once. Raises nothing for numbers that overflow: the report says `skipped`."""
        began_s = time.perf_counter()
        loss, sums, logprobs_BT = self._accumulate(batch)
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
        """A copy of the weights by name, for `Engine.update`; later steps do not change it."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _accumulate(self, batch: TrainingBatch) -> tuple[float, _RowSums, Tensor]:
        """Gradients of the whole batch in `.grad`, its loss, what each row contributed, and log pi."""
        sums = _RowSums.zeros(len(batch.treatments), self.device)
        kept_BT = torch.zeros(batch.targets_BT.shape)
        total = torch.zeros((), device=self.device)
        for rows in _micro_batches(batch, self.settings.micro_batch_tokens):
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
        logits_BKV, places_BT = _completion_logits(self.model, tokens_BL, starts_B, width_T)
        logprobs_BKV = torch.log_softmax(logits_BKV.float() / temperature_B[:, None, None], dim=-1)
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
        self._measure_own(
            batch, rows, tokens_BL, starts_B, targets_BT, mask_BT, temperature_B, logprobs_BKV, sums
        )
        return loss

    def _objective_loss(self, treatment: Treatment, inputs: LossInputs) -> TokenLoss:
        return self.settings.objective(treatment)(inputs)

    @torch.no_grad()
    def _measure_own(
        self,
        batch: TrainingBatch,
        rows: Tensor,
        tokens_BL: Tensor,
        starts_B: Tensor,
        targets_BT: Tensor,
        mask_BT: Tensor,
        temperature_B: Tensor,
        logprobs_BKV: Tensor,
        sums: _RowSums,
    ) -> None:
        """Entropy and divergence from the start on own tokens."""
        own = batch.own_B[rows].nonzero().squeeze(-1)
        if own.numel() == 0:
            return
        targets_rows = rows[own].to(self.device)
        own = own.to(self.device)
        own_BKV, mask_BT = logprobs_BKV[own].detach(), mask_BT[own]
        places_BT = _places(starts_B, int(starts_B.min()), targets_BT.shape[1], logprobs_BKV.shape[1])[own]
        entropy_BK = -(own_BKV.exp() * own_BKV).sum(-1)
        entropy_BT = entropy_BK.gather(1, places_BT)
        sums.entropy_B[targets_rows] = torch.where(mask_BT, entropy_BT, 0.0).sum(-1)
        if self._start is None:
            return
        start_BKV, start_places_BT = _completion_logits(
            self._start, tokens_BL[own], starts_B[own], targets_BT.shape[1]
        )
        start_BKV = torch.log_softmax(start_BKV.float() / temperature_B[own, None, None], dim=-1)
        delta_BT = _of_targets(start_BKV, start_places_BT, targets_BT[own]) - _of_targets(
            own_BKV, places_BT, targets_BT[own]
        )
        k3_BT = delta_BT.clamp(-20.0, 20.0).exp() - 1.0 - delta_BT
        sums.kl_start_B[targets_rows] = torch.where(mask_BT, k3_BT, 0.0).sum(-1)


def _completion_logits(
    model: torch.nn.Module, tokens_BL: Tensor, starts_B: Tensor, width_T: int
) -> tuple[Tensor, Tensor]:
    """Logits over the K positions that can predict a completion token, and where each token's prediction
    lies.

    Right padding needs no attention mask: a causal model cannot look at what comes later.
    """
    shortest = int(starts_B.min())
    kept_K = tokens_BL.shape[1] - shortest
    logits_BKV = model(input_ids=tokens_BL, use_cache=False, logits_to_keep=kept_K + 1).logits[:, :-1]
    return logits_BKV, _places(starts_B, shortest, width_T, kept_K)


def _places(starts_B: Tensor, shortest: int, width_T: int, kept_K: int) -> Tensor:
    places_BT = (starts_B - shortest)[:, None] + torch.arange(width_T, device=starts_B.device)
    return places_BT.clamp_(max=kept_K - 1)


def _of_targets(logprobs_BKV: Tensor, places_BT: Tensor, targets_BT: Tensor) -> Tensor:
    rows_BT = torch.arange(places_BT.shape[0], device=places_BT.device)[:, None]
    return logprobs_BKV[rows_BT, places_BT, targets_BT]


def _micro_batches(batch: TrainingBatch, budget_tokens: int) -> Iterator[Tensor]:
    """Row indexes, long rows together, with at most `budget_tokens` padded tokens (at least one row)."""
    lengths = (batch.starts_B + batch.mask_BT.sum(-1)).tolist()
    chosen: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        if chosen and (len(chosen) + 1) * lengths[chosen[0]] > budget_tokens:
            yield torch.tensor(sorted(chosen))
            chosen = []
        chosen.append(row)
    yield torch.tensor(sorted(chosen))


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
