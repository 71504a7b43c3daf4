"""Collation: what is refused, padding, denominators per source, trust in numerators only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from node.config import load_config
from node.open.settings import train_settings
from node.rollout.policy import Policy
from node.state.paths import bundled
from node.train.objectives import Aggregation
from node.train.objectives.presets.direct import dppo_tv
from node.train.scales import loss_scales
from node.train.settings import TrainSettings
from node.weight.batch import collate
from node.weight.by_group import ByGroup
from node.weight.groups import TrainingDataError, TrainingRollout
from node.weight.settings import Treatment, WeightSettings
from protocol.charter import found
from protocol.identity import Identity

Make = Callable[..., Any]
SETTINGS = TrainSettings()


def lengths(group: Any) -> list[int]:
    return [len(rollout.tokens_T) for rollout in group.rollouts]


def test_padding_by_hand(policy: Policy, make_training_group: Make) -> None:
    first = TrainingRollout(np.array([7, 8, 1]), -1.5, np.array([-1.0, -0.25, -0.25], np.float32))
    second = TrainingRollout(
        np.array([9]), -2.0, np.array([-2.0], np.float32), ingestion_T=np.array([-3.0], np.float32)
    )
    group = make_training_group(
        prompt_ids=(2, 5, 3),
        rollouts=(first, second),
        rewards=(1.0, 0.0),
        advantages=(0.5, -0.5),
        temperature=0.7,
    )
    batch = collate([group, dataclasses.replace(group, prompt_ids=(2, 3))], SETTINGS.weight, policy)
    assert batch.tokens_BL.tolist() == [
        [2, 5, 3, 7, 8, 1],
        [2, 5, 3, 9, 0, 0],
        [2, 3, 7, 8, 1, 0],
        [2, 3, 9, 0, 0, 0],
    ]
    assert batch.starts_B.tolist() == [3, 3, 2, 2]
    assert batch.mask_BT.tolist()[:2] == [[True, True, True], [True, False, False]]
    assert batch.behaviour_BT.tolist()[:2] == [[-1.0, -0.25, -0.25], [-2.0, 0.0, 0.0]]
    assert batch.behaviour_sum_B.tolist()[:2] == [-1.5, -2.0]
    assert batch.ingestion_BT[0].isnan().all()
    assert batch.ingestion_BT[1, 0] == -3.0
    assert batch.advantages_B.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert batch.temperature_B.tolist() == pytest.approx([0.7] * 4)
    assert batch.own_mean_logprobs_N.tolist() == [-0.5, -2.0, -0.5, -2.0]


def test_each_source_has_its_own_denominator(policy: Policy, make_training_group: Make) -> None:
    groups = [
        make_training_group(seed=1),
        make_training_group("a", seed=2, trust=0.5),
        make_training_group("a", seed=3),
        make_training_group("b", seed=4),
    ]
    batch = collate(groups, WeightSettings(external_weight=0.6), policy)
    assert batch.sources == ("own", "a", "b")
    # one own group: b has as many, and a, with two, is held at this node's weight
    assert batch.lambda_S == pytest.approx((1.0, 0.6, 0.6))
    tokens_a = sum(lengths(groups[1]) + lengths(groups[2]))
    scale = loss_scales(batch, SETTINGS).tolist()
    assert scale[0:4] == pytest.approx([1 / sum(lengths(groups[0]))] * 4)
    assert scale[4:8] == pytest.approx([0.6 * 0.5 / tokens_a] * 4)  # trust is in no denominator
    assert scale[8:12] == pytest.approx([0.6 / tokens_a] * 4)
    assert scale[12:16] == pytest.approx([0.6 / sum(lengths(groups[3]))] * 4)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("a", (1.0, 0.25)),  # a single foreign group weighs an own one, not four
        ("abcd", (1.0, 0.25, 0.25, 0.25, 0.25)),
        ("aabc", (1.0, 0.5, 0.25, 0.25)),
        ("aaaa", (1.0, 1.0)),
        ("aaaaaab", (1.0, 1.0, 0.25)),  # no peer weighs more than this node
    ],
)
def test_peers_weigh_by_the_number_of_their_groups(
    policy: Policy, make_training_group: Make, sources: str, expected: tuple[float, ...]
) -> None:
    groups = [make_training_group(source, seed=seed) for seed, source in enumerate(["own"] * 4 + [*sources])]
    assert collate(groups, SETTINGS.weight, policy).lambda_S == expected


def test_rollout_means(policy: Policy, make_training_group: Make) -> None:
    group = make_training_group(seed=1)
    by_rollout = dataclasses.replace(SETTINGS, own=dppo_tv(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN))
    batch = collate([group], SETTINGS.weight, policy)
    assert loss_scales(batch, by_rollout).tolist() == pytest.approx(
        [1 / (4 * length) for length in lengths(group)]
    )
    constant = dataclasses.replace(SETTINGS, own=dppo_tv(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM))
    assert loss_scales(batch, constant).tolist() == pytest.approx([1 / (4 * 16)] * 4)


def test_without_own_groups_nothing_is_usual(policy: Policy, make_training_group: Make) -> None:
    group = make_training_group("peer", treatment=Treatment.GRAFT)
    batch = collate([group], SETTINGS.weight, policy)
    assert batch.own_mean_logprobs_N.tolist() == []
    assert batch.lambda_S == (1.0,)
    assert not batch.own_B.any()
    assert torch.equal(batch.source_B, torch.zeros(4, dtype=torch.int64))


def test_a_bad_group_of_a_peer_is_left_out_and_named(policy: Policy, make_training_group: Make) -> None:
    own, good = make_training_group(seed=1), make_training_group("good", seed=2)
    bad = make_training_group("bad", seed=3, trust=float("nan"))
    batch = collate([own, bad, good], SETTINGS.weight, policy)
    assert batch.groups == (own, good)
    [(source, error)] = batch.refused
    assert (source, error.group, error.reason) == ("bad", "group3", "training_data")


def test_a_bad_own_group_is_our_bug(policy: Policy, make_training_group: Make) -> None:
    own = make_training_group(seed=1, rewards=(0.0, 0.0, 0.0, 5000.0))
    with pytest.raises(TrainingDataError, match="reward 5000"):
        collate([own], SETTINGS.weight, policy)


def test_a_peers_group_that_teaches_nothing_is_left_out(policy: Policy, make_training_group: Make) -> None:
    own, idle = (make_training_group(source, advantages=(0.0,) * 4) for source in ("own", "peer"))
    batch = collate([own, idle], SETTINGS.weight, policy)
    assert (batch.groups, batch.refused) == ((own,), ())


def test_empty_batch(policy: Policy) -> None:
    with pytest.raises(ValueError, match="at least one group"):
        collate([], SETTINGS.weight, policy)


def test_dr_grpo_divides_by_a_constant_length(policy: Policy, make_training_group: Make) -> None:
    """B25: A = r - mean, sum of token losses / (G x max_new_tokens), for own groups and for `compat`.

    One own group of 4 rollouts and one of a peer's, rewards (1, 0, 0, 0), 9 tokens at most: each token of the
    right rollout has the factor 0.75 / (4 x 9), however long the rollout is."""
    config = load_config([], {"weight.advantage": "dr_grpo"})
    charter = found(Identity.generate(), bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)
    assert charter.max_new_tokens == 9
    settings = train_settings(config, charter)
    rewards = (1.0, 0.0, 0.0, 0.0)
    drawn = make_training_group(seed=1)
    own = dataclasses.replace(drawn, rewards=rewards)
    theirs = dataclasses.replace(own, source="peer", trust=0.5)
    groups = ByGroup(dataclasses.replace(settings.weight, force=Treatment.COMPAT)).treat([own, theirs])
    batch = collate(groups, settings.weight, policy)
    assert (loss_scales(batch, settings) * batch.advantages_B).tolist() == pytest.approx(
        [0.75 / 36, -0.25 / 36, -0.25 / 36, -0.25 / 36, 0.375 / 36, -0.125 / 36, -0.125 / 36, -0.125 / 36]
    )
    plain = train_settings(load_config([], {"weight.advantage": "grpo"}), charter)
    assert {plain.own.aggregation, plain.compat.aggregation} == {Aggregation.TOKEN_MEAN}
