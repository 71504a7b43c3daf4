"""What is known of each peer, and for how many."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.clock import VirtualClock, run_virtual
from node.events import Notice
from node.peers import book
from node.peers.book import ACTIVE_WINDOWS, PeerBook
from node.peers.trust import Hardness, load_standings
from node.transport.limits import Refusals
from protocol.messages import Announcement, BlobRef, Lineage, PeerId, PeerRecord, PromptRef
from tests.node.runtimes import ManualClock, make_links, make_peers, make_runtime
from tests.node.verify.world import World, identity

WORLD = World()
CHARTER = WORLD.charter
OURS, THEIRS = "a" * 64, "b" * 64
LINEAGE = Lineage("p", "c" * 64, OURS)


def make_book(clock: ManualClock | None = None, **settings: Any) -> PeerBook:
    """An empty book whose clock stands in the middle of window 100, unless a test moves it."""
    runtime = make_runtime(clock or ManualClock(CHARTER.created_at + 100 * CHARTER.window_ms))
    _, peers = make_peers(runtime, identity("node"), CHARTER, **settings)
    return peers


def announcement(author: PeerId, version: int, tokenizer: str = OURS) -> Announcement:
    return Announcement(
        Lineage(author, "c" * 64, tokenizer),
        version,
        mean_version=version,
        oldest_version=version,
        prompt=PromptRef(0, 0, 0),
        completions="d" * 64,
        rewards=(1.0,),
        body=BlobRef("e" * 64, 1),
    )


def test_a_row_tells_what_was_counted() -> None:
    clock = ManualClock(CHARTER.created_at + 100 * CHARTER.window_ms)
    peers = make_book(clock)
    lineage = announcement("p", 3, THEIRS).lineage
    peers.announced("p", announcement("p", 3, THEIRS))
    clock.at_ms += 1000
    peers.announced("p", announcement("p", 2, THEIRS))
    announced_at = clock.at_ms
    clock.at_ms = CHARTER.created_at + 100 * CHARTER.window_ms + CHARTER.window_ms // 2
    peers.accepted("p", 1, lineage, window=98)  # two versions behind, and a window and a half old
    peers.accepted("p", 3, lineage, window=98)
    peers.accepted("p", 4, lineage, window=100)  # newer than any announced: not ahead, just not behind
    for reason in ("stale", "stale", "copied"):
        peers.rejected("p", reason)
    peers.refused("p", "deadline")
    (row,) = peers.table(make_links(ManualClock()), {}, OURS)
    assert (row.peer_id, row.connected, row.accepted, row.trust) == ("p", False, 3, 0.5)
    assert row.rejected == {"copied": 1, "deadline": 1, "stale": 2}
    assert (row.policy_version, row.lag, row.age_windows) == (3, pytest.approx(2 / 3), pytest.approx(1.0))
    assert row.last_seen_at == announced_at
    assert not row.same_tokenizer


def test_the_newest_version_is_known_by_lineage_and_unknown_before_the_first() -> None:
    peers = make_book()
    first, second, third = (Lineage(owner, "c" * 64, OURS) for owner in ("first", "second", "third"))
    for lineage, version in ((first, 500), (second, 3), (second, 2)):
        peers.announced("p", msgspec.structs.replace(announcement("p", version), lineage=lineage))
    assert [peers.newest_version("p", lineage) for lineage in (first, second, third)] == [500, 3, None]
    assert peers.newest_version("q", first) is None
    (row,) = peers.table(make_links(ManualClock()), {}, OURS)
    assert (row.follows, row.policy_version) == ("second", 3)  # of the lineage announced last
    for number in range(book.MAX_LINEAGES):
        other = Lineage(f"owner{number}", "c" * 64, OURS)
        peers.announced("p", msgspec.structs.replace(announcement("p", 1), lineage=other))
    assert peers.newest_version("p", first) is None  # forgotten


def test_unknown_peers_have_neutral_numbers() -> None:
    peers = make_book()
    (row,) = peers.table(make_links(ManualClock(), "p"), {}, OURS)
    assert (row.connected, row.name, row.policy_version, row.last_seen_at) == (True, "", -1, 0)
    assert (row.lag, row.age_windows, row.trust) == (0.0, 0.0, 0.5)
    assert not peers.quarantined("p")
    assert not peers.has_earned_trust("p")


def test_names_are_made_inert_and_rows_are_sorted() -> None:
    peers = make_book()
    peers.rejected("z", "x")
    record = PeerRecord(name="\x1b]0;evil\x07" + "n" * 100, protocol_version=1, addresses=(), lineage=None)
    rows = peers.table(make_links(ManualClock(), "b", "a"), {"b": record, "elsewhere": record}, OURS)
    assert [row.peer_id for row in rows] == ["a", "b", "z"]
    assert rows[1].name.startswith("\ufffd]0;evil\ufffd")
    assert len(rows[1].name) == 64


def test_active_peers_are_those_heard_lately_and_not_in_quarantine() -> None:
    clock = ManualClock(CHARTER.created_at + 100 * CHARTER.window_ms)
    peers = make_book(clock)
    assert peers.active() == ()
    peers.announced("p", announcement("p", 0))
    peers.announced("liar", announcement("liar", 0))
    peers.judged("liar", Hardness.HARD)
    peers.rejected("q", "tampered_prompt")  # was never heard saying anything valid
    clock.at_ms += ACTIVE_WINDOWS * CHARTER.window_ms
    assert peers.active() == ("p",)
    clock.at_ms += 1
    assert peers.active() == ()


def test_trust_follows_what_was_judged_and_time() -> None:
    clock = ManualClock(CHARTER.created_at)
    peers = make_book(clock, quarantine_windows=10.0)
    peers.judged("good", Hardness.ACCEPTED)
    peers.judged("soft", Hardness.SOFT)
    peers.judged("bad", Hardness.HARD)
    assert (
        peers.trust("good") > peers.trust("newcomer") == 0.5 > peers.trust("soft") > peers.trust("bad") == 0
    )
    assert [peers.has_earned_trust(each) for each in ("good", "newcomer", "bad")] == [True, False, False]
    assert peers.quarantined("bad")
    clock.at_ms += 10 * CHARTER.window_ms
    assert not peers.quarantined("bad")
    assert 0 < peers.trust("bad") < 0.5


def test_members_of_a_closed_swarm_need_not_earn_trust() -> None:
    good, bad = (identity(name).peer_id for name in ("good", "bad"))
    closed = World(changes={"closed": True})
    _, peers = make_peers(make_runtime(closed.clock), identity("node"), closed.charter)
    peers.judged(bad, Hardness.HARD)
    assert peers.has_earned_trust(good)
    assert not peers.has_earned_trust(bad)
    assert [peers.may_claim(each, LINEAGE) for each in (good, bad)] == [True, False]


def test_standings_survive() -> None:
    peers = make_book()
    for peer, found in (("a", Hardness.ACCEPTED), ("b", Hardness.HARD), ("a", Hardness.SOFT)):
        peers.judged(peer, found)
    runtime = make_runtime(ManualClock(CHARTER.created_at + 100 * CHARTER.window_ms))
    membership, fresh = make_peers(runtime, identity("node"), CHARTER)
    restored = PeerBook(runtime, membership, fresh.settings, peers.standings())
    for peer in ("a", "b", "c"):
        assert restored.trust(peer) == peers.trust(peer)


def test_standings_are_bounded_and_cheaters_are_forgotten_last() -> None:
    peers = make_book(max_peers=3)
    peers.judged("bad", Hardness.HARD)
    for peer in "abc":
        peers.judged(peer, Hardness.ACCEPTED)
    assert {standing.peer for standing in peers.standings()} == {"bad", "b", "c"}


def test_the_book_keeps_the_peers_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MAX_PEERS", 3)
    peers = make_book()
    for peer_id in "abc":
        peers.rejected(peer_id, "x")
    peers.accepted("a", 0, LINEAGE, 0)
    peers.rejected("d", "x")
    for number in range(100):
        peers.refused(f"invented {number}", "rate")  # identities are free and push nobody out
    assert [row.peer_id for row in peers.table(make_links(ManualClock()), {}, OURS)] == ["a", "c", "d"]


def test_refusals_are_counted_with_the_transports_own() -> None:
    refusals = Refusals(capacity=2)
    _, peers = make_peers(make_runtime(ManualClock()), identity("node"), CHARTER, refusals=refusals)
    refusals.add("a", "rate")
    for peer_id in ("a", "b", "c"):
        peers.refused(peer_id, "decode")
    peers.rejected("a", "stale")  # is verification's
    assert peers.refusals() == {"decode": 3, "rate": 1}  # also of those that are folded together


def test_trust_is_on_the_disk_soon_after_it_changed(tmp_path: Path) -> None:
    """A kill at any later moment forgets no quarantine; a full disk is told once, and tried again."""
    world_clock = VirtualClock(CHARTER.created_at + 100 * CHARTER.window_ms)
    path, told = tmp_path / "state" / "trust.json", list[str]()

    async def main() -> None:
        runtime = make_runtime(world_clock)
        runtime.bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
        member, peers = make_peers(runtime, identity("node"), CHARTER)
        keeping = asyncio.create_task(peers.keep(path))
        await asyncio.sleep(10)
        assert not path.exists()
        path.parent.write_text("a file where the folder should be")
        peers.judged(identity("liar").peer_id, Hardness.HARD)
        await asyncio.sleep(20)
        assert len(told) == 1
        assert told[0].startswith("trust cannot be saved: ")
        path.parent.unlink()
        await asyncio.sleep(book.SAVE_S + 0.1)
        keeping.cancel()
        assert load_standings(path, member.swarm_id) == peers.standings()
        assert peers.standings()[0].hard == 1.0

    run_virtual(main())
