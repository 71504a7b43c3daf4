from __future__ import annotations

import msgspec

from node.environment.records import Prompt
from node.verify.base import Item
from node.verify.ledger import Ledger
from node.verify.provenance import Duplicate, PromptDerivation, SkipShare, SlotDerivation
from node.verify.schema import Schema
from protocol.messages import PromptRef, RolloutGroup
from protocol.prompts import slots
from tests.node.verify.world import (
    World,
    candidate,
    heard,
    item_at,
    nobody,
)

replace = msgspec.structs.replace


def item_of(world: World, group: RolloutGroup) -> Item:
    return Schema(world.charter).open(candidate(group))


def slot_check(world: World, ledger: Ledger | None = None) -> SlotDerivation:
    return SlotDerivation(
        world.charter,
        world.swarm_id,
        Ledger(max_windows=8, has_standing=nobody) if ledger is None else ledger,
    )


def test_only_the_derived_index_of_an_existing_slot(world, alice, bob):
    check = slot_check(world)
    group = world.group(alice, slot=3)
    assert check.check(item_of(world, group)).reason == ""
    for prompt in (
        PromptRef(window=100, slot=4, index=group.prompt.index),
        PromptRef(window=101, slot=3, index=group.prompt.index),
        PromptRef(window=100, slot=3, index=group.prompt.index + 1),
        PromptRef(window=100, slot=world.charter.slots_per_window, index=group.prompt.index),
        PromptRef(window=100, slot=2**20, index=group.prompt.index),
        world.prompt(bob, 3),
    ):
        assert check.check(item_of(world, replace(group, prompt=prompt))).reason == "tampered_prompt"


def test_every_slot_of_the_order_is_accepted(world, alice):
    check = slot_check(world)
    derived = slots(world.swarm_id, world.charter, 100, alice)
    assert len(derived) == world.charter.slots_per_window == 16
    group = world.group(alice)
    for slot, index in enumerate(derived):
        moved = replace(group, prompt=PromptRef(window=100, slot=slot, index=index))
        assert check.check(item_of(world, moved)).reason == ""


def test_a_second_different_answer_is_equivocation(world, alice):
    check = slot_check(world)
    group = world.group(alice)
    assert check.check(item_of(world, group)).reason == ""
    assert check.check(item_of(world, group)).reason == ""
    assert check.check(item_of(world, world.group(alice, seed=1))).reason == "equivocation"


def test_the_same_group_is_a_duplicate(world, alice):
    ledger = Ledger(max_windows=8, has_standing=nobody)
    item = item_of(world, world.group(alice))
    slot_check(world, ledger).check(item)
    duplicate = Duplicate(ledger)
    assert duplicate.check(item).reason == ""
    again = duplicate.check(item)
    assert (again.reason, again.blames_author) == ("duplicate", False)


def test_skipping_is_suspicious_only_beyond_the_charters_share_and_a_few_slots(world, alice):
    ledger = Ledger(max_windows=8, has_standing=nobody)
    check = SkipShare(world.charter, ledger)
    group = world.group(alice)

    def after(*numbers: int) -> str:
        for slot in numbers:
            item = item_of(world, replace(group, prompt=world.prompt(alice, slot)))
            slot_check(world, ledger).check(item)
        return check.check(item).reason

    assert after(7) == ""  # one receipt, seven skipped: too early to say
    assert after(9) == "skipped_too_much"  # 2 of 10 slots
    assert after(0, 1, 2) == ""  # late receipts: 5 of 10 slots are allowed to be missing
    assert after(11) == ""  # 6 of 12
    assert after(15) == "skipped_too_much"  # 7 of 16


def test_environment_and_question_word_for_word(world, alice):
    check = PromptDerivation(item_at)
    group = world.group(alice)
    assert check.check(item_of(world, group)).reason == ""
    for changed in (
        replace(group, question="Say yes."),
        replace(group, question=group.question + " "),
        replace(group, question=group.question.replace("a", "а")),  # a Cyrillic a
        replace(group, environment="toy/other"),
    ):
        assert check.check(item_of(world, changed)).reason == "tampered_prompt"


def test_the_item_is_asked_for_by_universe_index(world, alice):
    asked: list[int] = []

    def spy(index: int) -> Prompt:
        asked.append(index)
        return item_at(index)

    group = world.group(alice, slot=2)
    PromptDerivation(spy).check(item_of(world, group))
    assert asked == [slots(world.swarm_id, world.charter, 100, alice)[2]]


def test_a_slot_needs_no_body(world, alice):
    announcement = candidate(world.group(alice)).heard.announcement
    assert slot_check(world).check(heard(alice, announcement)).reason == ""
