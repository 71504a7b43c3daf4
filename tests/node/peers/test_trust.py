"""Trust: earned slowly, lost at once, never saturated by a cheater."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from node.peers.trust import (
    Hardness,
    Standing,
    TrustSettings,
    after_judgement,
    is_quarantined,
    load_standings,
    save_standings,
    trust_in,
)
from tests.node.verify.world import identity

SWARM = "a" * 64
GOOD, SOFT, HARD = Hardness.ACCEPTED, Hardness.SOFT, Hardness.HARD
DEFAULT = TrustSettings()


class Peer:
    """One peer's standing over time."""

    def __init__(self, settings: TrustSettings = DEFAULT) -> None:
        self.settings = settings
        self.standing = Standing("p")

    def was(self, found: Hardness, window: float = 0.0, *, times: int = 1) -> None:
        for _ in range(times):
            self.standing = after_judgement(self.standing, found, window, self.settings)

    def trust(self, window: float = 0.0) -> float:
        return trust_in(self.standing, window, self.settings)

    def quarantined(self, window: float) -> bool:
        return is_quarantined(self.standing, window)


def test_newcomer() -> None:
    assert Peer().trust() == 0.5
    assert Peer(TrustSettings(newcomer=0.25)).trust() == 0.25


def test_formula_by_hand() -> None:
    peer = Peer(TrustSettings(hard_weight=2.0, soft_weight=0.5, quarantine_below=0.0))
    for found in (GOOD, GOOD, GOOD, SOFT, HARD):
        peer.was(found)
    # (3 + 1) / (3 + 2 + 2 x 1 + 0.5 x 1)
    assert peer.trust() == pytest.approx(4 / 7.5)


def test_decay_by_hand() -> None:
    peer = Peer(
        TrustSettings(
            hard_weight=2.0, good_half_life_windows=1.0, hard_half_life_windows=2.0, quarantine_below=0.0
        )
    )
    for found in (GOOD, GOOD, GOOD, GOOD, HARD):
        peer.was(found)
    # after two windows a = 4/4, h = 1/2: (1 + 1) / (1 + 2 + 2 x 1/2)
    assert peer.trust(2.0) == pytest.approx(2 / 4)
    assert peer.trust(1e9) == pytest.approx(0.5)  # forgotten: a newcomer again


def test_good_work_raises_trust_below_one() -> None:
    peer, last = Peer(), 0.5
    for count in range(500):
        peer.was(GOOD, count / 8)
        assert last <= peer.trust(count / 8) + 1e-3
        last = peer.trust(count / 8)
    assert 0.95 < last < 1.0


@pytest.mark.parametrize("groups", [20, 100, 1000, 10_000])
@pytest.mark.parametrize("groups_per_window", [1, 8, 64])
def test_five_percent_caught_cheating_ends_below_half(groups: int, groups_per_window: int) -> None:
    peer = Peer(TrustSettings(quarantine_below=0.0))
    draw = random.Random(groups)
    cheats = set(draw.sample(range(groups), groups // 20))
    for count in range(groups):
        peer.was(HARD if count in cheats else GOOD, count / groups_per_window)
    assert peer.trust(groups / groups_per_window) < 0.5


def test_good_work_cannot_be_banked() -> None:
    peer = Peer()
    peer.was(GOOD, times=5_000)
    peer.was(HARD, times=5)
    assert peer.trust() < 0.5


def test_honest_peer_survives_soft_noise() -> None:
    peer = Peer()
    for count in range(1000):
        peer.was(SOFT if count % 100 == 0 else GOOD, count / 8)
    assert peer.trust(125.0) > 0.9


def test_quarantine_lasts_a_term_and_doubles() -> None:
    peer = Peer(TrustSettings(quarantine_windows=10.0))
    assert not peer.quarantined(0.0)
    peer.was(HARD, 0.0)
    assert peer.quarantined(9.9)
    assert peer.trust(9.9) == 0.0
    assert not peer.quarantined(10.0)
    assert 0 < peer.trust(10.0) < 0.5
    peer.was(GOOD, 10.0)
    assert not peer.quarantined(10.0)  # a term ends for good unless there is a new hard failure
    peer.was(HARD, 11.0)
    assert peer.quarantined(30.9)
    assert not peer.quarantined(31.0)


def test_time_running_backwards_does_not_matter() -> None:
    peer = Peer()
    peer.was(GOOD, 10.0)
    before = peer.trust(10.0)
    assert peer.trust(3.0) == before
    assert math.isfinite(peer.trust(1e300))


def test_standings_outlive_the_process_in_their_swarm(tmp_path: Path) -> None:
    standings = (
        after_judgement(Standing(identity("good").peer_id, at_window=1.5), GOOD, 1.5, DEFAULT),
        after_judgement(Standing(identity("bad").peer_id), HARD, 2.0, DEFAULT),
    )
    path = tmp_path / "state" / "trust.json"
    save_standings(path, SWARM, standings)
    assert load_standings(path, SWARM) == standings
    assert is_quarantined(standings[1], 3.0)
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
