"""From groups to one batch of padded tensors, with the weight of each source.

L = sum over sources of lambda_src L_src. lambda is 1 for the own source (this node) and `external_weight` x
min(1, groups of the peer / own groups) for a peer: a group weighs the same whoever made it, and no peer more
than this node. Trust scales numerators; lag and age have gated before. The trainer
divides by each source's own tokens or rollouts, as the objective's aggregation says
(`node/train/objectives/aggregation.py`). Not for ratios and clips (`node/train/objectives`).

Each group is checked once, here (`check_group`). A bad external one is left out and named in `refused`; a bad
own one is our bug and raises before any tensor exists. External groups without any advantage are left out.
Letters: B rollouts, L prompt + completion (right-padded), T completion, S sources, N own rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from node.rollout.policy import Policy
from node.weight.groups import (
    OWN_SOURCE,
    Kind,
    TrainingDataError,
    TrainingGroup,
    check_group,
    mean_logprob,
)
from node.weight.settings import Treatment, WeightSettings

__all__ = ["TrainingBatch", "collate"]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """batch -> trainer. Rows are in the order of the groups."""

    tokens_BL: Tensor
    starts_B: Tensor
    """Length of the prompt: the completion begins there."""
    mask_BT: Tensor
    """True on tokens of the completion, which is aligned at column 0."""
    behaviour_BT: Tensor
    """log mu; 0 where unknown."""
    behaviour_sum_B: Tensor
    ingestion_BT: Tensor
    """Stored log pi_old; NaN in rows on first use, where the trainer takes the current log pi."""
    versions_BT: Tensor
    """Version of the own lineage that generated each token; -1 where unknown, as in other models' groups."""
    lag_B: Tensor
    """Lag of the row's group, in versions of its lineage."""
    advantages_B: Tensor
    rewards_B: Tensor
    temperature_B: Tensor
    uses_B: Tensor
    treatments: tuple[Treatment, ...]
    """Treatment of each row."""
    own_B: Tensor
    """True in rows of the own source."""
    own_lineage_B: Tensor
    """True in rows that this node's policy generated: own ones and followers'."""
    source_B: Tensor
    """Index into `sources`."""
    sources: tuple[str, ...]
    lambda_S: tuple[float, ...]
    own_mean_logprobs_N: Tensor
    own_tokens_N: Tensor
    groups: tuple[TrainingGroup, ...]
    refused: tuple[tuple[str, TrainingDataError], ...] = ()
    """(source, error) of each external group that was left out for its numbers."""
    snapshot_BT: Tensor | None = None
    """log pi_old by the version that generated each token, or the nearest kept; NaN where there is none.
    Filled before the step (`old_policy.py`) for objectives that need it."""
    exact_BT: Tensor | None = None
    """True where `snapshot_BT` is of the very version."""
    ewma_BT: Tensor | None = None
    """log pi by a moving average of the weights, likewise."""

    def lags(self, policy_version: int) -> Tensor:
        """Lag of each token, in versions behind this one; that of the group where its version is unknown."""
        behind_BT = (policy_version - self.versions_BT).float()
        return torch.where(self.versions_BT < 0, self.lag_B[:, None], behind_BT).clamp(min=0.0)

    def ingested(self, logprobs_BT: Tensor) -> TrainingBatch:
        """With these as the stored log pi_old of rows on first use."""
        first_use_B = self.ingestion_BT[:, :1].isnan()
        return replace(self, ingestion_BT=torch.where(first_use_B, logprobs_BT, self.ingestion_BT))


def collate(groups: Sequence[TrainingGroup], settings: WeightSettings, policy: Policy) -> TrainingBatch:
    """Check and pad. Raises TrainingDataError for an own group, ValueError where no group is left."""
    groups, refused = _usable(groups, settings, policy)
    if not groups:
        raise ValueError("a batch needs at least one group")
    sources = tuple(dict.fromkeys(group.source for group in groups))
    lambda_S = _lambdas(groups, sources, settings.external_weight)

    rows = [(group, place) for group in groups for place in range(len(group.rollouts))]
    count = len(rows)
    width_T = max(len(group.rollouts[place].tokens_T) for group, place in rows)
    width_L = max(len(group.prompt_ids) + len(group.rollouts[place].tokens_T) for group, place in rows)
    tokens_BL = np.full((count, width_L), policy.pad_token_id, dtype=np.int64)
    mask_BT = np.zeros((count, width_T), dtype=bool)
    behaviour_BT = np.zeros((count, width_T), dtype=np.float32)
    ingestion_BT = np.full((count, width_T), np.nan, dtype=np.float32)
    versions_BT = np.full((count, width_T), -1, dtype=np.int64)
    for row, (group, place) in enumerate(rows):
        rollout = group.rollouts[place]
        start, length = len(group.prompt_ids), len(rollout.tokens_T)
        tokens_BL[row, :start] = group.prompt_ids
        tokens_BL[row, start : start + length] = rollout.tokens_T
        mask_BT[row, :length] = True
        if rollout.behaviour_T is not None:
            behaviour_BT[row, :length] = rollout.behaviour_T
        if rollout.ingestion_T is not None:
            ingestion_BT[row, :length] = rollout.ingestion_T
        if rollout.versions_T is not None and group.kind is not Kind.FOREIGN:
            versions_BT[row, :length] = rollout.versions_T

    own = [rollout for group in groups if group.source == OWN_SOURCE for rollout in group.rollouts]
    return TrainingBatch(
        tokens_BL=torch.from_numpy(tokens_BL),
        starts_B=torch.tensor([len(group.prompt_ids) for group, _ in rows]),
        mask_BT=torch.from_numpy(mask_BT),
        behaviour_BT=torch.from_numpy(behaviour_BT),
        behaviour_sum_B=_floats([group.rollouts[place].behaviour_sum for group, place in rows]),
        ingestion_BT=torch.from_numpy(ingestion_BT),
        versions_BT=torch.from_numpy(versions_BT),
        lag_B=_floats([float(group.lag) for group, _ in rows]),
        advantages_B=_floats([group.advantages[place] for group, place in rows]),
        rewards_B=_floats([group.rewards[place] for group, place in rows]),
        temperature_B=_floats([group.temperature for group, _ in rows]),
        uses_B=_floats([float(group.uses) for group, _ in rows]),
        treatments=tuple(group.treatment for group, _ in rows),
        own_B=torch.tensor([group.source == OWN_SOURCE for group, _ in rows]),
        own_lineage_B=torch.tensor([group.kind is not Kind.FOREIGN for group, _ in rows]),
        source_B=torch.tensor([sources.index(group.source) for group, _ in rows]),
        sources=sources,
        lambda_S=lambda_S,
        own_mean_logprobs_N=_floats([mean_logprob(rollout) for rollout in own]),
        own_tokens_N=_floats([float(len(rollout.tokens_T)) for rollout in own]),
        groups=tuple(groups),
        refused=tuple(refused),
    )


def _usable(
    groups: Sequence[TrainingGroup], settings: WeightSettings, policy: Policy
) -> tuple[list[TrainingGroup], list[tuple[str, TrainingDataError]]]:
    """Groups to train on, and (source, error) of the external ones that must not be."""
    usable: list[TrainingGroup] = []
    refused: list[tuple[str, TrainingDataError]] = []
    for group in groups:
        own = group.source == OWN_SOURCE
        try:
            check_group(group, settings, policy)
        except TrainingDataError as error:
            if own:
                raise
            refused.append((group.source, error))
            continue
        if own or any(group.advantages):
            usable.append(group)
    return usable, refused


def _lambdas(
    groups: Sequence[TrainingGroup], sources: Sequence[str], external_weight: float
) -> tuple[float, ...]:
    """By number of groups. Without own ones (in the lab) each peer counts fully."""
    count = Counter(group.source for group in groups)
    own = max(count[OWN_SOURCE], 1)
    return tuple(
        1.0 if source == OWN_SOURCE else external_weight * min(1.0, count[source] / own) for source in sources
    )


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)
