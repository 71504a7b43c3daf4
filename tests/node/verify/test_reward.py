from __future__ import annotations

import msgspec
import pytest

from node.environment.host import FailureReason
from node.verify.base import Decision, Item, Verdict
from node.verify.reward import Reward
from node.verify.schema import Schema
from protocol.messages import RolloutGroup
from tests.node.verify.world import Judge, World, candidate, item_at

replace = msgspec.structs.replace


def judge(world: World, group: RolloutGroup, host: Judge | None = None) -> Verdict:
    item: Item = Schema(world.charter).open(candidate(group))
    return Reward(item_at, host or world.judge).check(item)


def claim(group: RolloutGroup, rewards: list[float]) -> RolloutGroup:
    rollouts = (replace(each, reward=reward) for each, reward in zip(group.rollouts, rewards, strict=True))
    return replace(group, rollouts=tuple(rollouts))


def test_honest_rewards_are_computed_again(world, alice):
    group = world.group(alice)
    verdict = judge(world, group)
    assert verdict.decision is Decision.ACCEPT
    assert verdict.rewards == tuple(each.reward for each in group.rollouts)
    assert set(verdict.rewards) == {0.0, 1.0}


def test_any_false_claim_is_a_lie(world, alice):
    group = world.group(alice)
    honest = [each.reward for each in group.rollouts]
    for rewards in ([1 - each for each in honest], [honest[0] + 1e-5, *honest[1:]], [1.0] * 8, [1e30] * 8):
        verdict = judge(world, claim(group, rewards))
        assert (verdict.decision, verdict.reason, verdict.blames_author) == (
            Decision.REJECT,
            "false_reward",
            True,
        )
        assert verdict.rewards == tuple(honest)
    assert judge(world, claim(group, [each + 1e-7 for each in honest])).reason == ""


@pytest.mark.parametrize("failure", list(FailureReason))
def test_a_scorers_failure_blames_whoever_is_to_blame(world, alice, failure):
    group = world.group(alice)
    verdict = judge(world, group, Judge({group.rollouts[3].text: failure}))
    assert verdict.reason == f"scorer_{failure.value}"
    assert verdict.blames_author == failure.is_authors_fault
    assert verdict.rewards is None
