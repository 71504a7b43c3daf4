"""Which owner is followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from node.weights.follow.choose import choose_owner
from protocol.messages import Lineage, PeerRecord

BASE, TOKENIZER = "a" * 64, "b" * 64


def record(owner: str | None, base: str = BASE, tokenizer: str = TOKENIZER) -> PeerRecord:
    lineage = Lineage(owner, base, tokenizer) if owner else None
    return PeerRecord(name="n", protocol_version=1, addresses=(), lineage=lineage)


def choose(
    records: Mapping[str, PeerRecord],
    wanted: str = "",
    trust: Mapping[str, float] | None = None,
    avoided: Collection[str] = (),
    me: str = "me",
) -> str | None:
    chosen = choose_owner(
        records,
        me=me,
        base_model=BASE,
        tokenizer=TOKENIZER,
        wanted=wanted,
        trust=lambda peer_id: (trust or {}).get(peer_id, 0.5),
        avoided=avoided,
    )
    return chosen.owner if chosen else None


def test_only_owners_of_the_same_base_model_and_tokenizer() -> None:
    assert choose({}) is None
    strangers = {
        "follower": record("owner elsewhere"),
        "observer": record(None),
        "other base": record("other base", base="c" * 64),
        "other tokenizer": record("other tokenizer", tokenizer="c" * 64),
        "me": record("me"),
    }
    assert choose(strangers) is None
    assert choose({**strangers, "owner": record("owner")}) == "owner"


def test_need_goes_before_trust_and_trust_before_the_own_order() -> None:
    owners = {name: record(name) for name in ("anna", "bert", "cleo")}
    assert choose(owners) in owners
    for favourite in owners:
        assert choose(owners, trust={favourite: 0.9}) == favourite
    followed = {**owners, "f1": record("cleo"), "f2": record("cleo"), "f3": record("anna")}
    assert choose(followed, trust={"cleo": 0.9}) == "bert"
    # This node's own record does not count as a follower: it is about to choose.
    assert choose({**owners, "me": record(choose(owners))}) == choose(owners)


def test_followers_that_do_not_see_each_other_spread_over_equal_owners() -> None:
    owners = {name: record(name) for name in ("anna", "bert", "cleo")}
    backwards = dict(reversed(owners.items()))
    chosen = Counter()
    for number in range(300):
        me = f"follower {number}"
        chosen[choose(owners, me=me)] += 1
        assert choose(backwards, me=me) == choose(owners, me=me)
    assert all(70 <= chosen[name] <= 130 for name in owners), chosen  # 100 +- 3.7 standard deviations


def test_the_configured_owner_is_waited_for() -> None:
    owners = {name: record(name) for name in ("anna", "bert")}
    assert choose(owners, wanted="bert", avoided={"bert"}) == "bert"
    assert choose(owners, wanted="cleo") is None


def test_an_owner_given_up_is_the_last_resort_and_one_in_quarantine_is_none() -> None:
    owners = {name: record(name) for name in ("anna", "bert")}
    assert choose(owners, avoided={"anna"}) == "bert"
    assert choose(owners, avoided={"anna", "bert"}) == choose(owners)
    assert (
        choose(owners, trust={"anna": 0.0}) == choose(owners, trust={"anna": 0.0}, avoided={"bert"}) == "bert"
    )
    assert choose(owners, trust={"anna": 0.0, "bert": 0.0}) is None
    assert choose(owners, wanted="anna", trust={"anna": 0.0}) is None  # neither when it is configured
