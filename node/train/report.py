"""What a step tells everybody who watches: its numbers as one `StepDone`.

For: putting together what the batch, the step and the pool know. Not for what is measured inside a step
(`metrics.py`).
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TypeVar

import msgspec
import numpy as np

from node.events import StepDone
from node.train.step import StepReport
from node.weight.advantage.numbers import has_signal
from node.weight.batch import TrainingBatch
from node.weight.groups import OWN_SOURCE, Kind
from node.weight.settings import Treatment
from protocol.messages import FinishReason

__all__ = ["finite", "step_done"]

T = TypeVar("T")


def step_done(
    report: StepReport,
    batch: TrainingBatch,
    version: int,
    *,
    at: int,
    merged_version: int,
    pool: int,
    wait_s: float,
) -> StepDone:
    """The event of a step on `batch`, whose groups were made of accepted ones, at this `version`.
    `merged_version`: of the last adopted merge; `pool`: groups left in the pool; `wait_s`: time until the
    batch was there."""
    own = [group.accepted for group in batch.groups if group.source == OWN_SOURCE and group.accepted]
    external = [group for group in batch.groups if group.source != OWN_SOURCE]
    followers = [group for group in external if group.kind is Kind.FOLLOWER]
    own_lineage = [group for group in batch.groups if group.kind is not Kind.FOREIGN]
    rollouts = [rollout for each in own for rollout in each.group.rollouts]
    versions = [np.concatenate([arrays.versions_T for arrays in each.tokens]) for each in own]
    return finite(
        StepDone(
            at=at,
            policy_version=report.policy_version,
            loss=report.loss,
            reward=fmean(reward for each in own for reward in each.rewards),
            reward_external=fmean(fmean(group.rewards) for group in external) if external else 0.0,
            entropy=report.entropy,
            kl_start=report.kl_start,
            length_mean=fmean(len(arrays.token_ids_T) for each in own for arrays in each.tokens),
            finished_share=fmean(rollout.finish is FinishReason.STOP for rollout in rollouts),
            zero_variance_share=fmean(not has_signal(each.rewards) for each in own),
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            skipped=report.skipped,
            rolled_back=report.rolled_back is not None,
            nonfinite=report.nonfinite,
            ess=report.ess,
            kl_step=report.kl_step,
            groups_local=len(own),
            groups_external=len(external),
            hacpo_groups=sum(group.treatment is Treatment.HACPO for group in external),
            graft_groups=sum(group.treatment is Treatment.GRAFT for group in external),
            prompts_shared=sum(group.prompt_shared for group in external),
            staleness=fmean(group.lag for group in batch.groups),
            age_windows=fmean(group.age_windows for group in external) if external else 0.0,
            off_policy_share=float((np.concatenate(versions) < version).mean()),
            partial_groups=sum(int(each.min() < each.max()) for each in versions),
            groups_followers=len(followers),
            staleness_followers=fmean(group.lag for group in followers) if followers else 0.0,
            groups_across_merge=sum(version - group.lag < merged_version for group in own_lineage),
            sources=report.sources,
            kinds=report.kinds,
            gaps=report.gaps,
            pool=pool,
            generate_s=sum(each.generate_s for each in own),
            train_s=report.train_s,
            wait_s=wait_s,
        )
    )


def finite(value: T) -> T:
    """`value` with 0 in place of each number that is none, at any depth: JSON has no NaN, and `skipped` or
    `rolled_back` tells why."""
    if isinstance(value, float):
        return value if math.isfinite(value) else type(value)(0.0)
    if isinstance(value, tuple):
        return type(value)(map(finite, value))
    if isinstance(value, msgspec.Struct):
        fields = {name: finite(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value
