"""What a step met: sums over the tokens of each row, and what is shown of them by source and kind of source.

    TokenLoss of some rows --RowSums.add--> sums of all rows --by_source, by_kind--> SourceShare
    batch, log pi as the step met it --gaps--> engine mismatch and staleness, apart

`gaps`: log mu - log pi = (log mu - log pi_old) + (log pi_old - log pi), pi_old by the weights that generated
the token; only then are the two what they are called (arXiv 2605.12070). Divergences are estimated on tokens
as they were sampled. Letters: B rollouts, T tokens, N tokens that count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import fsum

import torch
from torch import Tensor

from node.events import LAG_BUCKETS, Gap, Gaps, SourceShare
from node.train.objectives import TokenLoss
from node.train.objectives.ratio import MAX_LOG_RATIO
from node.weight.batch import TrainingBatch
from node.weight.groups import Kind, TrainingGroup

__all__ = ["RowSums", "by_kind", "by_source", "gap", "gaps"]


@dataclass(frozen=True, eq=False)
class RowSums:
    """Per row of the batch: sums over its tokens, detached. On the device while rows are added."""

    loss_B: Tensor
    kept_B: Tensor
    dropped_B: Tensor
    weight_B: Tensor
    weight_squared_B: Tensor
    gap_B: Tensor
    k1_B: Tensor
    k3_B: Tensor
    entropy_B: Tensor
    kl_start_B: Tensor

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> RowSums:
        return cls(*(torch.zeros(count, device=device) for _ in fields(cls)))

    def cpu(self) -> RowSums:
        """On the CPU, where they are read."""
        return RowSums(*(getattr(self, field.name).cpu() for field in fields(self)))

    @torch.no_grad()
    def add(self, rows: Tensor, result: TokenLoss, scaled_BT: Tensor) -> None:
        """What an objective made of some rows; `scaled_BT` are their parts of the step's loss."""
        log_ratio_BT = result.log_ratio_BT
        self.loss_B[rows] = scaled_BT.sum(-1)
        self.kept_B[rows] = result.kept_BT.float().sum(-1)
        self.dropped_B[rows] = result.dropped_BT.float().sum(-1)
        self.weight_B[rows] = result.weights_BT.sum(-1)
        self.weight_squared_B[rows] = (result.weights_BT**2).sum(-1)
        self.gap_B[rows] = log_ratio_BT.abs().sum(-1)
        self.k1_B[rows] = -log_ratio_BT.sum(-1)
        self.k3_B[rows] = (log_ratio_BT.exp() - 1.0 - log_ratio_BT).sum(-1)


def by_source(batch: TrainingBatch, sums: RowSums, policy_version: int) -> tuple[SourceShare, ...]:
    """Of each source of the batch. `policy_version` is the one that was trained."""
    return _shares(batch, sums, policy_version, [group.source for group in batch.groups])


def by_kind(batch: TrainingBatch, sums: RowSums, policy_version: int) -> tuple[SourceShare, ...]:
    """Of each kind of source: own, followers, others."""
    kinds = [group.kind for group in batch.groups]
    shares = _shares(batch, sums, policy_version, kinds)
    return tuple(sorted(shares, key=lambda share: list(Kind).index(Kind(share.source))))


def _shares(
    batch: TrainingBatch, sums: RowSums, policy_version: int, names: list[str] | list[Kind]
) -> tuple[SourceShare, ...]:
    """Of the groups of each name."""
    lags_BT = batch.lags(policy_version)
    row_names = [name for name, group in zip(names, batch.groups, strict=True) for _ in group.rollouts]
    return tuple(
        _share(
            batch,
            sums,
            lags_BT,
            str(name),
            torch.tensor([each == name for each in row_names]),
            [group for group, each in zip(batch.groups, names, strict=True) if each == name],
        )
        for name in dict.fromkeys(names)
    )


def _share(
    batch: TrainingBatch,
    sums: RowSums,
    lags_BT: Tensor,
    name: str,
    rows_B: Tensor,
    groups: list[TrainingGroup],
) -> SourceShare:
    mask_BT = batch.mask_BT & rows_B[:, None]
    tokens_B = mask_BT.sum(-1)
    tokens = int(tokens_B.sum())

    def total(sum_B: Tensor) -> float:
        return float(sum_B[rows_B].sum())

    # Rows without a finite advantage were left out before the objective could drop anything.
    left_out = int(tokens_B[~batch.advantages_B.isfinite()].sum())
    kept, dropped = total(sums.kept_B) / tokens, (total(sums.dropped_B) + left_out) / tokens
    weight, weight_squared = total(sums.weight_B), total(sums.weight_squared_B)
    buckets_N = torch.bucketize(lags_BT[mask_BT], torch.tensor(LAG_BUCKETS[1:]), right=True)
    return SourceShare(
        source=name,
        groups=len(groups),
        tokens=tokens,
        weight=_weight(batch, groups),
        loss=total(sums.loss_B),
        kept=kept,
        dropped=dropped,
        clipped=max(0.0, 1.0 - kept - dropped),
        ess=weight**2 / (tokens * weight_squared) if weight_squared > 0 else 0.0,
        advantage_abs=float(batch.advantages_B[rows_B].abs().nan_to_num(0.0, 0.0, 0.0).mean()),
        gap=total(sums.gap_B) / tokens,
        k1=total(sums.k1_B) / tokens,
        k3=total(sums.k3_B) / tokens,
        lags=tuple(torch.bincount(buckets_N, minlength=len(LAG_BUCKETS)).tolist()),
    )


def _weight(batch: TrainingBatch, groups: list[TrainingGroup]) -> float:
    """lambda of the groups' sources times the trust in them."""
    lambdas = dict(zip(batch.sources, batch.lambda_S, strict=True))
    of_source = [group.source for group in batch.groups]
    return fsum(lambdas[group.source] / of_source.count(group.source) * group.trust for group in groups)


@torch.no_grad()
def gaps(batch: TrainingBatch, logprobs_BT: Tensor) -> Gaps | None:
    """Over the tokens whose generating weights were kept; None without snapshots. `logprobs_BT`: log pi as
    the step met them. All on the CPU; masked places may hold anything."""
    if batch.snapshot_BT is None or batch.exact_BT is None:
        return None
    known_BT = batch.mask_BT & batch.own_lineage_B[:, None]
    exact_BT = known_BT & batch.exact_BT
    old_N = batch.snapshot_BT[exact_BT]
    return Gaps(
        mismatch=gap(batch.behaviour_BT[exact_BT], old_N),
        staleness=gap(old_N, logprobs_BT[exact_BT]),
        exact=int(exact_BT.sum()) / max(int(known_BT.sum()), 1),
    )


def gap(p_N: Tensor, q_N: Tensor) -> Gap:
    """Of q from p, by their log-probabilities of tokens that p sampled."""
    if not len(p_N):
        return Gap(tokens=0, mean_abs=0.0, k1=0.0, k3=0.0)
    log_ratio_N = (q_N.double() - p_N.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Gap(
        tokens=len(p_N),
        mean_abs=float(log_ratio_N.abs().mean()),
        k1=float(-log_ratio_N.mean()),
        k3=float((log_ratio_N.exp() - 1.0 - log_ratio_N).mean()),
    )
