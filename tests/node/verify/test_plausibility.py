from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from node.rollout.engine.base import TokenSequence
from node.verify.base import Item
from node.verify.plausibility import MAX_BELOW_NATS, Plausibility
from node.verify.schema import Schema
from protocol.messages import RolloutGroup, VerificationRules
from tests.node.verify.world import EOS, SHIFTED, TOKENIZER, World, candidate, rollout

replace = msgspec.structs.replace


class FlatEngine:
    """Every token has the same log-probability at T = 1."""

    def __init__(self, logprob: float, context: int = 100) -> None:
        self.context = context
        self.policy_version = 0
        self.logprob = logprob
        self.calls: list[Sequence[TokenSequence]] = []

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        self.calls.append(sequences)
        return [np.full(len(each.token_ids), self.logprob, dtype=np.float32) for each in sequences]


class HalfPolicy:
    """Another tokenizer: two characters a token."""

    tokenizer_digest = SHIFTED.digest
    vocab_size = 128

    def encode_prompt(self, question: str, task: str) -> list[int]:
        return [1, 2, 3]

    def encode_completion(self, text: str, finished: bool) -> list[int]:
        return [7] * ((len(text) + 1) // 2) + [EOS] * finished


class CharacterPolicy(HalfPolicy):
    tokenizer_digest = TOKENIZER.digest


@pytest.fixture
def world() -> World:
    return World(changes={"temperature": 0.5})


def item_of(world: World, group: RolloutGroup) -> Item:
    return Schema(world.charter).open(candidate(group))


def flat_group(world: World, author: str, logprob: float) -> RolloutGroup:
    """Eight times "1111" and the end token, each token of this log-probability."""
    tokens = [ord("1")] * 4 + [EOS]
    one = rollout(tokens, [logprob] * 5, reward=0.0)
    return replace(world.group(author), rollouts=(one,) * 8)


def check(world: World, policy: HalfPolicy, engine: FlatEngine) -> Plausibility:
    return Plausibility(VerificationRules(max_logprob_gap=4.0), world.max_new_tokens, policy, engine)


def test_same_tokenizer_compares_token_by_token_at_the_authors_temperature(world, alice):
    engine = FlatEngine(-1.5)
    item = item_of(world, flat_group(world, alice, -2.0))
    assert check(world, CharacterPolicy(), engine).distance(item) == pytest.approx((0.0, 5 * 0.5))
    (sequences,) = engine.calls  # one batch
    assert len(sequences) == 8
    assert sequences[0] == TokenSequence((1, 2, 3), (49, 49, 49, 49, 0), 0.5)


def test_with_another_tokenizer_totals_are_compared_by_the_local_count(world, alice):
    """Claimed 5 * -0.2 = -1, local 3 * -1.5 = -4.5 ("11", "11", end): 3.5 nats over 3 tokens."""
    engine = FlatEngine(-1.5)
    item = item_of(world, flat_group(world, alice, -0.2))
    assert check(world, HalfPolicy(), engine).distance(item) == pytest.approx((3.5 / 3, 0.0))
    assert engine.calls[0][0].token_ids == (7, 7, EOS)


@pytest.mark.parametrize(
    ("claimed", "local", "reason"),
    [
        (-1.0, -4.9, ""),
        (-1.0, -5.1, "implausible_logprobs"),  # hides improbable text
        (-2.9, -1.0, "implausible_logprobs"),  # 9.5 nats below: makes the importance ratio explode
        (-2.8, -1.0, ""),
    ],
)
def test_suspect_beyond_the_charters_gap_above_and_beyond_chance_below(world, alice, claimed, local, reason):
    item = item_of(world, flat_group(world, alice, claimed))
    verdict = check(world, CharacterPolicy(), FlatEngine(local)).check(item)
    assert verdict.reason == reason
    assert verdict.decision.value == ("suspect" if reason else "accept")


@pytest.mark.parametrize(("token_ids", "context"), [([7] * 41, 100), ([7] * 8, 10), ([128], 100), ([], 100)])
def test_what_the_local_engine_cannot_take_is_left_out(world, alice, token_ids, context):
    """41 tokens are more than 8 for each of the charter's 5; 3 of the prompt and 8 exceed a context of 10."""

    class Awkward(HalfPolicy):
        def encode_completion(self, text: str, finished: bool) -> list[int]:
            return token_ids

    engine = FlatEngine(-1.0, context)
    assert check(world, Awkward(), engine).distance(item_of(world, flat_group(world, alice, -9.0))) == (0, 0)
    assert engine.calls == []


def test_one_lie_is_not_hidden_behind_small_ones_of_the_other_sign(world, alice):
    """One rollout claimed 14 nats a token too low, the seven others 2 too high: the sum is right."""
    tokens = [ord("1")] * 4 + [EOS]
    claims = [-16.5] + [-0.5] * 7
    rollouts = tuple(rollout(tokens, [claim] * 5, reward=0.0) for claim in claims)
    item = item_of(world, replace(world.group(alice), rollouts=rollouts))
    plausibility = check(world, CharacterPolicy(), FlatEngine(-2.5))
    assert plausibility.distance(item) == pytest.approx((2.0, 5 * 14.0))
    assert plausibility.check(item).reason == "implausible_logprobs"


def test_an_honest_author_of_any_model_is_hardly_ever_below():
    """It sampled from what it claims: whatever the two models are, the local value is K nats higher with a
    chance of at most exp(-K)."""
    rng = np.random.default_rng(0)
    count, length, words = 4_000, 6, 50
    worst = 0.0
    for sharpness in (0.5, 2.0, 6.0):  # of unlike models, from nearly flat to nearly sure
        theirs, ours = rng.standard_normal((2, length, words)) * sharpness
        theirs -= np.logaddexp.reduce(theirs, axis=1, keepdims=True)
        ours -= np.logaddexp.reduce(ours, axis=1, keepdims=True)
        drawn = (theirs[None] + rng.gumbel(size=(count, length, words))).argmax(-1)
        places = np.arange(length)
        below = (ours[places, drawn] - theirs[places, drawn]).sum(-1)
        for nats in (2.0, 4.0):
            assert (below > nats).mean() <= np.exp(-nats) * 1.1
        worst = max(worst, float((below > MAX_BELOW_NATS).mean()))
    assert worst <= 1e-4
