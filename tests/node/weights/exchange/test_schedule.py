"""Choices of the exchange: rarest first, the end of a blob, what a source shows to whom."""

from __future__ import annotations

import random

from node.weights.exchange.schedule import Plan, Reveal


def plan_of(count: int = 8, missing=None, seed: int = 1) -> Plan:
    plan = Plan(count, range(count) if missing is None else missing, random.Random(seed))
    for peer in "abc":
        plan.join(peer)
    return plan


def test_rarest_chunk_first():
    plan = plan_of()
    plan.has("a", range(8))
    plan.has("b", [0, 1, 2, 3, 4, 5, 6])
    plan.has("c", [0, 1, 2, 3, 4])
    assert plan.choose("a") == 7
    assert {plan.choose("a"), plan.choose("b")} == {5, 6}
    plan.leave("c")
    assert plan.choose("a") in range(5)


def test_ties_fall_differently_for_different_receivers():
    firsts = set()
    for seed in range(20):
        plan = plan_of(seed=seed)
        plan.has("a", range(8))
        firsts.add(plan.choose("a"))
    assert len(firsts) > 4


def test_chunk_is_asked_for_once_and_only_from_who_has_it():
    plan = plan_of(4, missing=[1, 2])
    plan.has("a", [0, 1])
    assert plan.choose("a") == 1
    assert plan.choose("a") is None
    assert plan.choose("b") is None
    assert plan.has("b", [1])
    assert not plan.has("b", [1])
    assert plan.choose("b") is None


def test_what_a_lost_peer_was_asked_for_is_open_again():
    plan = plan_of(2)
    plan.has("a", [0, 1])
    plan.has("b", [0, 1])
    taken = plan.choose("a")
    plan.leave("a")
    assert {plan.choose("b"), plan.choose("b")} == {0, 1}
    assert plan.missing == 2
    plan.arrived(taken)
    plan.arrived(taken)
    assert plan.missing == 1


def test_second_source_only_when_all_that_is_missing_was_asked_for():
    plan = plan_of(3)
    plan.has("a", [0, 1, 2])
    plan.has("b", [0, 1])
    plan.has("c", [0, 1])
    first, second = plan.choose("b"), plan.choose("b")
    assert plan.choose_late("c") is None
    assert plan.choose_late("c", late=[second]) == second
    assert plan.choose("a") == 2
    assert plan.choose_late("c") == first
    assert plan.choose_late("a") is None
    plan.release("c", first)
    assert plan.choose_late("a") == first


def reveal_of(*receivers: str, count: int = 8) -> Reveal:
    reveal = Reveal(count, random.Random(1))
    for receiver in receivers:
        reveal.join(receiver)
    return reveal


def test_source_shows_different_chunks_until_all_were_sent():
    reveal = reveal_of("a", "b")
    shown = {receiver: reveal.show(receiver, 0.0, 4, idle=False) for receiver in "ab"}
    assert sorted(shown["a"] + shown["b"]) == list(range(8))
    assert reveal.show("a", 0.0, 4, idle=True) == []
    for receiver, indices in shown.items():
        for index in indices:
            assert not reveal.done
            reveal.sent(receiver, index)
    assert reveal.done


def test_what_was_shown_to_a_lost_receiver_is_for_others():
    reveal = reveal_of("a", "b")
    lost = reveal.show("a", 0.0, 3, idle=False)
    reveal.leave("a")
    assert set(lost) <= set(reveal.show("b", 0.0, 8, idle=False))


def test_receiver_that_lets_chunks_lie_is_passed_over():
    reveal = reveal_of("a", "b", count=4)
    shown = reveal.show("a", 0.0, 2, idle=False)
    reveal.linger(1.0, [("a", shown[0])])
    assert sorted(reveal.show("b", 1.0, 4, idle=False)) == sorted(set(range(4)) - {shown[0]})
    assert reveal.show("a", 1.0, 4, idle=False) == []
    reveal.sent("a", shown[0])
    reveal.leave("b")
    assert len(reveal.show("a", 1.0, 9, idle=False)) == 3


def test_what_went_to_a_silent_receiver_is_for_others_first():
    reveal = reveal_of("a", "b", "c", count=6)
    passed_on, lost, kept = reveal.show("a", 0.0, 3, idle=False)
    for index in (passed_on, lost, kept):
        reveal.sent("a", index)
    reveal.got("a", kept)
    reveal.got("b", passed_on)
    for _ in range(2):  # it stays silent
        reveal.lost("a", [passed_on, lost])
    assert reveal.show("a", 1.0, 6, idle=True) == []
    assert reveal.show("b", 1.0, 1, idle=False) == [lost]
    rest = reveal.show("c", 1.0, 6, idle=False)
    assert sorted([passed_on, lost, kept, *rest]) == list(range(6))
    for index in rest:
        reveal.sent("c", index)
    assert not reveal.done
    reveal.sent("b", lost)
    assert reveal.done


def test_chunk_that_seemed_lost_and_is_told_of_after_all_is_not_sent_again():
    reveal = reveal_of("a", "b", count=1)
    (index,) = reveal.show("a", 0.0, 1, idle=False)
    reveal.sent("a", index)
    reveal.lost("a", [index])
    assert not reveal.done
    reveal.got("a", index)
    assert reveal.done
    assert reveal.show("b", 1.0, 1, idle=True) == []


def test_receiver_that_does_not_pass_on_gets_less_unless_nobody_else_asks():
    reveal = reveal_of("a", "b", count=20)
    for _ in range(10):
        for index in reveal.show("a", 0.0, 2, idle=False):
            reveal.sent("a", index)
    assert reveal.show("a", 0.0, 2, idle=False) == []
    assert reveal.load("a") > reveal.load("b") == 0
    assert reveal.show("a", 0.0, 1, idle=True)
    for index in range(20):
        reveal.got("b", index)
    assert reveal.load("a") <= 1


def test_chunk_that_a_receiver_has_already_is_not_sent():
    reveal = reveal_of("a", count=4)
    for index in range(3):
        reveal.got("a", index)
    assert reveal.show("a", 0.0, 4, idle=False) == [3]
    reveal.got("a", 3)
    assert reveal.done
