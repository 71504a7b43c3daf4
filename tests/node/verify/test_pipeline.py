from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from node.environment.host import FailureReason
from node.peers.trust import Hardness
from node.share.accepted import Accepted
from node.verify.base import Decision
from protocol.messages import PromptRef
from protocol.rollouts import parse_tokens
from tests.node.verify.world import (
    ENVIRONMENT,
    EOS,
    EPOCH_MS,
    Judge,
    World,
    candidate,
    heard,
    identity,
    rollout,
    served,
)
from tests.rollouts import changed

T = TypeVar("T")
replace = msgspec.structs.replace


def test_an_honest_group_is_accepted_with_our_own_rewards(world, alice):
    group = world.group(alice)
    judgement = world.verifier().judge(candidate(group))
    assert judgement.accepted
    assert (judgement.reason, judgement.suspicions, judgement.found) == ("", (), Hardness.ACCEPTED)
    assert judgement.item.group == group
    assert judgement.rewards == tuple(each.reward for each in group.rollouts)
    assert [outcome.check for outcome in judgement.checks] == [
        "schema",
        "lineage",
        "environment",
        "freshness",
        "slot",
        "duplicate",
        "skips",
        "copies",
        "prompt",
        "tokens",
        "consistency",
        "reward",
    ]
    assert {outcome.verdict for outcome in judgement.checks} == {"accept"}
    assert all(outcome.cost_s >= 0 for outcome in judgement.checks)


def test_the_first_hard_failure_ends_it_and_nothing_dear_runs(world, alice):
    verifier = world.verifier()
    group = replace(world.group(alice), prompt=replace(world.prompt(alice, 0), slot=1))
    judgement = verifier.judge(candidate(group))
    assert (judgement.accepted, judgement.reason) == (False, "tampered_prompt")
    assert judgement.found is Hardness.HARD
    assert judgement.checks[-1].check == "slot"
    assert (judgement.checks[-1].verdict, judgement.checks[-1].reason) == ("reject", "tampered_prompt")
    assert judgement.rewards == ()
    assert world.judge.calls == 0


def test_a_soft_failure_is_noted_and_the_group_is_used(world, alice):
    group = world.group(alice)
    pair = tuple(rollout([ord("x"), EOS], [-1.0, logprob], reward=0.0) for logprob in (-0.1, -3.0))
    group = replace(group, rollouts=(*pair, *group.rollouts[2:]))
    judgement = world.verifier().judge(candidate(group))
    assert judgement.accepted
    assert judgement.suspicions == ("inconsistent_logprobs",)


def test_an_unreadable_body_is_refused_with_a_reason(world, alice):
    honest = candidate(world.group(alice))
    judgement = world.verifier().judge(served(alice, honest.heard.announcement, honest.body[:-1], EPOCH_MS))
    assert (judgement.reason, judgement.item) == ("size", None)
    assert [outcome.check for outcome in judgement.checks] == ["schema"]


# --- state across groups ------------------------------------------------------------------------------------


def test_the_same_group_twice_and_another_for_its_slot(world, alice):
    verifier = world.verifier()
    group = world.group(alice)
    assert verifier.judge(candidate(group)).accepted
    again = verifier.judge(candidate(group))
    assert (again.reason, again.verdict.blames_author) == ("duplicate", False)
    other = verifier.judge(candidate(world.group(alice, seed=1)))
    assert (other.reason, other.verdict.blames_author) == ("equivocation", True)


def test_a_refused_group_accuses_nobody(world, alice, bob):
    """The copier comes first, and lies about the rewards as well: the author's own group is still welcome."""
    verifier = world.verifier()
    mine, theirs = world.shared_slots(alice, bob)[0]
    group = world.group(alice, slot=mine, version=2)
    flipped = tuple(replace(each, reward=1 - each.reward) for each in group.rollouts)
    copy = replace(
        group, author=bob, lineage=world.lineage(bob), prompt=world.prompt(bob, theirs), rollouts=flipped
    )
    assert verifier.judge(candidate(copy, EPOCH_MS)).reason == "false_reward"
    assert verifier.judge(candidate(group, EPOCH_MS + 1)).accepted


def test_announcing_anothers_answers_first_accuses_nobody(world, alice, bob):
    """A copier that is always 40 ms ahead, and never serves a body."""
    verifier = world.verifier()
    for mine, theirs in world.shared_slots(alice, bob):
        group = world.group(alice, slot=mine, version=2)
        copy = replace(group, author=bob, lineage=world.lineage(bob), prompt=world.prompt(bob, theirs))
        assert verifier.observe(candidate(copy, EPOCH_MS).heard).reason == ""
        assert verifier.judge(candidate(group, EPOCH_MS + 40)).accepted
        assert verifier.judge(candidate(copy, EPOCH_MS + 80)).reason == "copied"


def test_a_stolen_text_for_another_prompt_does_not_stand_in_its_authors_way(world, alice, bob):
    """Served, first, and scored as the poor answer to the copier's own prompt that it is."""
    verifier = world.verifier()
    theirs = world.group(bob, version=2)
    slot = next(slot for slot in range(8) if world.prompt(alice, slot).index != theirs.prompt.index)
    group = world.group(alice, slot=slot, version=2)
    stolen = tuple(
        replace(each, reward=float(each.text == str(theirs.prompt.index))) for each in group.rollouts
    )
    assert verifier.judge(candidate(replace(theirs, rollouts=stolen), EPOCH_MS)).accepted
    assert verifier.judge(candidate(group, EPOCH_MS + 40)).accepted


def test_our_own_completions_come_back_as_a_copy(world, alice, bob):
    verifier = world.verifier()
    mine, theirs = world.shared_slots(alice, bob)[0]
    group = world.group(alice, slot=mine, version=2)
    tokens = tuple(map(parse_tokens, group.rollouts))
    verifier.observe_own(Accepted("", group, tokens, (), world.clock.now, own=True))
    world.clock.now += 1
    copy = replace(group, author=bob, lineage=world.lineage(bob), prompt=world.prompt(bob, theirs))
    assert verifier.judge(candidate(copy, world.clock.now)).reason == "copied"


def test_a_failure_of_our_sandbox_blames_nobody_and_may_be_repeated(world, alice):
    group = world.group(alice)
    judge = Judge({group.rollouts[0].text: FailureReason.UNAVAILABLE})
    verifier = world.verifier(host=judge)
    judgement = verifier.judge(candidate(group))
    assert (judgement.reason, judgement.verdict.blames_author) == ("scorer_unavailable", False)
    judge.failures.clear()
    assert verifier.judge(candidate(group)).accepted


def test_answers_that_break_the_scorer_are_their_authors_fault(world, alice):
    group = world.group(alice)
    verifier = world.verifier(host=Judge({group.rollouts[0].text: FailureReason.FORBIDDEN}))
    judgement = verifier.judge(candidate(group))
    assert (judgement.reason, judgement.verdict.blames_author) == ("scorer_forbidden", True)
    assert verifier.judge(candidate(group)).reason == "duplicate"


def test_a_bug_in_a_check_is_not_swallowed(world, alice):
    def broken(index: int) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.verifier(item_at=broken).judge(candidate(world.group(alice)))


# --- announcements ------------------------------------------------------------------------------------------


def test_an_announcement_alone_tells_what_not_to_fetch(world, alice, bob):
    verifier = world.verifier()
    honest = candidate(world.group(alice)).heard.announcement
    assert verifier.observe(heard(alice, honest)).decision is Decision.ACCEPT
    assert verifier.observe(heard(alice, honest)).decision is Decision.ACCEPT
    assert verifier.observe(heard(bob, honest)).reason == "tampered_prompt"  # not one of bob's slots
    assert verifier.observe(heard(alice, replace(honest, rewards=(0.0,) * 8))).reason == "equivocation"
    old = replace(honest, prompt=world.prompt(alice, 0, window=90))
    assert verifier.observe(heard(alice, old)).reason == "stale"
    wrong = replace(honest, prompt=PromptRef(window=100, slot=1, index=honest.prompt.index))
    assert verifier.observe(heard(alice, wrong)).reason == "tampered_prompt"
    receipt = replace(honest, prompt=world.prompt(alice, 2))
    assert verifier.observe(heard(alice, receipt)).reason == ""


def test_who_announces_anothers_digest_first_accuses_nobody(world, alice, bob):
    """Bob hears of Alice's group and announces its digest as his own, earlier for us, without a body."""
    verifier = world.verifier()
    (slot, theirs), *_ = world.shared_slots(alice, bob)
    honest = candidate(world.group(alice, slot=slot), arrived_at=EPOCH_MS)
    claim = replace(honest.heard.announcement, prompt=world.prompt(bob, theirs))
    assert verifier.observe(heard(bob, claim, EPOCH_MS - 40)).decision is Decision.ACCEPT
    assert verifier.observe(honest.heard).decision is Decision.ACCEPT
    assert verifier.judge(honest).accepted


def test_receipts_count_against_picking_the_lucky_slots(world, alice):
    """Bodies of slots 0 and 9 only; with the receipts of the slots between them nothing is suspicious."""
    groups = [world.group(alice, slot=slot) for slot in range(10)]
    suspicious, honest = world.verifier(), world.verifier()
    for slot in range(1, 9):
        receipt = candidate(groups[slot]).heard.announcement
        assert honest.observe(heard(alice, receipt)).reason == ""
    for verifier, expected in ((suspicious, ("skipped_too_much",)), (honest, ())):
        assert verifier.judge(candidate(groups[0])).suspicions == ()
        judgement = verifier.judge(candidate(groups[9]))
        assert judgement.accepted
        assert judgement.suspicions == expected


def test_freshness_of_an_observed_announcement_ends(world, alice):
    verifier = world.verifier()
    honest = candidate(world.group(alice)).heard.announcement
    assert verifier.is_fresh(heard(alice, honest))
    world.clock.now += 4 * world.charter.window_ms
    assert not verifier.is_fresh(heard(alice, honest))


# --- off, and counters --------------------------------------------------------------------------------------


def test_without_verification_claims_are_believed_but_bytes_are_still_hostile(world, alice, bob):
    verifier = world.verifier(enabled=False)
    group = world.group(alice)
    lie = replace(
        group,
        question="Say yes.",
        environment="toy/other",
        prompt=PromptRef(window=3, slot=99, index=0),
        rollouts=tuple(replace(each, reward=1 - each.reward) for each in group.rollouts),
    )
    judgement = verifier.judge(candidate(lie))
    assert judgement.accepted
    assert judgement.rewards == tuple(1 - each.reward for each in group.rollouts)
    assert [outcome.check for outcome in judgement.checks] == ["schema"]
    assert world.judge.calls == 0
    assert verifier.observe(heard(alice, candidate(lie).heard.announcement)).decision is Decision.ACCEPT
    assert verifier.judge(candidate(lie, sender=bob)).reason == "author"
    broken = np.full(len(group.rollouts[0].answer.logprobs) // 4, np.nan, dtype="<f4").tobytes()
    poisoned = replace(group, rollouts=(changed(group.rollouts[0], logprobs=broken), *group.rollouts[1:]))
    assert verifier.judge(candidate(poisoned)).reason == "not_finite"


def test_counters(world, alice):
    verifier = world.verifier()
    assert verifier.counts() == ()
    group = world.group(alice)
    for item in (group, group, replace(group, environment=ENVIRONMENT + "s"), world.group(alice, slot=1)):
        verifier.judge(candidate(item))
    by_name = {each.check: each for each in verifier.counts()}
    assert (by_name["schema"].accepted, by_name["slot"].rejected, by_name["duplicate"].rejected) == (4, 1, 1)
    assert (by_name["reward"].accepted, by_name["reward"].rejected, by_name["reward"].suspected) == (2, 0, 0)
    assert by_name["schema"].cost_s > 0
    assert "plausibility" not in by_name  # there is no local policy


def test_state_stays_bounded_under_many_authors_and_windows(alice):
    world = World(pool_size=8)
    verifier = world.verifier()
    template = candidate(world.group(alice)).heard.announcement
    for number in range(40):
        author = identity(str(number)).peer_id
        for window in range(97, 107):
            prompt = world.prompt(author, 0, window)
            lineage = replace(template.lineage, owner=author)
            announcement = replace(
                template, lineage=lineage, prompt=prompt, completions=f"{number * 16 + window:064x}"
            )
            assert verifier.observe(heard(author, announcement)).reason == ""
    assert verifier.receipts == 400
