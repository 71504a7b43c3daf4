"""Counting each envelope once, in bounded memory, under floods."""

from __future__ import annotations

import random

import pytest

from protocol.constants import MAX_CLOCK_SKEW_MS, MAX_TTL_MS
from protocol.errors import DecodeError, FreshnessError, ReplayError
from protocol.replay import REPLAY_HORIZON_MS, ReplayCache
from tests.protocol.samples import NOW_MS


def peer(number: int) -> str:
    return f"{number:052d}"


HONEST = peer(1)


def admitted(cache: ReplayCache, sender: str, sequence: int, at: int = NOW_MS, **times: int) -> bool:
    created_at = times.get("created_at", at)
    try:
        cache.admit(sender, sequence, created_at, times.get("expires_at", created_at + 60_000), at)
    except ReplayError:
        return False
    return True


def test_second_time_is_refused_for_its_sender_only() -> None:
    cache = ReplayCache()
    assert admitted(cache, HONEST, 5)
    assert not admitted(cache, HONEST, 5)
    assert admitted(cache, peer(2), 5)
    assert admitted(cache, HONEST, 6)
    assert admitted(cache, HONEST, 4), "gossip arrives out of order"
    assert len(cache) == 4


def test_same_sequence_with_other_times_is_a_replay() -> None:
    cache = ReplayCache()
    assert admitted(cache, HONEST, 5)
    assert not admitted(cache, HONEST, 5, created_at=NOW_MS + 1, expires_at=NOW_MS + MAX_TTL_MS)


@pytest.mark.parametrize(
    ("created_at", "expires_at"),
    [
        (NOW_MS - 10, NOW_MS),
        (NOW_MS, NOW_MS + MAX_TTL_MS + 1),
        (NOW_MS + MAX_CLOCK_SKEW_MS + 1, NOW_MS + MAX_CLOCK_SKEW_MS + 2),
        (NOW_MS + 2, NOW_MS + 1),
        (0, 2**64),
        (2**64, 2**64 + 1),
        (-(2**64), 1),
    ],
)
def test_what_is_not_fresh_is_not_counted(created_at: int, expires_at: int) -> None:
    cache = ReplayCache()
    with pytest.raises(FreshnessError):
        cache.admit(HONEST, 1, created_at, expires_at, NOW_MS)
    assert len(cache) == 0


def test_entries_outlive_three_skews_and_then_go() -> None:
    """A clock that is set back by under three skews does not make an old envelope new."""
    assert REPLAY_HORIZON_MS == 3 * MAX_CLOCK_SKEW_MS
    cache = ReplayCache()
    assert admitted(cache, HONEST, 1, expires_at=NOW_MS + 1000)
    late = NOW_MS + 1000 + REPLAY_HORIZON_MS - 1
    assert admitted(cache, peer(2), 1, at=late)
    assert len(cache) == 2
    assert not admitted(cache, HONEST, 1, at=NOW_MS + 999, created_at=NOW_MS, expires_at=NOW_MS + 1000)
    assert admitted(cache, peer(2), 2, at=late + MAX_CLOCK_SKEW_MS + 1)
    assert len(cache) == 2


def test_flooding_sender_loses_its_own_entries_only() -> None:
    cache = ReplayCache(capacity=1000, per_sender=100)
    assert all(admitted(cache, HONEST, sequence) for sequence in range(20))
    flood = peer(666)
    assert all(admitted(cache, flood, sequence) for sequence in range(10_000))
    assert len(cache) <= 120
    assert not any(admitted(cache, HONEST, sequence) for sequence in range(20))
    assert not any(admitted(cache, flood, sequence) for sequence in range(10_000))
    assert admitted(cache, HONEST, 20)


def test_several_flooders_are_cut_before_an_honest_sender() -> None:
    cache = ReplayCache(capacity=400, per_sender=400)
    assert all(admitted(cache, HONEST, sequence) for sequence in range(30))
    for sequence in range(1000):
        for flooder in (7, 8, 9):
            assert admitted(cache, peer(flooder), sequence)
    assert len(cache) <= 400
    assert not any(admitted(cache, HONEST, sequence) for sequence in range(30))
    assert admitted(cache, HONEST, 30)


def test_flood_of_identities_never_counts_twice_and_spares_new_messages() -> None:
    cache = ReplayCache(capacity=64)
    assert admitted(cache, HONEST, 1, created_at=NOW_MS - 5000, expires_at=NOW_MS + MAX_TTL_MS - 5000)
    sybils = [peer(1000 + i) for i in range(1000)]
    for i, sybil in enumerate(sybils):
        admitted(cache, sybil, 1, created_at=NOW_MS - 4000 + i)
    assert len(cache) <= 64
    assert not admitted(cache, HONEST, 1, created_at=NOW_MS - 5000, expires_at=NOW_MS + MAX_TTL_MS - 5000)
    assert not any(admitted(cache, sybil, 1, created_at=NOW_MS - 4000 + i) for i, sybil in enumerate(sybils))
    assert admitted(cache, HONEST, 2, created_at=NOW_MS)


def test_senders_without_entries_are_bounded_too() -> None:
    """Each leaves a watermark that lives for an hour behind an entry that lives for a second."""
    cache = ReplayCache(capacity=64, per_sender=1)
    at = NOW_MS
    for i in range(300):
        at += 1000
        admitted(cache, peer(i), 1, at=at, created_at=at, expires_at=at + MAX_TTL_MS)
        admitted(cache, peer(i), 2, at=at, created_at=at, expires_at=at + 1)
    assert len(cache._senders) <= 64


def test_nothing_is_counted_twice_in_a_random_history() -> None:
    """5,000 deliveries of 1,500 envelopes of 40 senders into a cache of 100 entries, over 20 minutes."""
    rng = random.Random(1)
    cache = ReplayCache(capacity=100, per_sender=20)
    envelopes = []
    for _ in range(1500):
        created_at = NOW_MS + rng.randrange(1_200_000)
        life = rng.choice((1000, 60_000, MAX_TTL_MS))
        envelopes.append((peer(rng.randrange(40)), rng.randrange(1000), created_at, created_at + life))
    counted: set[tuple[str, int]] = set()
    for now_ms in sorted(NOW_MS + rng.randrange(1_200_000) for _ in range(5000)):
        sender, sequence, created_at, expires_at = rng.choice(envelopes)
        try:
            cache.admit(sender, sequence, created_at, expires_at, now_ms)
        except (ReplayError, FreshnessError):
            continue
        # a sequence may be used again once its first use is forgotten, which no honest sender does
        key = (sender, sequence, created_at)
        assert key not in counted
        counted.add(key)
        assert len(cache) <= 100
    assert len(counted) > 200


def test_snapshot_restores_all_of_it() -> None:
    cache = ReplayCache(capacity=64, per_sender=8)
    for sender in range(10):
        for sequence in range(20):
            admitted(cache, peer(sender), sequence)
    cache.refuse_up_to(NOW_MS - 70_000)
    restored = ReplayCache(capacity=64, per_sender=8)
    restored.restore(cache.snapshot())
    assert restored.snapshot() == cache.snapshot()
    assert len(restored) == len(cache)
    assert not any(admitted(restored, peer(s), q) for s in range(10) for q in range(20))
    assert not admitted(restored, peer(99), 0, created_at=NOW_MS - 70_000, expires_at=NOW_MS + 1)
    assert admitted(restored, peer(99), 0)


@pytest.mark.parametrize("damage", ["", "cut", "flipped", "other version"])
def test_damaged_snapshot_is_refused_and_changes_nothing(damage: str) -> None:
    cache = ReplayCache()
    admitted(cache, HONEST, 1)
    good = cache.snapshot()
    data = {
        "": b"",
        "cut": good[:-1],
        "flipped": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "other version": good.replace(b"replay 1", b"replay 2"),
    }[damage]
    with pytest.raises(DecodeError, match="damaged"):
        cache.restore(data)
    assert cache.snapshot() == good


def test_smaller_cache_takes_a_larger_snapshot() -> None:
    large = ReplayCache(capacity=500)
    for sender in range(300):
        admitted(large, peer(sender), 1)
    small = ReplayCache(capacity=50)
    small.restore(large.snapshot())
    assert admitted(small, peer(999), 1, created_at=NOW_MS + 1)
    assert len(small) <= 50
    assert not any(admitted(small, peer(sender), 1) for sender in range(300))


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity 0"):
        ReplayCache(capacity=0)
