"""What is counted of each peer."""

from __future__ import annotations

import msgspec
import pytest

from node.peers.book import PeerBook
from protocol.messages import Announcement, BlobRef, Lineage, PeerId, PeerRecord, PromptRef

OURS, THEIRS = "a" * 64, "b" * 64


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


def nobody(peer_id: PeerId) -> bool:
    return False


def test_a_row_tells_what_was_counted() -> None:
    book = PeerBook(OURS)
    book.announced("p", announcement("p", 3, THEIRS), at=1000)
    book.announced("p", announcement("p", 2, THEIRS), at=2000)
    book.accepted("p", 1, age_windows=1.0)  # two versions behind
    book.accepted("p", 3, age_windows=2.0)
    book.accepted("p", 4, age_windows=0.0)  # newer than any announced: not ahead, just not behind
    book.rejected("p", "stale")
    book.rejected("p", "stale")
    book.rejected("p", "copied")
    (row,) = book.table(frozenset(), {}, lambda peer_id: 0.25)
    assert (row.peer_id, row.connected, row.accepted, row.trust) == ("p", False, 3, 0.25)
    assert row.rejected == {"copied": 1, "stale": 2}
    assert (row.policy_version, row.lag, row.age_windows) == (3, pytest.approx(2 / 3), 1.0)
    assert row.last_seen_at == 2000
    assert not row.same_tokenizer
    assert book.newest_version("p", announcement("p", 0, THEIRS).lineage) == 3


def test_a_follower_of_another_owner_starts_with_that_owners_versions() -> None:
    book = PeerBook(OURS)
    first, second = (Lineage(owner, "c" * 64, OURS) for owner in ("first", "second"))

    def announced(lineage: Lineage, version: int) -> None:
        book.announced("p", msgspec.structs.replace(announcement("p", version), lineage=lineage), at=1)

    announced(first, 500)
    assert book.newest_version("p", first) == 500
    announced(second, 3)
    assert (book.newest_version("p", second), book.newest_version("p", first)) == (3, -1)
    (row,) = book.table(frozenset(), {}, lambda peer_id: 0.5)
    assert (row.follows, row.policy_version) == ("second", 3)


def test_unknown_peers_have_neutral_numbers() -> None:
    book = PeerBook(OURS)
    assert book.newest_version("p", announcement("p", 0).lineage) == -1
    (row,) = book.table(frozenset({"p"}), {}, lambda peer_id: 0.5)
    assert (row.connected, row.name, row.policy_version, row.last_seen_at) == (True, "", -1, 0)
    assert (row.lag, row.age_windows) == (0.0, 0.0)


def test_names_are_made_inert_and_rows_are_sorted() -> None:
    book = PeerBook(OURS)
    book.rejected("z", "x")
    record = PeerRecord(name="\x1b]0;evil\x07" + "n" * 100, protocol_version=1, addresses=(), lineage=None)
    rows = book.table(frozenset({"b", "a"}), {"b": record, "elsewhere": record}, lambda peer_id: 1.0)
    assert [row.peer_id for row in rows] == ["a", "b", "z"]
    assert rows[1].name.startswith("\ufffd]0;evil\ufffd")
    assert len(rows[1].name) == 64


def test_active_peers_are_those_heard_lately_and_not_ignored() -> None:
    book = PeerBook(OURS)
    assert not book.active_since(0, nobody)
    book.announced("p", announcement("p", 0), at=1000)
    book.rejected("q", "tampered_prompt")  # was never heard saying anything valid
    assert book.active_since(1000, nobody)
    assert not book.active_since(1001, nobody)
    assert not book.active_since(1000, lambda peer_id: peer_id == "p")
    assert not book.active_since(1000, lambda peer_id: peer_id != "q")


def test_the_book_keeps_the_peers_seen_last() -> None:
    book = PeerBook(OURS, max_peers=3)
    for peer_id in "abc":
        book.rejected(peer_id, "x")
    book.accepted("a", 0, age_windows=0.0)
    book.rejected("d", "x")
    assert [row.peer_id for row in book.table(frozenset(), {}, lambda peer_id: 0.0)] == ["a", "c", "d"]
