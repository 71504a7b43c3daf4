"""Which links make a chain, what breaks it, and the way from one version to the newest."""

from __future__ import annotations

import hashlib

import pytest

from node.weights.chain.chain import Chain, ChainError
from protocol.errors import SignatureError
from protocol.links import decode_link, open_link, sign_link
from protocol.messages import ChunkedBlob, Lineage, LinkKind, SignedLink, WeightsLink
from tests.node.weights.lineage import SWARM, identity_of, lineage_of

BASE = "0" * 64
OWNER = identity_of(0)


def digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


def anchor(version: int, *, size: int = 1000, base: str = BASE, result: str = "", **fields) -> SignedLink:
    return signed(LinkKind.ANCHOR, version, version, base, result or digest(version), size, **fields)


def delta(
    before: int, version: int, *, size: int = 10, base: str = "", result: str = "", **fields
) -> SignedLink:
    kind = LinkKind.DELTA
    return signed(kind, version, before, base or digest(before), result or digest(version), size, **fields)


def signed(
    kind: LinkKind, version: int, before: int, base: str, result: str, size: int, *, owner: int = 0, **fields
) -> SignedLink:
    root = digest(kind, version, before, base, result, size)
    blob = ChunkedBlob(root, size, 16 * 1024)
    values = {"lineage": lineage_of(owner), "blob": blob, "created_at": 1} | fields
    return sign_link(
        identity_of(owner),
        SWARM,
        WeightsLink(
            policy_version=version, kind=kind, base_version=before, base=base, result=result, **values
        ),
    )


def chain_of(*links: SignedLink, bases: tuple[str, ...] = (BASE,)) -> Chain:
    chain = Chain(SWARM, lineage_of(0), bases)
    for link in links:
        assert chain.add(link) is not None
    return chain


def names(links: list[SignedLink] | list[WeightsLink]) -> list[str]:
    """'a3': anchor of version 3; 'd3': the delta to it."""
    opened = [open_link(link, SWARM) if isinstance(link, SignedLink) else link for link in links]
    return [f"{link.kind.value[0]}{link.policy_version}" for link in opened]


def roots_of(links: list[SignedLink]) -> dict[str, str]:
    return {name: decode_link(link).blob.root for name, link in zip(names(links), links, strict=True)}


def refusal(chain: Chain, link: SignedLink) -> ChainError:
    before = chain.links()
    with pytest.raises(ChainError) as refused:
        chain.add(link)
    assert chain.links() == before
    return refused.value


LINE = (anchor(0), delta(0, 1), delta(1, 2), delta(2, 5), anchor(5), delta(5, 6))


# --- what fits ---


def test_anchor_and_deltas():
    chain = Chain(SWARM, lineage_of(0), [BASE])
    assert (chain.head, chain.anchor, len(chain), chain.after(None), chain.after(3)) == (
        None,
        None,
        0,
        [],
        [],
    )
    for link in LINE:
        assert chain.add(link) == open_link(link, SWARM)
        assert chain.add(link) is None
    assert chain.links() == list(LINE)
    assert chain.head == open_link(LINE[-1], SWARM)
    assert chain.anchor == open_link(LINE[4], SWARM)
    assert chain.bytes_after_anchor == 10


def test_both_links_of_a_version_in_either_order():
    forwards, backwards = chain_of(*LINE[:4], LINE[4]), chain_of(*LINE[:3], LINE[4], LINE[3])
    assert forwards.links() == backwards.links()


def test_an_anchor_may_leap():
    chain = chain_of(anchor(0), delta(0, 1), anchor(7), delta(7, 8))
    assert names(chain.after(1)) == ["a7", "d8"]
    assert names(chain.path(1, cost=lambda link: 0)) == ["a7", "d8"]
    assert chain.add(anchor(4)) is None  # from the time in between, of which nothing is known


def test_the_same_version_signed_twice_is_no_fork():
    """An owner that was killed may sign the same weights again, at another time and in another blob."""
    chain = chain_of(*LINE)
    assert chain.add(delta(5, 6, created_at=2, size=11)) is None
    assert not chain.evidence
    assert chain.links() == list(LINE)


def test_anchors_may_start_from_several_bases():
    chain = chain_of(anchor(0), anchor(3, base="1" * 64), bases=(BASE, "1" * 64))
    assert names(chain.links()) == ["a0", "a3"]


# --- what does not ---


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (delta(7, 8), "chain_gap"),
        (delta(6, 7, base=digest("no weights")), "chain_base"),
        (anchor(7, base=digest("no weights")), "chain_base"),
        (anchor(3, base=digest("no weights")), "chain_base"),
        (delta(6, 7, owner=1), "chain_owner"),
        (delta(6, 7, lineage=Lineage(OWNER.peer_id, "c" * 64, "7" * 64)), "chain_owner"),
    ],
)
def test_what_does_not_fit_is_told_apart(link, reason):
    chain = chain_of(*LINE)
    error = refusal(chain, link)
    assert (error.reason, error.evidence, chain.evidence) == (reason, (), ())
    assert chain.add(delta(6, 7)) is not None


def test_nothing_leads_to_a_first_delta():
    assert refusal(Chain(SWARM, lineage_of(0), [BASE]), delta(0, 1)).reason == "chain_gap"


FORKS = {
    "other weights": (delta(5, 6, result=digest("other")), 5),
    "other weights of an older version": (delta(1, 2, result=digest("other")), 2),
    "other weights by an anchor": (anchor(6, result=digest("other")), 5),
    "other weights by an anchor of an older version": (anchor(5, result=digest("other")), 3),
    "same weights from another version": (delta(4, 6, base=digest(4)), 5),
    "same weights from other weights": (delta(5, 6, base=digest("other")), 5),
    "two versions after one": (delta(5, 7), 5),
    "two versions after an older one": (delta(2, 7), 5),
    "a version between two neighbours": (delta(2, 3), 3),
    "an anchor between two neighbours": (anchor(4), 3),
}


@pytest.mark.parametrize("case", FORKS)
def test_forks_are_kept_as_evidence(case):
    link, against = FORKS[case]
    chain = chain_of(*LINE)
    error = refusal(chain, link)
    assert error.reason == "chain_fork"
    assert error.evidence == chain.evidence == (LINE[against], link)
    for each in chain.evidence:  # anybody can check them
        assert decode_link(each) == open_link(each, SWARM)
    assert refusal(chain, delta(6, 7)).reason == "chain_fork"  # from now on nothing is taken
    assert chain.add(LINE[0]) is None
    assert names(chain.after(5)) == ["d5", "a5", "d6"]  # what was here is served on


def test_a_fork_needs_the_owners_signature():
    chain = chain_of(*LINE)
    forged = delta(5, 6, result=digest("other"))
    with pytest.raises(SignatureError):
        chain.add(SignedLink(forged.link, LINE[0].signature))
    assert not chain.evidence


def test_rollback():
    chain = chain_of(*LINE)
    for known in (None, 0, 1):
        chain.check_head(LINE[1], known)
    with pytest.raises(ChainError) as refused:
        chain.check_head(LINE[3], 6)
    assert refused.value.reason == "chain_rollback"
    assert refused.value.evidence == (LINE[-1], LINE[3])
    with pytest.raises(SignatureError):
        chain.check_head(SignedLink(LINE[3].link, LINE[0].signature), 6)


# --- what is told others ---


@pytest.mark.parametrize(
    ("version", "links"),
    [
        (None, ["a5", "d6"]),
        (0, ["a0", "d1", "d2", "d5", "a5", "d6"]),
        (2, ["d2", "d5", "a5", "d6"]),
        (3, ["a5", "d6"]),
        (5, ["d5", "a5", "d6"]),
        (6, ["a5", "d6"]),
        (7, ["d6"]),
    ],
)
def test_after(version, links):
    chain = chain_of(*LINE)
    assert names(chain.after(version)) == links


def test_whoever_is_answered_gets_as_far_as_the_answerer():
    chain = chain_of(*LINE)
    for version in (None, 0, 1, 2, 5, 6):
        follower = chain_of(
            *(link for link in LINE if version is not None and decode_link(link).policy_version <= version)
        )
        for link in chain.after(version):
            follower.add(link)
        assert follower.head == chain.head
        assert follower.anchor == chain.anchor


# --- the way ---


def size(link: WeightsLink) -> int:
    return link.blob.size


def test_the_cheapest_way():
    chain = chain_of(*LINE, delta(6, 9))
    assert names(chain.path(None, cost=size)) == ["a5", "d6", "d9"]
    assert names(chain.path(2, cost=size)) == ["d5", "d6", "d9"]
    assert chain.path(9, cost=size) == chain.path(10, cost=size) == []
    # what is here costs nothing, and is not applied again for that
    assert names(chain.path(6, cost=lambda link: 0)) == ["d9"]
    # 500 bytes of delta to version 5, an anchor of 100
    dear = chain_of(anchor(0), delta(0, 1), delta(1, 5, size=500), anchor(5, size=100), delta(5, 6))
    assert names(dear.path(1, cost=size)) == ["a5", "d6"]
    assert names(dear.path(1, cost=lambda link: 0 if link.blob.size == 500 else size(link))) == ["d5", "d6"]


def test_the_way_around_bad_blobs():
    chain = chain_of(*LINE)
    roots = roots_of(list(LINE))
    assert names(chain.path(1, cost=size, avoid=[roots["d2"]])) == ["a5", "d6"]
    assert names(chain.path(2, cost=size, avoid=[roots["a5"]])) == ["d5", "d6"]
    assert names(chain.path(1, cost=size, avoid=[roots["d2"], roots["a5"]])) == []
    assert names(chain.path(1, cost=size, avoid=[roots["d6"]])) == ["d2", "d5"]
    assert names(chain.path(None, cost=size, avoid=[roots["a5"]])) == ["a0", "d1", "d2", "d5", "d6"]


# --- bounds ---


def test_what_came_before_the_last_anchor_but_one_is_forgotten():
    chain = chain_of(anchor(0))
    for version in range(1, 13):
        chain.add(delta(version - 1, version))
        if version % 4 == 0:
            chain.add(anchor(version))
    assert names(chain.links()) == ["a8", "d9", "d10", "d11", "d12", "a12"]
    assert names(chain.after(8)) == ["a8", "d9", "d10", "d11", "d12", "a12"]
    assert names(chain.after(7)) == ["a12"]
    assert chain.add(delta(6, 7)) is None
    again = chain_of(*chain.links())
    assert again.links() == chain.links()


def test_many_anchors_leave_two():
    chain = chain_of(*(anchor(version) for version in range(0, 200, 2)))
    assert len(chain) == 2


def test_no_chain_is_longer_than_allowed(monkeypatch):
    monkeypatch.setattr("node.weights.chain.chain.MAX_CHAIN_LINKS", 32)
    chain = chain_of(anchor(0))
    for version in range(1, 32):
        chain.add(delta(version - 1, version))
    assert len(chain) == len(chain.after(None)) == 32
    assert refusal(chain, delta(31, 32)).reason == "chain_length"
    chain.add(anchor(31))
    assert len(chain) == 32
    for version in range(32, 50):
        chain.add(delta(version - 1, version))
        assert len(chain) == 32
    assert names(chain.after(None))[:2] == ["a31", "d32"]
    assert names(chain.links())[0] == "d19"


def test_what_is_kept_is_bounded_in_bytes():
    chain = chain_of(anchor(0), *(delta(each, each + 1) for each in range(4)), anchor(4), delta(4, 5))
    roots = {
        name: decode_link(link).blob.root
        for name, link in zip(names(chain.links()), chain.links(), strict=True)
    }

    def kept(max_bytes: int, **how) -> list[str]:
        found = chain.worth_keeping(max_bytes, **({"strictly": False} | how))
        return [name for root in found for name, known in roots.items() if known == root]

    assert kept(10_000) == ["d5", "a4", "d4", "d3", "d2", "d1"]
    assert kept(1029) == ["d5", "a4", "d4"]
    assert kept(5) == ["d5", "a4"]
    assert kept(5, strictly=True) == []
    assert kept(15, strictly=True) == ["d5"]
    assert kept(1020, strictly=True) == ["d5", "a4", "d4"]
