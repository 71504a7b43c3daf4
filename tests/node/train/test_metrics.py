"""What a step is shown to have met, by source and by kind of source, worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from node.events import LAG_BUCKETS, Gap, SourceShare
from node.rollout.policy import Policy
from node.train.metrics import RowSums, by_kind, by_source, gaps
from node.train.objectives import TokenLoss
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from node.weight.groups import TrainingRollout
from node.weight.settings import Treatment
from tests.node.train.tolerance import rounding

SETTINGS = TrainSettings(measure_start_kl=False, warmup_steps=0)


def of_tokens(count: int, version: int | None = None) -> TrainingRollout:
    versions = None if version is None else np.full(count, version)
    return TrainingRollout(
        np.full(count, 7), -float(count), np.full(count, -1.0, np.float32), versions_T=versions
    )


@pytest.fixture
def batch(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    """One group of two rollouts from each: this node, a follower (trusted by half), a peer (fully). Two
    tokens a rollout, but four in the peer's second."""
    own = make_training_group(rollouts=(of_tokens(2, 9), of_tokens(2, 8)), size=2, advantages=(1.0, -3.0))
    follower = make_training_group(
        "f",
        rollouts=(of_tokens(2, 6), of_tokens(2, 3)),
        size=2,
        advantages=(0.5, -0.5),
        treatment=Treatment.OWN,
        own_lineage=True,
        trust=0.5,
    )
    foreign = make_training_group(
        "p", rollouts=(of_tokens(2, 9), of_tokens(4, 9)), size=2, advantages=(2.0, 0.0), lag=70
    )
    return collate([own, follower, foreign], SETTINGS.weight, policy)


def sums_of(batch: TrainingBatch, rows: dict[int, dict[str, list[float]]]) -> RowSums:
    """As an objective would make them; what is not given is 0."""
    sums = RowSums.zeros(len(batch.treatments), torch.device("cpu"))
    width = batch.mask_BT.shape[1]
    for row, given in rows.items():
        values = {
            key: torch.tensor([each + [0.0] * (width - len(each))], dtype=torch.float32)
            for key, each in given.items()
        }
        zeros = torch.zeros(1, width)
        result = TokenLoss(
            loss_BT=zeros,
            kept_BT=values.get("kept", zeros).bool(),
            dropped_BT=values.get("dropped", zeros).bool(),
            weights_BT=values.get("weight", zeros),
            log_ratio_BT=values.get("log_ratio", zeros),
        )
        sums.add(torch.tensor([row]), result, values.get("loss", zeros))
    return sums


def test_each_source_and_each_kind_has_its_tokens_apart(batch: TrainingBatch) -> None:
    """The own rollouts: of 4 tokens 2 kept, 1 dropped, 1 clipped; weights 1, 3, 1, 1: 36 / (4 x 12). The
    follower's: all 4 kept. The peer's: of 6 tokens 3 kept, 3 dropped."""
    sums = sums_of(
        batch,
        {
            0: {"kept": [1, 1], "weight": [1, 3], "log_ratio": [0.0, math.log(2)], "loss": [0.25, 0.5]},
            1: {"dropped": [1], "weight": [1, 1], "log_ratio": [-math.log(2)]},
            2: {"kept": [1, 1], "weight": [1, 1]},
            3: {"kept": [1, 1], "weight": [1, 1], "loss": [-1.0]},
            4: {"kept": [1, 1], "weight": [2, 2]},
            5: {"kept": [1], "dropped": [0, 1, 1, 1], "weight": [2, 0, 0, 0]},
        },
    )
    own, follower, peer = by_source(batch, sums, 9)
    assert [share.source for share in (own, follower, peer)] == ["own", "f", "p"]
    assert [share.tokens for share in (own, follower, peer)] == [4, 4, 6]
    assert (own.kept, own.dropped, own.clipped) == (0.5, 0.25, 0.25)
    assert (follower.kept, follower.dropped, follower.clipped) == (1.0, 0.0, 0.0)
    assert (peer.kept, peer.dropped, peer.clipped) == (0.5, 0.5, 0.0)
    assert own.ess == pytest.approx(36 / (4 * 12))
    assert peer.ess == pytest.approx(36 / (6 * 12))
    assert (own.loss, follower.loss, own.advantage_abs, peer.advantage_abs) == (0.75, -1.0, 2.0, 1.0)
    assert own.gap == pytest.approx(2 * math.log(2) / 4)
    assert own.k1 == pytest.approx(0.0, abs=rounding(4))
    assert own.k3 == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 4)
    # lambda is 1 for the own source, and a group of a peer's for each own one
    assert (own.weight, follower.weight, peer.weight) == (1.0, 0.5, 1.0)
    kinds = by_kind(batch, sums, 9)
    assert [share.source for share in kinds] == ["own", "follower", "foreign"]
    for kind, source in zip(kinds, (own, follower, peer), strict=True):
        assert dataclasses_equal(kind, source)


def dataclasses_equal(one: SourceShare, other: SourceShare) -> bool:
    """But for the name."""
    return all(getattr(one, name) == getattr(other, name) for name in one.__struct_fields__[1:])


def test_lags_are_counted_by_powers_of_two(batch: TrainingBatch) -> None:
    """At version 9 the own tokens are 0 and 1 behind, the follower's 3 and 6, the peer's group 70."""
    assert LAG_BUCKETS == (0, 1, 2, 4, 8, 16, 32, 64)
    own, follower, peer = by_source(batch, sums_of(batch, {}), 9)
    assert own.lags == (2, 2, 0, 0, 0, 0, 0, 0)
    assert follower.lags == (0, 0, 2, 2, 0, 0, 0, 0)
    assert peer.lags == (0, 0, 0, 0, 0, 0, 0, 6)


@pytest.mark.parametrize(
    ("lag", "place"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (63, 6), (64, 7), (5000, 7)]
)
def test_a_bucket_begins_at_its_own_lag(
    policy: Policy, make_training_group: Callable[..., Any], lag: int, place: int
) -> None:
    batch = collate([make_training_group(rollouts=(of_tokens(1),), size=1, lag=lag)], SETTINGS.weight, policy)
    (share,) = by_source(batch, sums_of(batch, {}), 0)
    assert [number for number, tokens in enumerate(share.lags) if tokens] == [place]


def test_several_peers_of_a_kind_are_one_and_a_peer_may_be_of_two(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    """`a` has followed, and trains now: one group of each kind. `b` trains. Each weighs 1."""
    groups = [
        make_training_group(rollouts=(of_tokens(2),), size=1, advantages=(1.0,)),
        make_training_group(
            "a",
            rollouts=(of_tokens(2),),
            size=1,
            advantages=(1.0,),
            treatment=Treatment.OWN,
            own_lineage=True,
        ),
        make_training_group("a", rollouts=(of_tokens(3),), size=1, advantages=(1.0,), trust=0.5),
        make_training_group("b", rollouts=(of_tokens(1),), size=1, advantages=(1.0,)),
    ]
    batch = collate(groups, SETTINGS.weight, policy)
    sums = sums_of(batch, {2: {"kept": [1, 1, 1]}})
    own, follower, foreign = by_kind(batch, sums, 0)
    assert [(share.groups, share.tokens) for share in (own, follower, foreign)] == [(1, 2), (1, 2), (2, 4)]
    assert foreign.kept == 0.75
    assert (follower.weight, foreign.weight) == (0.5, 0.5 * 0.5 + 1.0)


def test_rows_without_a_finite_advantage_count_as_dropped(batch: TrainingBatch) -> None:
    advantages_B = batch.advantages_B.clone()
    advantages_B[1] = math.nan
    spoiled = dataclasses.replace(batch, advantages_B=advantages_B)
    own = by_source(spoiled, sums_of(batch, {0: {"kept": [1, 1]}}), 9)[0]
    assert (own.kept, own.dropped, own.clipped, own.advantage_abs) == (0.5, 0.5, 0.0, 0.5)


def with_old(batch: TrainingBatch, exact: list[list[bool]], **fields: list[list[float]]) -> TrainingBatch:
    """One row of four tokens, of this lineage."""
    tensors = {name: torch.tensor(values) for name, values in fields.items()}
    return dataclasses.replace(
        batch,
        mask_BT=torch.tensor([[True, True, True, False]]),
        own_lineage_B=torch.tensor([True]),
        exact_BT=torch.tensor(exact),
        **tensors,
    )


def test_mismatch_and_staleness_are_told_apart(batch: TrainingBatch) -> None:
    """Two tokens count. mu -> pi_old: +0.5, -0.1; pi_old -> pi: +0.2, +0.4. Of the third the generating
    weights are gone, the fourth is masked."""
    old = with_old(
        batch,
        [[True, True, False, True]],
        behaviour_BT=[[-1.5, -1.5, -1.0, 3.0]],
        snapshot_BT=[[-1.0, -1.6, -5.0, math.nan]],
    )
    found = gaps(old, torch.tensor([[-0.8, -1.2, -1.0, math.nan]]))
    assert found is not None
    assert found.mismatch.tokens == found.staleness.tokens == 2
    assert found.mismatch.mean_abs == pytest.approx(0.3, abs=rounding(4))
    assert found.mismatch.k1 == pytest.approx(-0.2, abs=rounding(4))
    assert found.staleness.k1 == pytest.approx(-0.3, abs=rounding(4))
    k3 = ((math.exp(0.5) - 1.5) + (math.exp(-0.1) - 0.9)) / 2
    assert found.mismatch.k3 == pytest.approx(k3, abs=rounding(4))
    k3 = ((math.exp(0.2) - 1.2) + (math.exp(0.4) - 1.4)) / 2
    assert found.staleness.k3 == pytest.approx(k3, abs=rounding(4))
    assert found.exact == pytest.approx(2 / 3)


def test_without_snapshots_or_exact_tokens_nothing_is_claimed(batch: TrainingBatch) -> None:
    assert gaps(batch, batch.behaviour_BT) is None
    none = with_old(batch, [[False] * 4], behaviour_BT=[[-1.0] * 4], snapshot_BT=[[-1.0] * 4])
    found = gaps(none, torch.full((1, 4), -1.0))
    assert found is not None
    assert found.mismatch == found.staleness == Gap(tokens=0, mean_abs=0.0, k1=0.0, k3=0.0)
    assert found.exact == 0.0


# --- with a trainer ----------------------------------------------------------------------------------------


def test_the_sample_size_of_completions_scales_the_learning_rate(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    """Two own rollouts; log mu is log pi but for log 3 on one token of the first, so W is 3 and 1:
    16 / (2 x 10) = 0.8. The peer's, however unlike, do not count. The factor is sqrt(0.8)."""
    groups = [make_training_group(size=2, seed=1), make_training_group("p", size=2, seed=2)]
    batch = collate(groups, SETTINGS.weight, policy)
    behaviour_BT = Trainer(policy, SETTINGS).step(batch).logprobs_BT.clone()
    behaviour_BT[0, 0] -= math.log(3)
    behaviour_BT[2:] -= 1.0
    batch = dataclasses.replace(batch, behaviour_BT=behaviour_BT)
    for scaling, factor in ((False, 1.0), (True, math.sqrt(0.8))):
        settings = dataclasses.replace(SETTINGS, ess_scaling=scaling)
        trainer = Trainer(policy, settings)
        report = trainer.step(batch)
        assert report.ess == pytest.approx(0.8, rel=1e-4)
        assert report.learning_rate == pytest.approx(3e-4 * factor, rel=1e-4)
        assert trainer.optimiser.param_groups[0]["lr"] == report.learning_rate
        assert trainer.learning_rate() == 3e-4


def test_every_token_of_a_real_step_is_kept_dropped_or_clipped(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    groups = [
        make_training_group(seed=1),
        make_training_group("f", seed=2, treatment=Treatment.OWN, own_lineage=True),
        make_training_group("p", seed=3),
    ]
    report = Trainer(policy, SETTINGS).step(collate(groups, SETTINGS.weight, policy))
    assert [share.source for share in report.kinds] == ["own", "follower", "foreign"]
    for share in (*report.sources, *report.kinds):
        assert share.kept + share.dropped + share.clipped == pytest.approx(1.0)
        assert share.k3 >= 0
        assert sum(share.lags) == share.tokens
    assert sum(share.tokens for share in report.kinds) == report.tokens
    assert sum(share.loss for share in report.kinds) == pytest.approx(report.loss, rel=1e-4)
    assert report.gaps is None
