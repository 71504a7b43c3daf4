"""Treatments and advantages: of one group alone, and HACPO and GRAFT against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from node.weight.by_group import ByGroup
from node.weight.groups import OWN_SOURCE, TrainingGroup, TrainingRollout
from node.weight.settings import Treatment, WeightSettings
from node.weight.shared_prompts import SharedPrompts, choose_treatment
from node.weight.treatment import Treatments, open_treatments

AUTO = WeightSettings()
HACPO = WeightSettings(force=Treatment.HACPO)


def group(
    source: str, rewards: Sequence[float], prompt: int = 1, *, by_token: bool = True, **fields: Any
) -> TrainingGroup:
    """Rollouts can be told apart by their first token, 10 for the first one."""
    rollouts = tuple(
        TrainingRollout(np.array([10 + place, 1]), -2.0, np.full(2, -1.0, np.float32) if by_token else None)
        for place in range(len(rewards))
    )
    made = TrainingGroup(source, source, (2, 3), rollouts, tuple(rewards), prompt=prompt)
    return dataclasses.replace(made, **fields)


def own(rewards: Sequence[float], prompt: int = 1) -> TrainingGroup:
    return group(OWN_SOURCE, rewards, prompt)


def places(made: TrainingGroup) -> list[int]:
    """Places of the rollouts that are left."""
    return [int(each.tokens_T[0]) - 10 for each in made.rollouts]


def near(*advantages: float) -> object:
    return pytest.approx(advantages, abs=1e-4)


# --- one group alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("force", "wanted"),
    [
        (Treatment.OWN, ByGroup),
        (Treatment.COMPAT, ByGroup),
        (Treatment.HACPO, SharedPrompts),
        (Treatment.GRAFT, SharedPrompts),
        (None, SharedPrompts),
    ],
)
def test_prompts_are_only_compared_where_it_is_asked_for(force: Treatment | None, wanted: type) -> None:
    assert type(open_treatments(WeightSettings(force=force))) is wanted


def test_own_and_followers_groups_are_own_others_as_configured() -> None:
    groups = [
        own([0.0, 1.0]),
        group("f", [0.0, 1.0], own_lineage=True),
        group("p", [0.0, 1.0]),
        group("q", [0.0, 1.0], by_token=False),
    ]
    for force, foreign in ((Treatment.OWN, Treatment.OWN), (Treatment.COMPAT, Treatment.COMPAT)):
        made = ByGroup(WeightSettings(force=force)).treat(groups)
        assert [each.treatment for each in made] == [Treatment.OWN, Treatment.OWN, foreign, Treatment.COMPAT]


def test_advantages_come_from_the_groups_own_rewards() -> None:
    """Mean 1/4, unbiased deviation 1/2."""
    treatments = ByGroup(WeightSettings(force=Treatment.COMPAT))
    mixed, alike, one = treatments.treat([group("p", [1.0, 0.0, 0.0, 0.0]), own([0.3] * 3), own([0.7])])
    assert mixed.advantages == near(1.5, -0.5, -0.5, -0.5)
    assert (alike.advantages, one.advantages) == ((0.0, 0.0, 0.0), (0.0,))


@pytest.mark.parametrize(
    ("rewards", "kept", "advantages"),
    [
        # median 0.5; deviation 0.5
        ([1.0, 0.5, 0.0], [0, 2], [1.0, -1.0]),
        # the median is the first 0; deviation sqrt(0.2)
        ([0.0, 0.0, 1.0, 0.0, 0.0], [1, 2, 3, 4], [0.0, 5**0.5, 0.0, 0.0]),
        # alike: any may go
        ([1.0, 1.0, 1.0], [1, 2], [0.0, 0.0]),
        # nobody else would be left
        ([1.0], [0], [0.0]),
    ],
)
@pytest.mark.parametrize("source", [OWN_SOURCE, "p"])
def test_mc_grpo_trains_on_all_but_the_median_rollout(
    source: str, rewards: list[float], kept: list[int], advantages: list[float]
) -> None:
    treatments = ByGroup(WeightSettings(advantage="mc_grpo", force=Treatment.COMPAT))
    [made] = treatments.treat([group(source, rewards)])
    assert places(made) == kept
    assert made.rewards == tuple(rewards[place] for place in kept)
    assert made.advantages == near(*advantages)
    left = set(range(len(rewards))) - set(kept)
    assert made.left_out == (left.pop() if left else None)


# --- HACPO and GRAFT ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "mine", "treatment"),
    [
        ([0.0, 1.0], None, Treatment.COMPAT),
        ([0.0, 1.0], [0.0, 0.0], Treatment.GRAFT),
        ([1.0, 1.0], [0.0, 0.0], Treatment.HACPO),
        ([0.0, 1.0], [0.0, 1.0], Treatment.HACPO),
        ([0.0, 0.0], [1.0, 1.0], Treatment.HACPO),
    ],
)
def test_treatment_by_prompt_and_outcome(
    peer: list[float], mine: list[float] | None, treatment: Treatment
) -> None:
    assert choose_treatment(peer, mine, AUTO, same_tokenizer=True) is treatment


def test_treatment_can_be_forced() -> None:
    def chosen(mine: list[float] | None, same_tokenizer: bool = True, **values: Any) -> Treatment:
        settings = WeightSettings(**values)
        return choose_treatment((0.0, 1.0), mine, settings, same_tokenizer=same_tokenizer)

    for force in Treatment:
        assert chosen([0.0, 1.0], force=force) is force
    assert chosen(None, force=Treatment.HACPO) is Treatment.COMPAT
    assert chosen([0.0, 1.0], same_tokenizer=False, force=Treatment.OWN) is Treatment.COMPAT
    assert chosen([0.0, 1.0], same_tokenizer=False, force=Treatment.HACPO) is Treatment.HACPO
    assert chosen([0.1, 0.0], failure_reward=0.1) is Treatment.GRAFT


@pytest.mark.parametrize("settings", [AUTO, HACPO])
def test_hacpo_gives_both_agents_capability_aware_advantages(settings: WeightSettings) -> None:
    """Own rewards (0, 1), P 1/2; the peer's (0, 0, 0, 1), P 1/4. omega(own, peer) = 2, omega(peer, own) =
    1/2.

    mu_own = (1 + 2 x 1) / 6 = 1/2; mu_peer = (1/2 x 1 + 1) / 6 = 1/4. Of all six rewards the mean is 1/3 and
    the unbiased variance (2 x 4/9 + 4 x 1/9) / 5 = 4/15. Own: (r - 1/2) / std; the peer's: 1/2 of its own
    (r - 1/4) / std."""
    mine, theirs = SharedPrompts(settings).treat([own([0.0, 1.0]), group("p", [0.0, 0.0, 0.0, 1.0])])
    std = (4 / 15) ** 0.5
    assert (mine.treatment, theirs.treatment) == (Treatment.OWN, Treatment.HACPO)
    assert mine.advantages == near(-0.5 / std, 0.5 / std)
    assert theirs.advantages == near(*[0.5 * -0.25 / std] * 3, 0.5 * 0.75 / std)


def test_hacpo_counts_all_agents_that_answered_lately() -> None:
    """P is 1/2 for everybody, so omega is 1: mu and std are those of all six rewards."""
    treatments = SharedPrompts(HACPO)
    treatments.treat([own([0.0, 1.0]), group("p", [1.0, 0.0])])
    [late] = treatments.treat([group("q", [0.0, 1.0])])
    std = 0.3**0.5  # unbiased, of three 0 and three 1
    assert late.treatment is Treatment.HACPO
    assert late.advantages == near(-0.5 / std, 0.5 / std)


def test_own_groups_on_prompts_of_their_own_are_not_compared() -> None:
    treatments = SharedPrompts(HACPO)
    mine, theirs = treatments.treat([own([0.0, 1.0], prompt=1), group("p", [0.0, 1.0], prompt=2)])
    assert mine.advantages == near(-(0.5**0.5), 0.5**0.5)
    assert theirs.treatment is Treatment.COMPAT


def test_graft_keeps_everybodys_own_statistics() -> None:
    """Its gate opens where all own rollouts failed and theirs are mixed."""
    settings = WeightSettings(advantage="dr_grpo")
    mine, theirs = SharedPrompts(settings).treat([own([0.0, 0.0]), group("p", [1.0, 0.0, 0.0, 0.0])])
    assert theirs.treatment is Treatment.GRAFT
    assert theirs.advantages == near(0.75, -0.25, -0.25, -0.25)
    assert mine.advantages == (0.0, 0.0)


def test_the_joint_statistics_keep_the_median_rollout() -> None:
    settings = WeightSettings(advantage="mc_grpo", force=Treatment.HACPO)
    for made in SharedPrompts(settings).treat([own([0.0, 1.0, 0.5]), group("p", [1.0, 0.5, 0.0])]):
        assert (places(made), made.left_out) == ([0, 1, 2], None)


def test_a_followers_group_is_neither_compared_nor_an_agent() -> None:
    """It comes from this node's own policy."""
    mine, followers = SharedPrompts(HACPO).treat([own([0.0, 1.0]), group("f", [0.0, 1.0], own_lineage=True)])
    assert followers.treatment is Treatment.OWN
    assert followers.advantages == mine.advantages == near(-(0.5**0.5), 0.5**0.5)


def test_a_capability_is_that_of_mixed_groups_over_five_steps() -> None:
    """Steps of one own group. omega is 1 where both P are 1/2: after five such groups each, whatever the
    sixth last was. Groups whose rewards are alike do not count, nor does a group that is trained on again."""
    treatments = SharedPrompts(WeightSettings(force=Treatment.HACPO, local_groups=1))
    treatments.treat([own([0.8, 1.0], prompt=0)])
    for prompt in range(1, 5):
        treatments.treat([own([0.0, 1.0], prompt), group("p", [0.0, 1.0], prompt=100 + prompt)])
    treatments.treat([own([1.0, 1.0], prompt=5), group("p", [1.0, 0.9], prompt=105, uses=1)])
    mine, theirs = treatments.treat([own([0.0, 1.0], prompt=6), group("p", [0.0, 1.0], prompt=6)])
    std = (1 / 3) ** 0.5
    for made in (mine, theirs):
        assert made.advantages == near(-0.5 / std, 0.5 / std)


def test_rewards_that_are_no_numbers_are_left_to_the_check() -> None:
    """`check_group` refuses them; nothing is remembered of them."""
    treatments: Treatments = SharedPrompts(HACPO)
    bad, mine = treatments.treat([group("p", [1.0, float("nan")]), own([0.0, 1.0])])
    assert bad.advantages == (0.0, 0.0)
    assert mine.advantages == near(-(0.5**0.5), 0.5**0.5)
