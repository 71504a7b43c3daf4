"""Groups that claim this node's own policy: what its owner refuses, and what it must not refuse."""

from __future__ import annotations

import msgspec
import pytest

from node.peers.trust import Hardness
from node.share.heard import Heard
from node.verify.base import Decision, Verdict
from node.verify.coincidence import COPY_NATS, evidence_nats
from node.verify.copies import Copies
from node.verify.freshness import Freshness
from node.verify.lineage import LineageClaim, OwnPolicy
from node.verify.schema import Schema
from protocol.messages import RolloutGroup
from protocol.rollouts import parse_tokens
from tests.node.verify.test_copies import SURE, print_of
from tests.node.verify.test_plausibility import CharacterPolicy, FlatEngine
from tests.node.verify.world import World, announcement_of, candidate, heard, rollout

replace = msgspec.structs.replace
VERSION = 7


@pytest.fixture
def own(world: World, alice: str) -> OwnPolicy:
    return own_policy(world, alice, VERSION)


def own_policy(world: World, owner: str, version: int) -> OwnPolicy:
    """A policy of this version, whose engine finds every token plausible."""
    engine = FlatEngine(-1.0)
    engine.policy_version = version
    return OwnPolicy(world.lineage(owner), CharacterPolicy(), engine)


def claim(world: World, owner: str, sender: str, version: int, **changes: str) -> Heard:
    group = replace(world.group(sender), lineage=replace(world.lineage(owner), **changes))
    announcement = announcement_of(replace(group, policy_version=version, oldest_version=version), b"body")
    return heard(sender, announcement)


@pytest.mark.parametrize(
    ("version", "reason"), [(0, ""), (7, ""), (8, "future_version"), (2**62, "future_version")]
)
def test_a_version_that_was_never_made(world, alice, bob, own, version, reason):
    verdict: Verdict = LineageClaim(own).check(claim(world, alice, bob, version))
    assert verdict.reason == reason
    assert verdict.blames_author == (verdict.decision is not Decision.SUSPECT)


@pytest.mark.parametrize("field", ["base_model", "tokenizer"])
def test_our_name_on_another_model(world, alice, bob, own, field):
    verdict = LineageClaim(own).check(claim(world, alice, bob, 1, **{field: "0" * 64}))
    assert verdict.reason == "other_model"


def test_other_lineages_and_nodes_without_one_are_not_asked(world, alice, bob, own):
    assert LineageClaim(own).check(claim(world, bob, bob, 99)).reason == ""
    assert LineageClaim(None).check(claim(world, alice, bob, 99)).reason == ""


def test_a_followers_lag_is_measured_against_the_version_the_owner_has(world, alice, bob):
    """64 versions are allowed. What the follower announced before says nothing."""
    freshness = Freshness(*world.member(), own_policy(world, alice, 100))
    assert freshness.check(claim(world, alice, bob, 36)).reason == ""
    assert freshness.check(claim(world, alice, bob, 35)).reason == "stale"
    assert freshness.check(claim(world, bob, bob, 35)).reason == ""


def test_a_followers_group_goes_through_every_check(world, alice, bob, own):
    verifier = world.verifier(own=own)
    group = replace(world.group(bob), lineage=own.lineage)
    judgement = verifier.judge(candidate(group))
    assert judgement.accepted
    checks = [outcome.check for outcome in judgement.checks]
    assert checks[:4] == ["schema", "lineage", "environment", "freshness"]
    assert {"copies", "prompt", "tokens", "reward"} <= set(checks)
    ahead = replace(world.group(bob, slot=1, version=8), lineage=own.lineage)
    assert verifier.judge(candidate(ahead)).reason == "future_version"
    observed = verifier.observe(candidate(ahead).heard)
    assert (observed.reason, observed.blames_author) == ("future_version", True)


def nats(earlier: RolloutGroup, later: RolloutGroup) -> float:
    return evidence_nats(print_of(later), print_of(earlier))


def test_equal_weights_of_one_lineage_are_no_evidence_of_copying(world, alice, bob):
    """Two followers at one version give equal log-probabilities to equal tokens; of two lineages of one base
    model that happens at version 0 only."""
    groups = (world.group(alice, SURE, version=3, base="same", slot=slot) for slot in range(16))
    pairs = ((one, replace(one, author=bob)) for one in groups)
    # A group that this policy may well draw twice: there is evidence in equal numbers only.
    one, same = next(each for each in pairs if nats(*each) < COPY_NATS / 2)
    foreign = replace(same, lineage=replace(one.lineage, owner=bob))
    assert nats(one, foreign) >= COPY_NATS
    # Nor does it help to name the victim's lineage, for whoever is not believed.
    assert evidence_nats(print_of(same), print_of(one), believed=False) >= COPY_NATS


def test_only_a_trusted_follower_may_repeat_its_lineages_numbers(world, alice, bob):
    """The same short answers with the same numbers: of a follower they may be its own."""
    slots = (world.group(alice, SURE, version=3, base="same", slot=slot) for slot in range(16))
    one, same = next(
        pair for pair in ((each, replace(each, author=bob)) for each in slots) if nats(*pair) < COPY_NATS / 2
    )
    _, peers = world.member()
    copies = Copies(peers.may_claim)
    copies.remember(one, [parse_tokens(each) for each in one.rollouts], arrived_at=1)
    copy = Schema(world.charter).open(candidate(same, arrived_at=2))
    reasons = []
    for _ in range(9):
        reasons.append(copies.check(copy).reason)
        peers.judged(bob, Hardness.ACCEPTED)
    assert reasons == ["copied"] * 8 + [""]
    peers.judged(bob, Hardness.HARD)
    assert copies.check(copy).reason == "copied"


def test_long_tokens_drawn_twice_convict_a_follower_too(world, alice, bob):
    """Eight different texts of 40 tokens at 0.7 nats: far above what two draws have in common."""
    tokens = [[ord("0") + (7 * number + place) % 10 for place in range(40)] for number in range(8)]
    rollouts = tuple(rollout(each, [-0.7] * 40, reward=0.0, version=3) for each in tokens)
    one = replace(world.group(alice), rollouts=rollouts)
    assert evidence_nats(print_of(replace(one, author=bob)), print_of(one)) >= COPY_NATS
