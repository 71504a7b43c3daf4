from __future__ import annotations

import msgspec
import pytest

from node.verify.base import Decision
from node.verify.freshness import Freshness
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.messages import Announcement, PromptRef
from tests.node.verify.world import EPOCH_MS, announcement_of, heard

replace = msgspec.structs.replace


@pytest.fixture
def announcement(world, alice) -> Announcement:
    return announcement_of(world.group(alice), b"body")


@pytest.fixture
def freshness(world) -> Freshness:
    return Freshness(*world.member())


@pytest.mark.parametrize(
    ("window", "reason"),
    [(100, ""), (97, ""), (96, "stale"), (0, "stale"), (106, ""), (107, "future"), (2**63 - 1, "future")],
)
def test_age_in_windows(freshness, announcement, window, reason):
    """Window 100 begins at EPOCH_MS; 3 windows of age and 60 s of skew are allowed."""
    moved = replace(announcement, prompt=PromptRef(window=window, slot=0, index=0))
    verdict = freshness.check(heard(announcement.lineage.owner, moved))
    assert verdict.reason == reason
    assert not (verdict.decision is Decision.REJECT and verdict.blames_author)


def test_the_skew_ends_where_it_is_documented(world, freshness, announcement):
    moved = replace(announcement, prompt=PromptRef(window=101, slot=0, index=0))
    item = heard(announcement.lineage.owner, moved)
    world.clock.now = EPOCH_MS + 10_000 - MAX_CLOCK_SKEW_MS
    assert freshness.check(item).reason == ""
    world.clock.now -= 1
    assert freshness.check(item).reason == "future"


def test_lag_is_measured_against_the_lineages_own_newest(world, alice, bob, announcement):
    membership, peers = world.member()
    freshness = Freshness(membership, peers)

    def reason(version: int = 0, **changes: object) -> str:
        changed = replace(announcement, policy_version=version, oldest_version=version, **changes)
        return freshness.check(heard(announcement.lineage.owner, changed)).reason

    assert reason() == ""  # nothing heard yet: behind nothing
    newest = replace(announcement, policy_version=100, prompt=PromptRef(window=100, slot=1, index=0))
    peers.announced(alice, newest)
    assert reason(36) == ""
    assert reason(35) == "stale"
    # another lineage of the same author, and another author, are not behind anything
    other = replace(announcement.lineage, base_model="0" * 64)
    assert reason(lineage=other) == ""
    foreign = replace(announcement, lineage=replace(announcement.lineage, owner=bob))
    assert freshness.check(heard(bob, foreign)).reason == ""
