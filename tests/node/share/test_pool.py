"""The replay pool: bounded, each group used so often, peers drawn before groups."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from node.share.accepted import Accepted
from node.share.pool import ReplayPool
from protocol.messages import RolloutGroup
from tests.node.verify.world import World, identity

TEMPLATE = World(group_size=2).group(identity("template").peer_id)


def pooled(author: str, number: int) -> Accepted:
    """Group `number` of an author; larger numbers arrived later."""
    group: RolloutGroup = msgspec.structs.replace(TEMPLATE, author=author)
    return Accepted(f"{author}{number:04}", group, (), (0.0, 1.0), arrived_at=number)


def filled(capacity: int = 200, max_uses: int = 2, seed: int = 0, **counts: int) -> ReplayPool:
    pool = ReplayPool(capacity, max_uses, random.Random(seed))
    for author, count in counts.items():
        for number in range(count):
            pool.add(pooled(author, number))
    return pool


def authors(pool: ReplayPool, count: int) -> Counter[str]:
    return Counter(group.group.author for group, _ in pool.draw(count))


# --- bounds ------------------------------------------------------------------------------------------------


def test_when_full_the_oldest_arrival_leaves() -> None:
    pool = filled(capacity=3, a=5)
    assert len(pool) == 3
    assert [f"a{number:04}" in pool for number in range(5)] == [False, False, True, True, True]


def test_each_group_is_drawn_max_uses_times_and_knows_how_often_it_was() -> None:
    pool = filled(max_uses=2, a=2)
    first, second = pool.draw(9), pool.draw(9)
    assert sorted(group.digest for group, _ in first) == ["a0000", "a0001"]
    assert [uses for _, uses in first] == [0, 0]
    assert [uses for _, uses in second] == [1, 1]
    assert pool.draw(9) == []
    assert len(pool) == 0


def test_a_group_that_is_there_is_not_taken_in_again() -> None:
    pool = filled(max_uses=2, a=1)
    pool.draw(1)
    pool.add(pooled("a", 0))
    assert pool.unused() == 0
    assert [uses for _, uses in pool.draw(1)] == [1]
    assert len(pool) == 0


def test_unused_groups_are_counted_by_author() -> None:
    pool = filled(a=3, b=2)
    assert (pool.unused(), pool.unused("a"), pool.unused("b"), pool.unused("c")) == (5, 3, 2, 0)
    pool.draw(2)  # one of each
    assert (pool.unused(), pool.unused("a"), pool.unused("b")) == (3, 2, 1)


def test_discard_removes_and_returns_what_is_unfit() -> None:
    pool = filled(a=3, b=2)
    gone = pool.discard(lambda group: group.arrived_at == 0)
    assert sorted(group.digest for group in gone) == ["a0000", "b0000"]
    assert len(pool) == 3
    assert pool.discard(lambda group: False) == []
    pool.discard(lambda group: group.group.author == "a")
    assert authors(pool, 9) == {"b": 1}


# --- fairness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_peer_with_a_hundred_groups_gets_no_more_than_one_with_five(seed: int) -> None:
    pool = filled(seed=seed, max_uses=1, many=100, few=5)
    drawn = Counter[str]()
    for _ in range(5):  # exactly, by construction, as long as the smaller peer has groups left
        step = authors(pool, 2)
        assert step == {"many": 1, "few": 1}
        drawn += step
    assert drawn == {"many": 5, "few": 5}


def test_the_odd_group_goes_to_either_peer_alike() -> None:
    extra = Counter[str]()
    for seed in range(400):
        step = authors(filled(seed=seed, many=100, few=5), 3)
        assert sorted(step.values()) == [1, 2]
        extra.update(peer for peer, count in step.items() if count == 2)
    assert 150 < extra["many"] < 250  # 200 expected, standard deviation 10


def test_with_fewer_places_than_peers_each_peer_has_its_share() -> None:
    chosen = Counter[str]()
    for seed in range(600):
        chosen += authors(filled(seed=seed, a=50, b=5, c=1), 1)
    assert all(150 < chosen[peer] < 250 for peer in "abc")  # 200 expected, standard deviation 11.5


def test_a_short_peer_leaves_its_place_to_the_others() -> None:
    assert authors(filled(a=10, b=1), 6) == {"a": 5, "b": 1}
    assert sum(authors(filled(a=2, b=1), 99).values()) == 3


def test_of_one_peer_the_least_used_and_then_the_newest_come_first() -> None:
    pool = filled(a=3)
    assert [group.digest for group, _ in pool.draw(2)] == ["a0002", "a0001"]
    pool.add(pooled("a", 9))
    assert [group.digest for group, _ in pool.draw(4)] == ["a0009", "a0000", "a0002", "a0001"]


def test_the_same_seed_draws_the_same() -> None:
    def run() -> list[list[str]]:
        pool = filled(seed=7, a=9, b=9, c=9)
        return [[group.digest for group, _ in pool.draw(2)] for _ in range(8)]

    assert run() == run()
