"""Trust: earned slowly, lost at once, never saturated by a cheater."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from node.peers.trust import Hardness, TrustBook, TrustSettings, load_standings, save_standings

SWARM = "a" * 64
GOOD, SOFT, HARD = Hardness.ACCEPTED, Hardness.SOFT, Hardness.HARD


def test_newcomer() -> None:
    assert TrustBook().trust("p", 0.0) == 0.5
    assert TrustBook(TrustSettings(newcomer=0.25)).trust("p", 0.0) == 0.25


def test_formula_by_hand() -> None:
    book = TrustBook(TrustSettings(hard_weight=2.0, soft_weight=0.5, quarantine_below=0.0))
    for found in (GOOD, GOOD, GOOD, SOFT, HARD):
        book.record("p", found, 0.0)
    # (3 + 1) / (3 + 2 + 2 x 1 + 0.5 x 1)
    assert book.trust("p", 0.0) == pytest.approx(4 / 7.5)


def test_decay_by_hand() -> None:
    settings = TrustSettings(
        hard_weight=2.0, good_half_life_windows=1.0, hard_half_life_windows=2.0, quarantine_below=0.0
    )
    book = TrustBook(settings)
    for found in (GOOD, GOOD, GOOD, GOOD, HARD):
        book.record("p", found, 0.0)
    # after two windows a = 4/4, h = 1/2: (1 + 1) / (1 + 2 + 2 x 1/2)
    assert book.trust("p", 2.0) == pytest.approx(2 / 4)
    assert book.trust("p", 1e9) == pytest.approx(0.5)  # forgotten: a newcomer again


def test_good_work_raises_trust_below_one() -> None:
    book, last = TrustBook(), 0.5
    for count in range(500):
        book.record("p", GOOD, count / 8)
        assert last <= book.trust("p", count / 8) + 1e-3
        last = book.trust("p", count / 8)
    assert 0.95 < last < 1.0


@pytest.mark.parametrize("groups", [20, 100, 1000, 10_000])
@pytest.mark.parametrize("groups_per_window", [1, 8, 64])
def test_five_percent_caught_cheating_ends_below_half(groups: int, groups_per_window: int) -> None:
    book = TrustBook(TrustSettings(quarantine_below=0.0))
    draw = random.Random(groups)
    cheats = set(draw.sample(range(groups), groups // 20))
    for count in range(groups):
        book.record("p", HARD if count in cheats else GOOD, count / groups_per_window)
    assert book.trust("p", groups / groups_per_window) < 0.5


def test_good_work_cannot_be_banked() -> None:
    book = TrustBook()
    for _ in range(5_000):
        book.record("p", GOOD, 0.0)
    for _ in range(5):
        book.record("p", HARD, 0.0)
    assert book.trust("p", 0.0) < 0.5


def test_honest_peer_survives_soft_noise() -> None:
    book = TrustBook()
    for count in range(1000):
        book.record("p", SOFT if count % 100 == 0 else GOOD, count / 8)
    assert book.trust("p", 125.0) > 0.9


def test_quarantine_lasts_a_term_and_doubles() -> None:
    book = TrustBook(TrustSettings(quarantine_windows=10.0))
    book.record("p", HARD, 0.0)
    assert book.quarantined("p", 9.9)
    assert book.trust("p", 9.9) == 0.0
    assert not book.quarantined("p", 10.0)
    assert 0 < book.trust("p", 10.0) < 0.5
    book.record("p", GOOD, 10.0)
    assert not book.quarantined("p", 10.0)  # a term ends for good unless there is a new hard failure
    book.record("p", HARD, 11.0)
    assert book.quarantined("p", 30.9)
    assert not book.quarantined("p", 31.0)
    assert not book.quarantined("other", 0.0)


def test_time_running_backwards_does_not_matter() -> None:
    book = TrustBook()
    book.record("p", GOOD, 10.0)
    before = book.trust("p", 10.0)
    assert book.trust("p", 3.0) == before
    assert math.isfinite(book.trust("p", 1e300))


def test_standings_survive() -> None:
    book = TrustBook()
    for peer, found in (("a", GOOD), ("b", HARD), ("a", SOFT)):
        book.record(peer, found, 1.0)
    restored = TrustBook(standings=book.standings())
    for peer in ("a", "b", "c"):
        assert restored.trust(peer, 5.0) == book.trust(peer, 5.0)


def test_bounded_and_cheaters_are_forgotten_last() -> None:
    book = TrustBook(TrustSettings(max_peers=3))
    for peer, found in (("bad", HARD), ("a", GOOD), ("b", GOOD), ("c", GOOD)):
        book.record(peer, found, 0.0)
    assert {standing.peer for standing in book.standings()} == {"bad", "b", "c"}


def test_standings_outlive_the_process_in_their_swarm(tmp_path: Path) -> None:
    book = TrustBook()
    book.record("good", Hardness.ACCEPTED, 1.5)
    book.record("bad", Hardness.HARD, 2.0)
    path = tmp_path / "state" / "trust.json"
    save_standings(path, SWARM, book.standings())
    again = TrustBook(standings=load_standings(path, SWARM))
    assert again.standings() == book.standings()
    assert again.quarantined("bad", 3.0)
    assert load_standings(path, "b" * 64) == ()  # whose windows are others
    for damaged in (
        b"",
        b"{}",
        path.read_bytes()[:-3],
        b'{"swarm_id":"' + b"a" * 64 + b'","standings":[{}]}',
    ):
        path.write_bytes(damaged)
        assert load_standings(path, SWARM) == ()
    assert load_standings(tmp_path / "nowhere", SWARM) == ()
