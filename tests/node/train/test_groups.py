"""From verified records to training groups: decoding, re-tokenising, treatment, advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.rollout.policy import Policy
from node.train.groups import (
    OWN_SOURCE,
    TrainingDataError,
    TrainingGroup,
    TrainingRollout,
    check_group,
    choose_treatment,
    external_group,
    own_group,
    training_rollouts,
)
from node.train.settings import TrainSettings, Treatment, TreatmentSettings
from protocol.messages import FinishReason, Rollout
from protocol.rollouts import single_turn


def rollout(
    text: str, ids: list[int], logprobs: list[float], finish: FinishReason = FinishReason.STOP
) -> Rollout:
    return single_turn(
        text=text,
        token_ids=np.asarray(ids, "<u4").tobytes(),
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        versions=np.zeros(len(ids), "<u4").tobytes(),
        finish=finish,
        reward=1e30,  # claimed, hence never read
        seed=0,
    )


def test_same_tokenizer_keeps_ids_and_logprobs(policy: Policy) -> None:
    [made] = training_rollouts(
        "g", [rollout("42", [9, 7, 1], [-0.5, -0.25, -0.125])], policy, same_tokenizer=True
    )
    assert made.tokens_T.tolist() == [9, 7, 1]
    assert made.behaviour_T is not None
    assert made.behaviour_T.tolist() == [-0.5, -0.25, -0.125]
    assert made.behaviour_sum == -0.875


def test_other_tokenizer_retokenises_the_text(policy: Policy, other_policy_path: Path) -> None:
    other = Policy.open(other_policy_path)
    assert other.tokenizer_digest != policy.tokenizer_digest
    theirs = other.encode_completion("42", True)
    assert theirs != [9, 7, 1]
    [stopped, cut] = training_rollouts(
        "g",
        [
            rollout("42", theirs, [-1.0, -2.0, -0.5]),
            rollout("42", theirs[:-1], [-1.0, -2.0], FinishReason.LENGTH),
        ],
        policy,
        same_tokenizer=False,
    )
    # the end token stands on both sides, exactly if the completion was finished
    assert stopped.tokens_T.tolist() == [9, 7, 1]
    assert stopped.behaviour_sum == -3.5
    assert cut.tokens_T.tolist() == [9, 7]
    assert cut.behaviour_sum == -3.0
    assert stopped.behaviour_T is None


@pytest.mark.parametrize(
    ("ids", "logprobs"), [(b"", b""), (b"\0" * 5, b"\0" * 4), (b"\0" * 4, b"\0" * 8), (b"\0" * 8, b"\0" * 3)]
)
def test_arrays_of_wrong_length(policy: Policy, ids: bytes, logprobs: bytes) -> None:
    broken = single_turn(
        text="1", token_ids=ids, logprobs=logprobs, versions=b"", finish=FinishReason.STOP, reward=0.0, seed=0
    )
    for same_tokenizer in (True, False):
        with pytest.raises(TrainingDataError, match="group g"):
            training_rollouts("g", [broken], policy, same_tokenizer=same_tokenizer)


@pytest.mark.parametrize(
    ("peer", "own", "treatment"),
    [
        ([0.0, 1.0], None, Treatment.COMPAT),
        ([0.0, 1.0], [0.0, 0.0], Treatment.GRAFT),
        ([1.0, 1.0], [0.0, 0.0], Treatment.HACPO),
        ([0.0, 1.0], [0.0, 1.0], Treatment.HACPO),
        ([0.0, 0.0], [1.0, 1.0], Treatment.HACPO),
    ],
)
def test_treatment(peer: list[float], own: list[float] | None, treatment: Treatment) -> None:
    assert choose_treatment(peer, own, TreatmentSettings(), same_tokenizer=True) is treatment


def test_treatment_can_be_forced() -> None:
    def chosen(
        own: list[float] | None,
        same_tokenizer: bool = True,
        peer: tuple[float, ...] = (0.0, 1.0),
        **values: Any,
    ) -> Treatment:
        return choose_treatment(peer, own, TreatmentSettings(**values), same_tokenizer=same_tokenizer)

    for force in Treatment:
        assert chosen([0.0, 1.0], force=force) is force
    assert chosen(None, force=Treatment.HACPO) is Treatment.COMPAT
    assert chosen([0.0, 1.0], same_tokenizer=False, force=Treatment.OWN) is Treatment.COMPAT
    assert chosen([0.0, 1.0], same_tokenizer=False, force=Treatment.HACPO) is Treatment.HACPO
    assert chosen([0.1, 0.0], failure_reward=0.1) is Treatment.GRAFT


def group_of(rewards: list[float], own: list[float] | None, policy: Policy, **settings: object) -> object:
    rollouts = training_rollouts(
        "g", [rollout("4", [9, 1], [-1, -1])] * len(rewards), policy, same_tokenizer=True
    )
    return external_group(
        "peer",
        "g",
        [2, 3],
        rollouts,
        rewards,
        TreatmentSettings(**settings),  # type: ignore[arg-type]
        own_rewards=own,
        capability={OWN_SOURCE: 0.3, "peer": 0.6},
        trust=0.5,
    )


def test_source_advantages_where_no_prompt_is_shared(policy: Policy) -> None:
    made = group_of([1.0, 0.0, 0.0, 0.0], None, policy)
    assert made.treatment is Treatment.COMPAT
    assert not made.prompt_shared
    assert made.advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_graft_keeps_source_advantages(policy: Policy) -> None:
    made = group_of([1.0, 0.0, 0.0, 0.0], [0.0] * 4, policy, advantage="dr_grpo")
    assert made.treatment is Treatment.GRAFT
    assert made.prompt_shared
    assert made.advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_hacpo_advantages_are_joint(policy: Policy) -> None:
    """The case of test_advantage.test_capability_aware with a = peer: omega(peer, own) = 2."""
    made = group_of([1.0, 0.0], [1.0, 1.0], policy)
    assert made.treatment is Treatment.HACPO
    assert made.advantages == pytest.approx([-1.0, -5.0], abs=1e-4)


def test_no_signal_no_advantage(policy: Policy) -> None:
    assert group_of([0.3, 0.3, 0.3], None, policy).advantages == (0.0, 0.0, 0.0)
    made = own_group("g", [2, 3], (), [0.7], TreatmentSettings())
    assert made.source == OWN_SOURCE
    assert made.advantages == (0.0,)


# --- the estimator that leaves a rollout out ---------------------------------------------------------------


def named(rewards: list[float], policy: Policy) -> tuple[TrainingRollout, ...]:
    """Rollouts that can be told apart by their first token, 10 for the first one."""
    made = [rollout("4", [10 + place, 1], [-1, -1]) for place in range(len(rewards))]
    return training_rollouts("g", made, policy, same_tokenizer=True)


def left(group: TrainingGroup) -> list[int]:
    """Places of the rollouts that are left."""
    return [int(each.tokens_T[0]) - 10 for each in group.rollouts]


@pytest.mark.parametrize(
    ("rewards", "kept", "advantages"),
    [
        # median 0.5; deviation 0.5
        ([1.0, 0.5, 0.0], [0, 2], [1.0, -1.0]),
        # the median is the first 0; deviation sqrt(0.2)
        ([0.0, 0.0, 1.0, 0.0, 0.0], [1, 2, 3, 4], [0.0, 5**0.5, 0.0, 0.0]),
        # alike: any may go
        ([1.0, 1.0, 1.0], [1, 2], [0.0, 0.0]),
    ],
)
def test_mc_grpo_trains_on_all_but_the_median_rollout(
    policy: Policy, rewards: list[float], kept: list[int], advantages: list[float]
) -> None:
    settings = TreatmentSettings(advantage="mc_grpo")
    own = own_group("g", [2, 3], named(rewards, policy), rewards, settings)
    foreign = external_group(
        "peer",
        "g",
        [2, 3],
        named(rewards, policy),
        rewards,
        settings,
        own_rewards=None,
        capability={},
        trust=1.0,
    )
    for group in (own, foreign):
        assert left(group) == kept
        assert group.rewards == tuple(rewards[place] for place in kept)
        assert group.advantages == pytest.approx(advantages, abs=1e-5)
        assert {group.left_out, *kept} == set(range(len(rewards)))
        check_group(group, TrainSettings(), policy)


def test_only_that_estimator_and_only_where_it_is_used_leaves_one_out(policy: Policy) -> None:
    """HACPO's advantages are those of all agents together."""
    rewards = [1.0, 0.5, 0.0]
    assert left(own_group("g", [2, 3], named(rewards, policy), rewards, TreatmentSettings())) == [0, 1, 2]
    shared = external_group(
        "peer",
        "g",
        [2, 3],
        named(rewards, policy),
        rewards,
        TreatmentSettings(advantage="mc_grpo"),
        own_rewards=[0.0, 1.0],
        capability={OWN_SOURCE: 0.5, "peer": 0.5},
        trust=1.0,
    )
    assert shared.treatment is Treatment.HACPO
    assert (left(shared), shared.left_out) == ([0, 1, 2], None)


def test_rewards_that_are_no_numbers_are_still_refused_as_such(policy: Policy) -> None:
    rewards = [1.0, 0.0, float("nan")]
    group = own_group("g", [2, 3], named(rewards, policy), rewards, TreatmentSettings(advantage="mc_grpo"))
    with pytest.raises(TrainingDataError, match="reward nan"):
        check_group(group, TrainSettings(), policy)
    alone = own_group("g", [2, 3], named([0.5], policy), [0.5], TreatmentSettings(advantage="mc_grpo"))
    assert left(alone) == [0]
