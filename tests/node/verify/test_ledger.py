from __future__ import annotations

import msgspec
import pytest

from node.verify.ledger import Ledger
from protocol.messages import Announcement, PromptRef
from tests.node.verify.world import announcement_of, identity, nobody

replace = msgspec.structs.replace


@pytest.fixture
def announcement(world, alice) -> Announcement:
    return announcement_of(world.group(alice), b"body")


def at(announcement: Announcement, window: int, slot: int) -> Announcement:
    return replace(announcement, prompt=PromptRef(window=window, slot=slot, index=0))


def test_one_receipt_a_slot(announcement, alice):
    ledger = Ledger(max_windows=4, has_standing=nobody)
    assert ledger.claim(alice, announcement)
    assert ledger.claim(alice, announcement)
    assert not ledger.claim(alice, replace(announcement, rewards=(0.5,) * 8))
    assert not ledger.claim(alice, replace(announcement, commitment=b"other"))
    assert ledger.claim(alice, at(announcement, 100, 1))


def test_a_slot_is_judged_once_unless_forgotten(announcement, alice):
    ledger = Ledger(max_windows=4, has_standing=nobody)
    ledger.claim(alice, announcement)
    assert ledger.start_judging(alice, announcement)
    assert not ledger.start_judging(alice, announcement)
    ledger.forget_judging(alice, announcement)
    assert ledger.start_judging(alice, announcement)


def test_slots_seen(announcement, alice):
    ledger = Ledger(max_windows=4, has_standing=nobody)
    assert ledger.slots_seen(alice, 100) == ()
    for slot in (5, 2, 9):
        ledger.claim(alice, at(announcement, 100, slot))
    assert ledger.slots_seen(alice, 100) == (2, 5, 9)
    assert ledger.slots_seen(alice, 101) == ()


def test_bounded_in_windows_and_authors(announcement, alice):
    ledger = Ledger(max_windows=3, has_standing=nobody, max_authors=10)
    for window in range(50):
        ledger.claim(alice, at(announcement, window, 0))
    assert len(ledger) == 3
    assert ledger.slots_seen(alice, 49) == (0,)
    for number in range(50):
        ledger.claim(identity(str(number)).peer_id, announcement)
    assert len(ledger) == 10


def test_a_flood_of_strangers_displaces_no_peer_of_standing(announcement, alice, bob):
    ledger = Ledger(max_windows=3, has_standing={alice}.__contains__, max_authors=10)
    ledger.claim(alice, announcement)
    ledger.claim(bob, announcement)
    for number in range(11):
        ledger.claim(identity(str(number)).peer_id, announcement)
    second = replace(announcement, rewards=(0.5,) * 8)
    assert not ledger.claim(alice, second)
    assert ledger.claim(bob, second)  # a stranger among more strangers than there is room for


def test_receipts_stay_when_their_author_gains_or_loses_standing(announcement, alice):
    standing: set[str] = set()
    ledger = Ledger(max_windows=3, has_standing=standing.__contains__)
    ledger.claim(alice, announcement)
    for change in (standing.add, standing.discard):
        change(alice)
        assert not ledger.claim(alice, replace(announcement, rewards=(0.5,) * 8))
        assert len(ledger) == 1
