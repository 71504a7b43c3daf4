"""What a step tells: each number of the event, worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from node.events import SourceShare
from node.rollout.policy import Policy
from node.train.report import finite, step_done
from node.weight.batch import TrainingBatch, collate
from node.weight.groups import training_group
from node.weight.settings import Treatment, WeightSettings
from protocol.messages import FinishReason
from tests.node.train.test_stage import REPORT
from tests.node.verify.world import rollout
from tests.node.weight.conftest import ALICE, BOB, ME, accepted, lineage_of


@pytest.fixture
def step_batch(policy: Policy) -> TrainingBatch:
    """Version 3 is trained on: two own groups (of versions 1 to 3, and of 3), a follower's of version 1, and
    a foreign one."""
    ours = lineage_of(policy, ME)
    versions = np.array([1, 2, 3, 3], "<u4").tobytes()
    whole = rollout(
        [5, 6, 7, 1], [-1.0] * 4, reward=0.0, text="abc", versions=versions, finish=FinishReason.STOP
    )
    cut = rollout([5, 5], [-1.0] * 2, reward=1.0, text="aa", version=3, finish=FinishReason.LENGTH)
    full = rollout([5, 6, 7, 1], [-1.0] * 4, reward=1.0, text="abc", version=3, finish=FinishReason.STOP)
    made = [
        (accepted(policy, ME, [0.0, 1.0], rollouts=[whole, cut]), {"lag": 0}),
        (accepted(policy, ME, [1.0, 1.0], rollouts=[full, full]), {"lag": 1}),
        (accepted(policy, ALICE, [0.0, 0.5], lineage=ours), {"lag": 2, "prompt_shared": True}),
        (accepted(policy, BOB, [0.0, 1.0]), {"lag": 1, "age_windows": 3, "treatment": Treatment.HACPO}),
    ]
    groups = [
        dataclasses.replace(
            training_group(each, policy, follower=each.group.lineage == ours),
            advantages=(-1.0, 1.0),
            **fields,
        )
        for each, fields in made
    ]
    return collate(groups, WeightSettings(), policy)


def test_the_event_tells_the_step_in_numbers(step_batch: TrainingBatch) -> None:
    report = dataclasses.replace(REPORT, policy_version=4)
    step = step_done(report, step_batch, 3, at=7, merged_version=2, pool=5, wait_s=1.5)
    assert (step.at, step.policy_version, step.loss, step.skipped, step.rolled_back) == (
        7,
        4,
        0.5,
        False,
        False,
    )
    assert (step.reward, step.reward_external) == (0.75, pytest.approx((0.25 + 0.5) / 2))
    assert step.length_mean == pytest.approx((4 + 2 + 4 + 4) / 4)
    assert (step.finished_share, step.zero_variance_share) == (0.75, 0.5)
    assert (step.groups_local, step.groups_external, step.groups_followers) == (2, 2, 1)
    assert (step.hacpo_groups, step.graft_groups, step.prompts_shared) == (1, 0, 1)
    assert (step.staleness, step.staleness_followers, step.age_windows) == (1.0, 2.0, 1.5)
    assert step.off_policy_share == pytest.approx(2 / 14)
    assert step.partial_groups == 1
    assert step.groups_across_merge == 1  # the follower's, of version 1
    assert (step.generate_s, step.train_s, step.wait_s, step.pool) == (1.0, 0.25, 1.5, 5)


def test_numbers_that_broke_are_told_as_zeros_at_any_depth() -> None:
    share = SourceShare(
        source="own",
        groups=1,
        tokens=4,
        weight=1.0,
        loss=float("nan"),
        kept=1.0,
        ess=float("inf"),
        advantage_abs=1.0,
        gap=-float("inf"),
    )
    (told,) = finite((share,))
    assert (told.loss, told.ess, told.gap, told.kept) == (0.0, 0.0, 0.0, 1.0)
    assert torch.isfinite(torch.tensor([told.loss, told.ess, told.gap])).all()
