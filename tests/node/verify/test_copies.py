from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from node.verify.coincidence import COPY_NATS, GroupPrint, evidence_nats, print_group
from node.verify.copies import Copies
from node.verify.schema import Schema
from protocol.messages import Lineage, PeerId, PromptRef, Rollout, RolloutGroup
from protocol.rollouts import parse_tokens
from tests.node.verify.world import (
    EOS,
    SHIFTED,
    ToyPolicy,
    World,
    candidate,
    fingerprint,
    identity,
    rollout,
)
from tests.rollouts import changed, with_versions

replace = msgspec.structs.replace

SURE = ToyPolicy("alice's", sharpness=2, skill=4)
"""About 24 nats a group of eight: as sure as the tiny policies are in the middle of a run."""
OTHER = ToyPolicy("bob's", sharpness=2, skill=4)


def print_of(group: RolloutGroup, arrived_at: int = 0) -> GroupPrint:
    return print_group(group, [parse_tokens(each) for each in group.rollouts], arrived_at)


def steal(world: World, group: RolloutGroup, thief: PeerId, base: str = "thief") -> RolloutGroup:
    lineage = Lineage(owner=thief, base_model=fingerprint(base), tokenizer=group.lineage.tokenizer)
    return replace(group, author=thief, lineage=lineage)


def shuffled(group: RolloutGroup) -> RolloutGroup:
    rollouts = list(group.rollouts)
    random.Random(0).shuffle(rollouts)
    return replace(group, rollouts=tuple(rollouts))


def with_logprobs(group: RolloutGroup, change: Callable[[np.ndarray], np.ndarray]) -> RolloutGroup:
    def moved(each: Rollout) -> Rollout:
        values = np.minimum(change(np.frombuffer(each.answer.logprobs, dtype="<f4").astype(np.float64)), 0.0)
        return changed(each, logprobs=values.astype("<f4").tobytes())

    return replace(group, rollouts=tuple(map(moved, group.rollouts)))


def prompts(count: int) -> list[PromptRef]:
    return [PromptRef(window=100, slot=0, index=100 + number) for number in range(count)]


def pair(
    world: World, prompt: PromptRef, one: ToyPolicy, other: ToyPolicy, *, version: int = 3, base: str = ""
) -> tuple[RolloutGroup, RolloutGroup]:
    alice, bob = identity("alice").peer_id, identity("bob").peer_id
    first = world.group(alice, one, prompt=prompt, version=version, base=base)
    return first, world.group(bob, other, prompt=prompt, version=version, base=base)


def share_of(group: RolloutGroup, other: RolloutGroup) -> float:
    texts = {each.text for each in other.rollouts}
    return sum(each.text in texts for each in group.rollouts) / len(group.rollouts)


# --- evidence
# ------------------------------------------------------------------------------------------------


def one_text_group(
    world: World, author: PeerId, logprobs: list[list[float]], *, version: int, base: str
) -> RolloutGroup:
    """Rollouts "1", "2", ... with the end token, log-probabilities as given."""
    rollouts = tuple(
        rollout([ord("1") + number, EOS], values, reward=0.0, version=version)
        for number, values in enumerate(logprobs)
    )
    group = world.group(author, version=version, base=base)
    return replace(group, rollouts=rollouts)


def test_drawn_evidence_by_hand(world, alice, bob):
    """Two of two rollouts, 12 nats each. In any order 2! = 2 arrangements would have matched: 24 - ln 2; the
    bound for the same order, 24 - 2 ln 2, is weaker. Same base at version 0, so nothing else counts."""
    logprobs = [[-10.0, -2.0], [-11.0, -1.0]]
    first = one_text_group(world, alice, logprobs, version=0, base="same")
    second = one_text_group(world, bob, logprobs, version=0, base="same")
    assert evidence_nats(print_of(second), print_of(first)) == pytest.approx(24 - np.log(2), abs=1e-5)


def test_equal_evidence_by_hand(world, alice, bob):
    """Certain draws say nothing by themselves. Last bit equal: 10 nats a token beyond 0.001; within 0.001 of
    -0.02: ln(0.02 / 0.002) = 2.30; of -0.0015: below the tolerance's own size, nothing."""
    first = one_text_group(world, alice, [[-0.02, -0.0005], [-0.0015, -0.02]], version=3, base="a")
    equal = one_text_group(world, bob, [[-0.02, -0.0005], [-0.0015, -0.02]], version=3, base="b")
    near = one_text_group(world, bob, [[-0.0205, -0.0004], [-0.001, -0.0195]], version=3, base="b")
    far = one_text_group(world, bob, [[-0.0215, -0.0004], [-0.001, -0.0185]], version=3, base="b")
    assert evidence_nats(print_of(equal), print_of(first)) == pytest.approx(30.0)
    expected = np.log(0.0205 / 0.002) + np.log(0.0195 / 0.002)
    assert evidence_nats(print_of(near), print_of(first)) == pytest.approx(expected, abs=1e-4)
    assert evidence_nats(print_of(far), print_of(first)) == 0.0


def test_a_shared_prefix_counts_once(world, alice, bob):
    tokens = [[ord("1"), EOS], [ord("1"), ord("2")], [ord("1"), EOS]]
    values = [[-0.05, -0.1], [-0.05, -2.5], [-0.05, -0.1]]

    def build(author: PeerId) -> RolloutGroup:
        rollouts = tuple(rollout(*each, reward=0.0, version=1) for each in zip(tokens, values, strict=True))
        return replace(world.group(author, version=1), rollouts=rollouts)

    # drawn: 2.85 nats, less ln 3 arrangements (3! / 2!) = 1.75; equal: three distinct prefixes
    assert evidence_nats(print_of(build(bob)), print_of(build(alice))) == pytest.approx(
        2.85 - np.log(3) + 30, abs=1e-5
    )


def test_less_than_half_is_no_copy(world, alice, bob):
    first = world.group(alice, version=3)
    second = world.group(bob, version=3, prompt=first.prompt)
    mixed = replace(
        second,
        rollouts=(
            *first.rollouts[:3],
            *[
                changed(each, token_ids=b"\7\0\0\0" * 3, logprobs=b"\0" * 12, versions=b"\0" * 12)
                for each in second.rollouts[3:]
            ],
        ),
    )
    assert evidence_nats(print_of(mixed), print_of(first)) == 0.0


# --- honest coincidences and real copies
# ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("one", "other", "version", "base"),
    [
        (SURE, OTHER, 3, ""),
        (ToyPolicy("a", own=0.3, sharpness=3, skill=4), ToyPolicy("b", own=0.3, sharpness=3, skill=4), 3, ""),
        (SURE, SURE, 0, "same"),
        (
            ToyPolicy("a", own=0.3, sharpness=3, skill=4),
            ToyPolicy("b", own=0.3, sharpness=3, skill=4),
            9,
            "same",
        ),
    ],
    ids=["unlike", "alike and very sure", "the same weights", "two branches of the same base"],
)
def test_honest_groups_are_never_copies(world, count, one, other, version, base):
    """However many texts coincide. The largest evidence found in 150 pairs of each kind was 7 of the 20
    nats."""
    shares = []
    for prompt in prompts(count):
        first, second = pair(world, prompt, one, other, version=version, base=base)
        shares.append(share_of(second, first))
        assert evidence_nats(print_of(second), print_of(first)) < COPY_NATS
    if one.sharpness == 3:
        assert np.mean(shares) > 0.7


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_copies_are_found_exact_shuffled_or_jittered(world, bob, count):
    rng = np.random.default_rng(0)
    caught = {"exact": 0, "shuffled": 0, "jittered": 0, "same base claimed": 0}
    for prompt in prompts(count):
        first = world.group(identity("alice").peer_id, SURE, prompt=prompt, version=3)
        copy = steal(world, first, bob)
        jittered = with_logprobs(
            shuffled(copy), lambda values: values + rng.uniform(-9e-4, 9e-4, len(values))
        )
        same_base = replace(copy, lineage=replace(copy.lineage, base_model=first.lineage.base_model))
        attempts = dict(zip(caught, (copy, shuffled(copy), jittered, same_base), strict=True))
        for kind, group in attempts.items():
            caught[kind] += evidence_nats(print_of(group), print_of(first)) >= COPY_NATS
    assert caught["exact"] == caught["shuffled"] == caught["same base claimed"] == count
    assert caught["jittered"] >= 0.9 * count


def test_long_completions_convict_whatever_the_claimed_log_probabilities(world, alice, bob):
    """Eight different texts of 40 tokens, 0.7 nats each, claimed at 1.2: 8 * 40 * 1.2 = 384.
    Less ln 8! = 10.6 in any order, less 8 ln 2 = 5.5 in the same one. Same base at version 0: nothing else
    counts."""
    tokens = [[ord("0") + (7 * number + place) % 10 for place in range(40)] for number in range(8)]
    long = tuple(rollout(each, [-0.7] * 40, reward=0.0) for each in tokens)
    first = replace(world.group(alice, base="same"), rollouts=long)
    copy = with_logprobs(steal(world, first, bob, base="same"), lambda values: values - 0.5)
    found = evidence_nats(print_of(copy), print_of(first))
    assert found == pytest.approx(384 - 8 * np.log(2), abs=1e-3)


def test_the_claimed_tokenizer_changes_nothing(world, alice, bob):
    first = world.group(alice, SURE, version=3)
    copy = steal(world, first, bob)
    copy = replace(copy, lineage=replace(copy.lineage, tokenizer=SHIFTED.digest))
    assert evidence_nats(print_of(copy), print_of(first)) >= COPY_NATS


# --- the index
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def copies() -> Copies:
    return Copies(lambda author, lineage: True)


def remember(copies: Copies, group: RolloutGroup, arrived_at: int) -> None:
    copies.remember(group, [parse_tokens(each) for each in group.rollouts], arrived_at)


def verdict(world: World, copies: Copies, group: RolloutGroup, arrived_at: int) -> str:
    return copies.check(Schema(world.charter).open(candidate(group, arrived_at))).reason


def test_the_first_arrival_wins(world, copies, alice, bob):
    first = world.group(alice, version=3)
    copy = steal(world, first, bob)
    remember(copies, first, arrived_at=10)
    assert verdict(world, copies, copy, arrived_at=11) == "copied"
    assert verdict(world, copies, copy, arrived_at=9) == ""
    assert verdict(world, copies, first, arrived_at=12) == ""  # itself again is the ledger's business


def test_own_completions_in_another_slot_are_replayed(world, copies, alice):
    group = world.group(alice, version=3)
    remember(copies, group, arrived_at=10)
    later = replace(group, prompt=replace(group.prompt, window=101))
    newer = tuple(
        changed(each, versions=np.full(len(each.answer.versions) // 4, 4, dtype="<u4").tobytes())
        for each in group.rollouts
    )
    assert verdict(world, copies, with_versions(replace(later, rollouts=newer)), arrived_at=20) == "replayed"


def test_bounded(world, alice):
    copies = Copies(lambda author, lineage: True, max_prints=5)
    group = world.group(alice)
    for slot in range(20):
        moved = replace(group, prompt=replace(group.prompt, slot=slot))
        remember(copies, moved, slot)
    assert len(copies) == 5
