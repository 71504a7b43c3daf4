from __future__ import annotations

import msgspec
import pytest

from node.verify.base import Judgement
from protocol.messages import RolloutGroup
from swarm_cli.liar import Liar, Lie
from tests.node.verify.world import (
    EPOCH_MS,
    World,
    candidate,
    identity,
    served,
)

replace = msgspec.structs.replace
HONEST = identity("alice").peer_id
MALLORY = identity("mallory").peer_id


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def liar(world) -> Liar:
    return Liar(world.charter, world.swarm_id, world.lineage(MALLORY))


def raw_material(world: World, kind: Lie) -> RolloutGroup:
    """Another's group for a copy, at a prompt that both answer; else the liar's own."""
    if kind is Lie.COPY:
        slot, _ = world.shared_slots(HONEST, MALLORY)[0]
        return world.group(HONEST, slot=slot, version=2)
    return world.group(MALLORY, version=2)


def judge(world: World, liar: Liar, kind: Lie, *, enabled: bool, honest_first: bool = True) -> Judgement:
    verifier = world.verifier(enabled=enabled)
    group = raw_material(world, kind)
    if kind is Lie.COPY and honest_first:
        assert verifier.judge(candidate(group, EPOCH_MS)).accepted
    made = liar.lie(kind, group)
    assert made is not None
    announcement, body = made
    return verifier.judge(served(MALLORY, announcement, body, EPOCH_MS + 1))


@pytest.mark.parametrize("kind", list(Lie))
def test_each_lie_is_refused_for_its_own_reason(world, liar, kind):
    judgement = judge(world, liar, kind, enabled=True)
    assert not judgement.accepted
    assert judgement.reason == kind.reason
    assert judgement.verdict.blames_author == (kind is not Lie.COPY)  # losing a race is no fault


@pytest.mark.parametrize("kind", list(Lie))
def test_each_lie_is_believed_without_verification(world, liar, kind):
    judgement = judge(world, liar, kind, enabled=False)
    assert judgement.accepted
    assert judgement.rewards == tuple(each.reward for each in judgement.item.group.rollouts)
    assert len(set(judgement.rewards)) > 1


def test_the_three_reasons():
    assert {kind.reason for kind in Lie} == {"false_reward", "copied", "tampered_prompt"}


def test_everything_else_about_a_copy_is_right(world, liar):
    """Nobody but the copy check can tell: before the honest group is known, the copy is accepted."""
    judgement = judge(world, liar, Lie.COPY, enabled=True, honest_first=False)
    assert judgement.accepted


def test_everything_else_about_false_rewards_is_right(world):
    group = raw_material(world, Lie.FALSE_REWARD)
    assert world.verifier().judge(candidate(group)).accepted


def test_rewards_are_turned_upside_down(world, liar):
    group = raw_material(world, Lie.FALSE_REWARD)
    announcement, _ = liar.lie(Lie.FALSE_REWARD, group)
    assert announcement.rewards == tuple(1 - each.reward for each in group.rollouts)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_alike_rewards_become_mixed_so_that_somebody_fetches_them(world, liar, reward):
    group = raw_material(world, Lie.FALSE_REWARD)
    group = replace(group, rollouts=tuple(replace(each, reward=reward) for each in group.rollouts))
    announcement, body = liar.lie(Lie.FALSE_REWARD, group)
    assert announcement.rewards == (reward, 1 - reward) * 4
    assert announcement.body.size == len(body)


def test_a_prompt_that_is_not_the_liars_cannot_be_copied(world, liar):
    shared = {slot for slot, _ in world.shared_slots(HONEST, MALLORY)}
    slot = next(slot for slot in range(world.charter.slots_per_window) if slot not in shared)
    assert liar.lie(Lie.COPY, world.group(HONEST, slot=slot)) is None
    assert liar.lie(Lie.COPY, world.group(MALLORY)) is None


def test_a_group_of_alike_rewards_makes_no_other_lie(world, liar):
    group = raw_material(world, Lie.WRONG_INDEX)
    group = replace(group, rollouts=tuple(replace(each, reward=0.0) for each in group.rollouts))
    assert liar.lie(Lie.WRONG_INDEX, group) is None
    assert liar.lie(Lie.EASY_QUESTION, group) is None
