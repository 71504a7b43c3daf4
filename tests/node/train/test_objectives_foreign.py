"""ERILS on the 2 x 4 tensor of `golden.py`; other objectives for other models are in `test_objectives.py`."""

from __future__ import annotations

import math

import torch

from node.train.objectives import LossInputs
from node.train.objectives.presets.foreign import erils
from tests.node.train.golden import NAN, logs, near, run

PI = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
OLD = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
# r = 2, 0.9, 1.1, 0.6 | 0.25, 1.4, 0.9


def test_erils_judges_each_source_by_itself() -> None:
    # one source, rewards 1 and 0: mean 0.5, std 0.7071; the advantages given do not count
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    given = {"rewards": [1.0, 0.0], "own_tokens": [3.0, 4.0], "advantages": (7.0, 7.0)}
    result, gradient = run(erils(), PI, ingestion=OLD, sources=[0, 0], **given)
    assert result.loss_BT.tolist() == near(
        [[-1.2 * a, -0.9 * a, -1.1 * a, -0.6 * a], [0.8 * a, 1.4 * a, 0.9 * a, 0.0]]
    )
    assert gradient == near([[0.0, -0.9 * a, -1.1 * a, -0.6 * a], [0.0, 1.4 * a, 0.9 * a, 0.0]])
    # two sources of one rollout each: no spread, so 0.5 is the baseline
    _, gradient = run(erils(), PI, ingestion=PI, sources=[0, 1], **given)
    assert gradient == near([[-0.5] * 4, [0.5] * 3 + [0.0]])


def test_erils_takes_completions_about_as_long_as_the_own_ones() -> None:
    given = {"rewards": [1.0, 0.0], "sources": [0, 1]}
    # the median of 3, 3, 5 is 3
    result, gradient = run(erils(tolerance=0.5), PI, own_tokens=[3.0, 5.0, 3.0], **given)
    assert gradient == near([[0.0] * 4, [0.5] * 3 + [0.0]])
    assert result.dropped_BT.tolist() == [[True] * 4, [False] * 4]
    result, _ = run(erils(tolerance=99.0), PI, **given)
    assert result.dropped_BT.sum() == 7  # no own rollouts: nothing to compare with


def test_erils_statistics_are_those_of_the_whole_batch() -> None:
    logprobs = torch.zeros(4, 2, dtype=torch.float64)
    inputs = LossInputs(
        logprobs_BT=logprobs,
        ingestion_BT=logprobs,
        behaviour_BT=logprobs,
        behaviour_sum_B=torch.zeros(4),
        mask_BT=torch.ones(4, 2, dtype=torch.bool),
        advantages_B=torch.zeros(4, dtype=torch.float64),
        uses_B=torch.zeros(4),
        own_mean_logprobs_N=torch.zeros(0),
        own_tokens_N=torch.tensor([2.0]),
        rewards_B=torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
        source_B=torch.tensor([1, 1, 1, 0]),
    )
    whole, plan = erils()(inputs), erils().plan(inputs)
    for row in range(4):
        part = erils()(inputs.rows(torch.tensor([row])), plan)
        assert torch.equal(part.loss_BT[0], whole.loss_BT[row])
    std = math.sqrt(1 / 3)  # of 1, 0, 1
    expected = [-(1 / 3) / (std + 1e-6), (2 / 3) / (std + 1e-6), -(1 / 3) / (std + 1e-6), -0.5]
    assert [whole.loss_BT[:, 0].tolist()] == near([expected])
