"""Plausibility with a real engine: honest groups lie near 0, strangers somewhere, inventions far away."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.verify.base import Item
from node.verify.plausibility import Plausibility
from protocol.messages import Lineage, RolloutGroup, Sampling
from protocol.rollouts import parse_tokens
from tests.node.verify.world import EPOCH_MS, World, announcement_of
from tests.rollouts import changed

pytestmark = pytest.mark.slow

replace = msgspec.structs.replace


def generate(world: World, author: str, policy: Policy, engine: TransformersEngine) -> RolloutGroup:
    group = world.group(author)
    sampling = Sampling(max_new_tokens=12, temperature=0.7)
    request = GenerationRequest(tuple(policy.encode_prompt(group.question)), 8, 5, sampling)
    rollouts = tuple(engine.generate([request])[0])
    lineage = Lineage(owner=author, base_model=policy.base_model, tokenizer=policy.tokenizer_digest)
    return replace(group, sampling=sampling, rollouts=rollouts, lineage=lineage)


def item_of(group: RolloutGroup) -> Item:
    arrays = tuple(parse_tokens(each) for each in group.rollouts)
    return Item(group.author, announcement_of(group, b"body"), EPOCH_MS, "d" * 64, group, arrays)


def test_own_and_foreign_engines(world, alice, tiny_policy_path: Path, other_policy_path: Path):
    policy, foreign = Policy.open(tiny_policy_path), Policy.open(other_policy_path)
    engine, foreign_engine = TransformersEngine(policy), TransformersEngine(foreign)
    check = Plausibility(world.charter.rules, 12, policy, engine)
    honest = generate(world, alice, policy, engine)
    assert max(check.distance(item_of(honest))) < 1e-2
    stranger = generate(world, alice, foreign, foreign_engine)
    assert stranger.lineage.tokenizer != policy.tokenizer_digest
    distance = check.distance(item_of(stranger))
    assert 1e-3 < distance.above < 20
    assert distance.below < 5
    invented = tuple(
        changed(each, logprobs=(parse_tokens(each).logprobs_T - 6).tobytes()) for each in honest.rollouts
    )
    suspicious = check.check(item_of(replace(honest, rollouts=invented)))
    assert suspicious.reason == "implausible_logprobs"
    engine.close()
    foreign_engine.close()
