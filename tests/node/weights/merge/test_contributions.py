"""The observed-remove set: laws of its growth, what add and remove mean, what is refused, and its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.weights.merge.contributions import (
    MergeError,
    MergeSet,
    open_removal,
    set_digest,
    sign_removal,
)
from protocol.constants import MAX_REMOVED_TAGS
from protocol.errors import DecodeError, LocalProtocolError, RemoteProtocolError, SignatureError
from protocol.identity import Identity
from protocol.links import sign_link
from protocol.merge_messages import MergeRemoval, SignedRemoval
from protocol.messages import ChunkedBlob, Lineage, LinkKind, SignedLink, WeightsLink

SWARM, MODEL, BASE, OTHER = "5" * 64, "1" * 64, "b" * 64, "c" * 64
AUTHORS = [Identity.from_seed(bytes([k]) * 32) for k in range(5)]
ADA, BOB = AUTHORS[:2]


def signed(author: Identity, version: int = 1, created_at: int = 0, **fields: object) -> SignedLink:
    link = WeightsLink(
        lineage=Lineage(author.peer_id, MODEL, "7" * 64),
        policy_version=version,
        kind=LinkKind.ANCHOR,
        base_version=version,
        base=BASE,
        result="9" * 64,
        blob=ChunkedBlob("8" * 64, 100, 16 * 1024),
        created_at=created_at,
    )
    return sign_link(author, SWARM, msgspec.structs.replace(link, **fields))


def removed(author: Identity, *links: SignedLink, created_at: int = 0) -> SignedRemoval:
    tags = tuple(tag_of(link) for link in links)
    return sign_removal(author, SWARM, MergeRemoval(author.peer_id, BASE, tags, created_at))


def tag_of(link: SignedLink) -> str:
    alone = empty()
    alone.add(link)
    return alone.visible()[0].tag


def empty(max_authors: int = 64) -> MergeSet:
    return MergeSet(SWARM, MODEL, BASE, max_authors=max_authors)


def of(*operations: SignedLink | SignedRemoval, max_authors: int = 64) -> MergeSet:
    made = empty(max_authors)
    for each in operations:
        if isinstance(each, SignedLink):
            made.add(each)
        else:
            made.remove(each)
    return made


def held(made: MergeSet) -> list[SignedLink | SignedRemoval]:
    """All of a set, as it is sent to others."""
    return [*made.links(), *made.removals()]


def joined(*sets: MergeSet) -> MergeSet:
    return of(*(each for made in sets for each in held(made)))


def seen(made: MergeSet) -> list[tuple[str, int]]:
    return sorted((each.author, each.link.policy_version) for each in made.visible())


# --- laws ---------------------------------------------------------------------------------------------------

LINKS = [signed(author, version, at) for author in AUTHORS for version in (1, 2) for at in (0, 1)]
REMOVALS = [
    removed(author, *links, created_at=at)
    for author in AUTHORS
    for at, links in enumerate(
        (
            LINKS[:1],
            [signed(author, 1, 0)],
            [signed(author, 2, 1)],
            [signed(author, 1, 1), signed(author, 2, 1)],
        )
    )
]
OPERATIONS = st.lists(st.sampled_from([*LINKS, *REMOVALS]), max_size=12)
CAP = st.sampled_from([2, 3, 64])


@given(operations=OPERATIONS, order=st.randoms(use_true_random=False), cap=CAP)
def test_the_order_of_arrival_does_not_matter(
    operations: list[SignedLink | SignedRemoval], order: object, cap: int
) -> None:
    other = list(operations)
    order.shuffle(other)  # type: ignore[attr-defined]
    one, two = of(*operations, max_authors=cap), of(*other, max_authors=cap)
    assert held(one) == held(two)
    assert one.whole_digest() == two.whole_digest()
    assert [each.tag for each in one.visible()] == [each.tag for each in two.visible()]


@settings(max_examples=60)
@given(a=OPERATIONS, b=OPERATIONS, cap=CAP)
def test_what_partners_hold_adds_up_to_all_that_both_heard(
    a: list[SignedLink | SignedRemoval], b: list[SignedLink | SignedRemoval], cap: int
) -> None:
    x, y = (of(*each, max_authors=cap) for each in (a, b))
    both = of(*held(x), *held(y), max_authors=cap)
    assert held(both) == held(of(*held(y), *held(x), max_authors=cap))
    assert held(both) == held(of(*a, *b, max_authors=cap))
    again = (both.add(each) if isinstance(each, SignedLink) else both.remove(each) for each in held(y))
    assert not any(again)


@given(operations=OPERATIONS, split=st.integers(0, 12), cap=CAP)
def test_what_is_sent_on_makes_the_same_set(
    operations: list[SignedLink | SignedRemoval], split: int, cap: int
) -> None:
    whole = of(*operations, max_authors=cap)
    assert held(of(*whole.removals(), *whole.links(), max_authors=cap)) == held(whole)
    assert len(whole.links()) <= cap
    assert len(whole.removals()) <= cap


# --- adding and removing ------------------------------------------------------------------------------------


def test_of_each_author_the_newest_stands() -> None:
    made = of(signed(ADA, 3), signed(ADA, 5), signed(ADA, 4), signed(BOB, 1))
    assert seen(made) == sorted([(ADA.peer_id, 5), (BOB.peer_id, 1)])


def test_the_same_again_changes_nothing() -> None:
    made = empty()
    assert made.add(signed(ADA, 3))
    assert not made.add(signed(ADA, 3))
    assert not made.add(signed(ADA, 2))
    removal = removed(ADA, signed(ADA, 3))
    assert made.remove(removal)
    assert not made.remove(removal)


def test_a_removal_takes_away_what_it_names_whichever_comes_first() -> None:
    link = signed(ADA, 3)
    assert seen(of(link, removed(ADA, link))) == []
    assert seen(of(removed(ADA, link), link)) == []


def test_an_addition_wins_over_a_removal_that_did_not_see_it() -> None:
    """The same version again, made later: another tag."""
    old, new = signed(ADA, 3, 0), signed(ADA, 3, 1)
    assert seen(joined(of(old, removed(ADA, old)), of(new))) == [(ADA.peer_id, 3)]


def test_an_older_contribution_does_not_come_back_when_the_newest_is_removed() -> None:
    old, new = signed(ADA, 1), signed(ADA, 2)
    assert seen(joined(of(old), of(new, removed(ADA, new)))) == []
    assert seen(joined(joined(of(old), of(removed(ADA, new))), of(new))) == []


def test_nobody_removes_what_another_contributed() -> None:
    link = signed(ADA, 3)
    assert seen(of(link, removed(BOB, link))) == [(ADA.peer_id, 3)]
    forged = MergeRemoval(ADA.peer_id, BASE, (tag_of(link),), 0)
    with pytest.raises(LocalProtocolError):
        sign_removal(BOB, SWARM, forged)


def test_a_node_removes_its_own() -> None:
    made = of(signed(ADA, 1), signed(BOB, 1))
    first = made.removal(ADA, 10)
    assert first is not None
    made.remove(first)
    assert seen(made) == [(BOB.peer_id, 1)]
    assert made.removal(ADA, 11) is None
    made.add(signed(ADA, 2))
    second = made.removal(ADA, 11)
    assert second is not None
    assert open_removal(second, SWARM).tags == (tag_of(signed(ADA, 2)), tag_of(signed(ADA, 1)))


def test_a_removal_counts_though_the_clock_was_set_back() -> None:
    made = of(signed(ADA, 1))
    for version, clock in ((2, 10), (3, 4)):
        removal = made.removal(ADA, clock)
        assert removal is not None
        assert made.remove(removal)
        assert seen(made) == []
        made.add(signed(ADA, version))


def test_canonical_order_is_by_tag() -> None:
    made = of(*(signed(author) for author in AUTHORS))
    tags = [each.tag for each in made.visible()]
    assert tags == sorted(tags)
    assert len(set(tags)) == len(AUTHORS)


def test_the_digest_names_what_is_visible() -> None:
    link = signed(ADA, 3)
    both = of(link, signed(BOB, 3)).visible()
    names = [set_digest(BASE, each) for each in ((), of(link).visible(), both)]
    assert len({*names, set_digest(OTHER, ())}) == 4
    assert set_digest(BASE, both[::-1]) == names[2]
    assert set_digest(BASE, of(link, removed(ADA, link)).visible()) == names[0]
    assert set_digest(BASE, [each for each in both if each.author == ADA.peer_id]) == names[1]


def test_the_digest_of_what_is_held_tells_all_that_others_would_be_sent() -> None:
    ada, bob = signed(ADA, 3), signed(BOB, 3)
    sets = [of(), of(ada), of(ada, bob), of(ada, removed(ADA, ada)), of(removed(ADA, ada))]
    sets += [of(ada, removed(ADA, ada, created_at=1)), MergeSet(SWARM, MODEL, OTHER)]
    assert len({each.whole_digest() for each in sets}) == len(sets)
    assert of(ada, bob).whole_digest() == of(bob, ada).whole_digest()


# --- bounds and refusals ------------------------------------------------------------------------------------


def test_too_many_authors_leave_the_same_ones_everywhere() -> None:
    links = [signed(author) for author in AUTHORS]
    kept = of(*links, max_authors=3)
    assert len(kept.visible()) == 3
    assert held(kept) == held(of(*reversed(links), max_authors=3))
    changes = [empty(3).add(link) for link in links]
    assert all(changes)
    full = of(*links, max_authors=3)
    assert not any(
        full.add(signed(author, 9)) for author in AUTHORS if author.peer_id not in dict(seen(full))
    )


def test_an_author_that_goes_takes_its_removal_along() -> None:
    """Else what it removed could come back to sight."""
    links = [signed(author) for author in AUTHORS]
    removals = [removed(author, link) for author, link in zip(AUTHORS, links, strict=True)]
    made = of(*links, *removals, max_authors=2)
    assert made.visible() == ()
    assert (len(made.links()), len(made.removals())) == (2, 2)


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (signed(ADA, 3, base=OTHER), "merge_base"),
        (signed(ADA, 3, lineage=Lineage(ADA.peer_id, OTHER, "7" * 64)), "merge_base"),
        (signed(ADA, 3, kind=LinkKind.DELTA, base_version=2), "merge_kind"),
        (SignedLink(signed(ADA, 3).link, bytes(64)), "link_signature"),
        (SignedLink(signed(ADA, 3).link, signed(ADA, 4).signature), "link_signature"),
        (SignedLink(b"\x81", bytes(64)), "decode"),
    ],
)
def test_contributions_that_do_not_belong_are_refused(link: SignedLink, reason: str) -> None:
    made = empty()
    with pytest.raises(RemoteProtocolError) as refused:
        made.add(link)
    assert refused.value.reason == reason
    assert held(made) == []


def test_a_contribution_of_another_swarm_is_refused() -> None:
    with pytest.raises(SignatureError):
        MergeSet("6" * 64, MODEL, BASE).add(signed(ADA))


def test_removals_that_do_not_belong_are_refused() -> None:
    made, removal = of(signed(ADA)), removed(ADA, signed(ADA))
    with pytest.raises(SignatureError, match="did not sign this removal"):
        made.remove(SignedRemoval(removal.removal, bytes(64)))
    with pytest.raises(DecodeError):
        made.remove(SignedRemoval(removal.removal[:-1], removal.signature))
    elsewhere = sign_removal(ADA, SWARM, MergeRemoval(ADA.peer_id, OTHER, ("a" * 64,), 0))
    with pytest.raises(MergeError, match="removes from"):
        made.remove(elsewhere)
    assert seen(made) == [(ADA.peer_id, 1)]


def test_a_removal_names_at_most_so_many_tags() -> None:
    tags: Sequence[str] = [f"{k:064x}" for k in range(MAX_REMOVED_TAGS + 1)]
    sign_removal(ADA, SWARM, MergeRemoval(ADA.peer_id, BASE, tuple(tags[1:]), 0))
    with pytest.raises(LocalProtocolError):
        sign_removal(ADA, SWARM, MergeRemoval(ADA.peer_id, BASE, tuple(tags), 0))
