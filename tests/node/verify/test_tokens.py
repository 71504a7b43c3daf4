from __future__ import annotations

import math
from typing import Any

import msgspec

from node.verify.base import Item
from node.verify.schema import Schema
from node.verify.tokens import IMPOSSIBLE_NATS, PrefixConsistency, Tokens
from protocol.messages import FinishReason, RolloutGroup
from tests.node.verify.world import (
    ALPHABET,
    EOS,
    SHIFTED,
    TOKENIZER,
    VOCAB,
    World,
    candidate,
    decode,
    rollout,
)
from tests.rollouts import with_versions

replace = msgspec.structs.replace


def item_of(world: World, group: RolloutGroup) -> Item:
    return Schema(world.charter).open(candidate(group))


def reason(world: World, *token_ids: int, decoders: Any = None, group: RolloutGroup, **changes: Any) -> str:
    logprobs = changes.pop("logprobs", [-1.0] * len(token_ids))
    changed = rollout(token_ids, logprobs, reward=group.rollouts[0].reward, **changes)
    lie = replace(group, rollouts=(changed, *group.rollouts[1:]))
    decoders = {TOKENIZER.digest: decode} if decoders is None else decoders
    return Tokens(world.charter, decoders).check(item_of(world, lie)).reason


def test_honest_groups_pass(world, alice):
    for slot in range(4):
        group = world.group(alice, slot=slot)
        assert {each.finish for each in group.rollouts} >= {FinishReason.STOP}
        assert Tokens(world.charter, {TOKENIZER.digest: decode}).check(item_of(world, group)).reason == ""


def test_ids_lie_in_the_charters_vocabulary(world, alice):
    group = world.group(alice)
    assert reason(world, VOCAB - 1, EOS, group=group) == ""
    assert reason(world, VOCAB, EOS, group=group, text="x") == "token_range"
    assert reason(world, 2**32 - 1, EOS, group=group, text="x") == "token_range"
    wide = replace(group, lineage=replace(group.lineage, tokenizer=SHIFTED.digest))
    assert reason(world, VOCAB, EOS, group=wide) == ""


def test_the_end_token_ends_and_nothing_else_does(world, alice):
    group, one = world.group(alice), ALPHABET[1]
    assert reason(world, one, EOS, group=group) == ""
    assert reason(world, EOS, group=group) == ""
    assert reason(world, one, one, one, one, one, group=group) == ""
    assert reason(world, one, EOS, one, EOS, group=group) == "termination"
    assert reason(world, one, group=group, finish=FinishReason.STOP) == "termination"
    assert reason(world, one, group=group, finish=FinishReason.LENGTH) == "termination"
    assert reason(world, one, one, one, one, EOS, group=group, finish=FinishReason.LENGTH) == "termination"
    assert reason(world, one, one, one, one, EOS, group=group) == ""


def test_text_must_follow_from_the_tokens_where_the_tokenizer_is_here(world, alice):
    group, one = world.group(alice), ALPHABET[1]
    assert reason(world, one, EOS, group=group, text="2") == "text_mismatch"
    assert reason(world, one, EOS, group=group, text="1 ") == "text_mismatch"
    assert reason(world, one, EOS, group=group, text="2", decoders={}) == ""


def test_log_probabilities_that_no_sampler_draws(world, alice):
    """With V tokens, those below e**-b together have at most V * e**-b: b = ln V + 40 is 44.85 for V =
    128."""
    group = world.group(alice)
    lowest = -(math.log(128) + IMPOSSIBLE_NATS)
    assert math.isclose(lowest, -44.852, abs_tol=1e-3)
    for logprob in (-1.0, lowest + 0.01):
        assert reason(world, ALPHABET[1], EOS, group=group, logprobs=[-1.0, logprob]) == ""
    for logprob in (lowest - 0.01, -1e30):
        assert reason(world, ALPHABET[1], EOS, group=group, logprobs=[-1.0, logprob]) == "impossible_logprobs"


def test_a_group_must_not_contradict_itself(world, alice):
    group = world.group(alice)
    check = PrefixConsistency()
    assert check.check(item_of(world, group)).reason == ""

    def with_pair(one: float, other: float, versions: tuple[int, int] = (0, 0)) -> str:
        pair = tuple(
            rollout([ord("x"), EOS], [-1.0, logprob], reward=0.0, version=version)
            for logprob, version in zip((one, other), versions, strict=True)
        )
        lie = with_versions(replace(group, rollouts=(*pair, *group.rollouts[2:])))
        return check.check(item_of(world, lie)).reason

    assert with_pair(-2.0, -2.2) == ""
    assert with_pair(-2.0, -0.1) == "inconsistent_logprobs"
    assert with_pair(-2.0, -0.1, versions=(0, 1)) == ""  # the weights changed in between
