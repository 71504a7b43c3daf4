"""The factor of each rollout's token losses: lambda x trust / denominator.

Every source (this node, each peer) has a denominator of its own, its tokens or rollouts in the batch, so that
long foreign texts cannot drown the own gradient; the objective's aggregation says which. All of it is known
before the first forward pass, so gradients of micro-batches add up to that of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.train.objectives.aggregation import row_scale
from node.train.settings import TrainSettings
from node.weight.batch import TrainingBatch

__all__ = ["loss_scales"]


def loss_scales(batch: TrainingBatch, settings: TrainSettings) -> Tensor:
    """One float32 factor for each row of the batch, on the CPU."""
    lambdas = dict(zip(batch.sources, batch.lambda_S, strict=True))
    source_tokens, source_rows = dict.fromkeys(lambdas, 0), dict.fromkeys(lambdas, 0)
    for group in batch.groups:
        source_rows[group.source] += len(group.rollouts)
        source_tokens[group.source] += sum(len(rollout.tokens_T) for rollout in group.rollouts)
    scales = [
        lambdas[group.source]
        * group.trust
        * row_scale(
            settings.objective(group.treatment).aggregation,
            row_tokens=len(rollout.tokens_T),
            source_tokens=source_tokens[group.source],
            source_rows=source_rows[group.source],
            norm_tokens=settings.length_norm_tokens,
        )
        for group in batch.groups
        for rollout in group.rollouts
    ]
    return torch.tensor(scales, dtype=torch.float32)
