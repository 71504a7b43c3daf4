"""From accepted groups to training groups: tokens of this policy, and numbers that must not pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from node.rollout.policy import Policy
from node.weight.groups import OWN_SOURCE, Kind, training_group
from protocol.messages import FinishReason
from tests.node.verify.world import rollout
from tests.node.weight.conftest import ALICE, ME, TOKENS, accepted, lineage_of


def test_same_tokenizer_keeps_ids_and_logprobs(policy: Policy) -> None:
    theirs = accepted(
        policy, ALICE, [1.0], rollouts=[rollout([9, 7, 1], [-0.5, -0.25, -0.125], reward=1e30, version=4)]
    )
    group = training_group(theirs, policy)
    [made] = group.rollouts
    assert made.tokens_T.tolist() == [9, 7, 1]
    assert made.tokens_T.dtype == np.int64
    assert made.behaviour_T is not None
    assert made.behaviour_T.tolist() == [-0.5, -0.25, -0.125]
    assert made.behaviour_sum == -0.875
    assert made.versions_T is not None
    assert made.versions_T.tolist() == [4, 4, 4]
    assert (group.source, group.kind, group.rewards) == (ALICE, Kind.FOREIGN, (1.0,))
    assert group.prompt_ids == tuple(policy.encode_prompt("12+3"))
    assert group.same_tokenizer


def test_another_tokenizers_text_is_tokenised_again(policy: Policy, other_policy_path: Path) -> None:
    other = Policy.open(other_policy_path)
    ids = other.encode_completion("42", True)
    assert ids != [9, 7, 1]
    theirs = accepted(
        policy,
        ALICE,
        [0.0, 1.0],
        lineage=lineage_of(policy, ALICE, other.tokenizer_digest),
        rollouts=[
            rollout(ids, [-1.0, -2.0, -0.5], text="42", finish=FinishReason.STOP, reward=0.0),
            rollout(ids[:-1], [-1.0, -2.0], text="42", finish=FinishReason.LENGTH, reward=1.0),
        ],
    )
    stopped, cut = training_group(theirs, policy).rollouts
    # The end token stands on both sides, exactly if the completion was finished.
    assert (stopped.tokens_T.tolist(), stopped.behaviour_sum) == ([9, 7, 1], -3.5)
    assert (cut.tokens_T.tolist(), cut.behaviour_sum) == ([9, 7], -3.0)
    assert stopped.behaviour_T is stopped.versions_T is None


def test_a_group_of_this_lineage_is_own_or_a_followers(policy: Policy) -> None:
    ours = lineage_of(policy, ME)
    own = training_group(accepted(policy, ME, [1.0]), policy)
    followers = training_group(accepted(policy, ALICE, [1.0], lineage=ours), policy, follower=True)
    assert (own.source, own.kind) == (OWN_SOURCE, Kind.OWN)
    assert (followers.source, followers.kind) == (ALICE, Kind.FOLLOWER)
    assert followers.rollouts[0].tokens_T.tolist() == TOKENS
