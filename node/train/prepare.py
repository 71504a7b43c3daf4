"""What was drawn, and what the loop knows about it -> one checked batch: the weight stage's work.

For: running beside the event loop, because tokenising texts again and padding take tens of milliseconds. A
draft is a snapshot taken on the loop (answers, capability, trust, lag), so that `prepare` is a pure function
and nothing shared is read on another thread. An external group whose numbers may not reach the optimiser is
left out and named; a bad own group is our bug and raises. Not for: which groups are drawn (`stage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from node.rollout.policy import Policy
from node.share.accepted import Accepted
from node.share.pool import PooledGroup
from node.train.batch import TrainingBatch, collate
from node.train.groups import (
    MIN_LOGPROB,
    OWN_SOURCE,
    TrainingDataError,
    TrainingGroup,
    check_group,
    external_group,
    own_group,
    training_rollouts,
)
from node.train.settings import TrainSettings
from protocol.messages import Digest, PeerId

__all__ = ["ExternalDraft", "LogprobRows", "OwnDraft", "Prepared", "first_logprobs", "prepare"]

LogprobRows = tuple[NDArray[np.float32] | None, ...]
"""log pi of each token, one array per rollout of a group; None where none was trained on."""


@dataclass(frozen=True, slots=True)
class OwnDraft:
    """An own group and its staleness."""

    own: Accepted
    lag: int
    age_windows: float


@dataclass(frozen=True, slots=True)
class ExternalDraft:
    """A drawn group with all that decides its weight."""

    pooled: PooledGroup
    own_rewards: tuple[float, ...] | None
    other_rewards: Mapping[str, Sequence[float]]
    capability: Mapping[str, float]
    trust: float
    lag: int
    age_windows: float
    own_lineage: bool = False
    """A follower's: this node's policy generated it."""
    ingestion: LogprobRows = ()
    """log pi when it was first trained on; empty on first use."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """prepare -> step. The batch holds the own groups, then those of `used`, in this order."""

    batch: TrainingBatch
    used: tuple[ExternalDraft, ...]
    refused: tuple[tuple[PeerId, str], ...] = field(default=())
    """(author, reason) of each group that was left out for its numbers."""


def prepare(
    own: Sequence[OwnDraft], external: Sequence[ExternalDraft], settings: TrainSettings, policy: Policy
) -> Prepared:
    """Weigh, check and pad. External groups without any advantage are left out silently. Blocking. Raises
    TrainingDataError for an own group."""
    groups = [_own(draft, settings, policy) for draft in own]
    used: list[ExternalDraft] = []
    refused: list[tuple[PeerId, str]] = []
    for draft in external:
        try:
            group = _external(draft, settings, policy)
            check_group(group, settings, policy)
        except TrainingDataError as error:
            refused.append((draft.pooled.group.author, error.reason))
            continue
        if any(group.advantages):
            groups.append(group)
            used.append(draft)
    return Prepared(collate(groups, settings, policy), tuple(used), tuple(refused))


def first_logprobs(prepared: Prepared, logprobs_BT: NDArray[np.float32]) -> dict[Digest, LogprobRows]:
    """Of the external groups on first use, log pi as the step met it: what later uses are clipped against."""
    row = int(prepared.batch.own_B.sum())
    external = [group for group in prepared.batch.groups if group.source != OWN_SOURCE]
    found: dict[Digest, LogprobRows] = {}
    for draft, group in zip(prepared.used, external, strict=True):
        lengths = [len(rollout.tokens_T) for rollout in group.rollouts]
        if not draft.ingestion:
            # Below what a group may hold no clip tells the difference.
            rows: list[NDArray[np.float32] | None] = [
                logprobs_BT[row + place, :length].clip(MIN_LOGPROB, 0.0)
                for place, length in enumerate(lengths)
            ]
            if group.left_out is not None:
                rows.insert(group.left_out, None)
            found[draft.pooled.digest] = tuple(rows)
        row += len(lengths)
    return found


def _own(draft: OwnDraft, settings: TrainSettings, policy: Policy) -> TrainingGroup:
    group = draft.own.group
    name = f"own {group.prompt.window}/{group.prompt.slot}"
    return own_group(
        name,
        policy.encode_prompt(group.question),
        training_rollouts(name, group.rollouts, policy, same_tokenizer=True),
        draft.own.rewards,
        settings.treatment,
        temperature=group.sampling.temperature,
        lag=draft.lag,
        age_windows=draft.age_windows,
    )


def _external(draft: ExternalDraft, settings: TrainSettings, policy: Policy) -> TrainingGroup:
    group, name = draft.pooled.group, draft.pooled.digest[:12]
    same_tokenizer = group.lineage.tokenizer == policy.tokenizer_digest
    rollouts = training_rollouts(name, group.rollouts, policy, same_tokenizer=same_tokenizer)
    if draft.ingestion:
        rollouts = tuple(
            replace(rollout, ingestion_T=row) for rollout, row in zip(rollouts, draft.ingestion, strict=True)
        )
    return external_group(
        group.author,
        name,
        policy.encode_prompt(group.question),
        rollouts,
        draft.pooled.rewards,
        settings.treatment,
        own_rewards=draft.own_rewards,
        other_rewards=draft.other_rewards,
        capability=draft.capability,
        trust=draft.trust,
        temperature=group.sampling.temperature,
        lag=draft.lag,
        age_windows=draft.age_windows,
        uses=draft.pooled.uses,
        own_lineage=draft.own_lineage,
    )
