from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from node.compute import InlineCompute
from node.sandbox.scorer import FailureReason
from node.share.accepted import Accepted
from node.verify.base import Candidate, Decision
from node.verify.pipeline import INLINE_BODY_BYTES
from protocol.messages import PromptRef
from protocol.rollouts import parse_tokens
from tests.node.verify.world import (
    ENVIRONMENT,
    EOS,
    EPOCH_MS,
    ToyScorer,
    World,
    candidate,
    identity,
    item_at,
    rollout,
)
from tests.rollouts import changed

T = TypeVar("T")
replace = msgspec.structs.replace


class GatedCompute:
    """Runs what it is given when the gate opens, and counts the calls."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.calls: list[str] = []

    async def run(self, lane: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self.calls.append(lane)
        await self.gate.wait()
        return function(*args, **kwargs)

    def close(self) -> None:
        return None


async def test_an_honest_group_is_accepted_with_our_own_rewards(world, alice):
    group = world.group(alice)
    judgement = await world.verifier().judge(candidate(group))
    assert judgement.accepted
    assert (judgement.reason, judgement.suspicions, judgement.hard, judgement.blames_author) == (
        "",
        (),
        False,
        False,
    )
    assert judgement.group == group
    assert judgement.question == group.question == item_at(group.prompt.index).text
    assert judgement.rewards == tuple(each.reward for each in group.rollouts)
    assert [outcome.check for outcome in judgement.checks] == [
        "schema",
        "lineage",
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


async def test_the_first_hard_failure_ends_it_and_nothing_dear_runs(world, alice):
    compute = GatedCompute()
    verifier = world.verifier(compute=compute)
    group = replace(world.group(alice), prompt=replace(world.prompt(alice, 0), slot=1))
    judgement = await verifier.judge(candidate(group))
    assert (judgement.accepted, judgement.reason, judgement.blames_author) == (False, "tampered_prompt", True)
    assert judgement.checks[-1].check == "slot"
    assert (judgement.checks[-1].verdict, judgement.checks[-1].reason) == ("reject", "tampered_prompt")
    assert judgement.rewards == ()
    assert (compute.calls, world.scorer.calls) == ([], 0)


async def test_a_soft_failure_is_noted_and_the_group_is_used(world, alice):
    group = world.group(alice)
    pair = tuple(rollout([ord("x"), EOS], [-1.0, logprob], reward=0.0) for logprob in (-0.1, -3.0))
    group = replace(group, rollouts=(*pair, *group.rollouts[2:]))
    judgement = await world.verifier().judge(candidate(group))
    assert judgement.accepted
    assert judgement.suspicions == ("inconsistent_logprobs",)


async def test_an_unreadable_body_is_refused_with_a_reason(world, alice):
    honest = candidate(world.group(alice))
    judgement = await world.verifier().judge(
        Candidate(alice, honest.announcement, honest.body[:-1], EPOCH_MS)
    )
    assert (judgement.reason, judgement.group, judgement.question) == ("size", None, "")
    assert [outcome.check for outcome in judgement.checks] == ["schema"]


async def test_large_bodies_are_decoded_beside_the_loop(alice):
    world = World(group_size=64, max_new_tokens=2048)
    compute = GatedCompute()
    tokens = [ord("x")] * 2047 + [EOS]
    group = replace(
        world.group(alice), rollouts=tuple(rollout(tokens, [-0.1] * 2048, reward=0.0) for _ in range(64))
    )
    item = candidate(group)
    assert len(item.body) > INLINE_BODY_BYTES
    assert (await world.verifier(compute=compute).judge(item)).accepted
    assert compute.calls == ["verify", "verify"]


# --- state across groups ------------------------------------------------------------------------------------


async def test_the_same_group_twice_and_another_for_its_slot(world, alice):
    verifier = world.verifier()
    group = world.group(alice)
    assert (await verifier.judge(candidate(group))).accepted
    again = await verifier.judge(candidate(group))
    assert (again.reason, again.blames_author) == ("duplicate", False)
    other = await verifier.judge(candidate(world.group(alice, seed=1)))
    assert (other.reason, other.blames_author) == ("equivocation", True)


async def test_two_copies_in_flight_see_each_other(world, alice, bob):
    compute = GatedCompute(is_open=False)
    verifier = world.verifier(compute=compute)
    mine, theirs = world.shared_slots(alice, bob)[0]
    group = world.group(alice, slot=mine, version=2)
    copy = replace(
        group,
        author=bob,
        lineage=world.lineage(bob),
        prompt=world.prompt(bob, theirs),
    )
    first = asyncio.create_task(verifier.judge(candidate(group, EPOCH_MS)))
    await asyncio.sleep(0)
    second = await verifier.judge(candidate(copy, EPOCH_MS + 1))
    assert second.reason == "copied"
    compute.gate.set()
    assert (await first).accepted


async def test_a_refused_group_accuses_nobody(world, alice, bob):
    """The copier comes first, and lies about the rewards as well: the author's own group is still welcome."""
    verifier = world.verifier()
    mine, theirs = world.shared_slots(alice, bob)[0]
    group = world.group(alice, slot=mine, version=2)
    flipped = tuple(replace(each, reward=1 - each.reward) for each in group.rollouts)
    copy = replace(
        group, author=bob, lineage=world.lineage(bob), prompt=world.prompt(bob, theirs), rollouts=flipped
    )
    assert (await verifier.judge(candidate(copy, EPOCH_MS))).reason == "false_reward"
    assert (await verifier.judge(candidate(group, EPOCH_MS + 1))).accepted


async def test_our_own_completions_come_back_as_a_copy(world, alice, bob):
    verifier = world.verifier()
    mine, theirs = world.shared_slots(alice, bob)[0]
    group = world.group(alice, slot=mine, version=2)
    tokens = tuple(map(parse_tokens, group.rollouts))
    verifier.observe_own(Accepted("", group, tokens, (), world.clock.now, own=True))
    world.clock.now += 1
    copy = replace(group, author=bob, lineage=world.lineage(bob), prompt=world.prompt(bob, theirs))
    assert (await verifier.judge(candidate(copy, world.clock.now))).reason == "copied"


async def test_a_failure_of_our_sandbox_blames_nobody_and_may_be_repeated(world, alice):
    group = world.group(alice)
    scorer = ToyScorer({group.rollouts[0].text: FailureReason.UNAVAILABLE})
    verifier = world.verifier(scorer=scorer)
    judgement = await verifier.judge(candidate(group))
    assert (judgement.reason, judgement.blames_author) == ("scorer_unavailable", False)
    scorer.failures.clear()
    assert (await verifier.judge(candidate(group))).accepted


async def test_answers_that_break_the_scorer_are_their_authors_fault(world, alice):
    group = world.group(alice)
    verifier = world.verifier(scorer=ToyScorer({group.rollouts[0].text: FailureReason.FORBIDDEN}))
    judgement = await verifier.judge(candidate(group))
    assert (judgement.reason, judgement.blames_author) == ("scorer_forbidden", True)
    assert (await verifier.judge(candidate(group))).reason == "duplicate"


async def test_a_cancelled_judging_may_be_repeated(world, alice):
    compute = GatedCompute(is_open=False)
    verifier = world.verifier(compute=compute)
    item = candidate(world.group(alice))
    task = asyncio.create_task(verifier.judge(item))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    compute.gate.set()
    assert (await verifier.judge(item)).accepted


async def test_a_bug_in_a_check_is_not_swallowed(world, alice):
    def broken(index: int) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await world.verifier(item_at=broken).judge(candidate(world.group(alice)))


# --- announcements ------------------------------------------------------------------------------------------


def test_an_announcement_alone_tells_what_not_to_fetch(world, alice, bob):
    verifier = world.verifier()
    honest = candidate(world.group(alice)).announcement
    assert verifier.observe(alice, honest, EPOCH_MS).decision is Decision.ACCEPT
    assert verifier.observe(alice, honest, EPOCH_MS + 5).decision is Decision.ACCEPT
    assert verifier.observe(bob, honest, EPOCH_MS).reason == "tampered_prompt"  # not one of bob's slots
    assert verifier.observe(alice, replace(honest, rewards=(0.0,) * 8), EPOCH_MS).reason == "equivocation"
    old = replace(honest, prompt=world.prompt(alice, 0, window=90))
    assert verifier.observe(alice, old, EPOCH_MS).reason == "stale"
    wrong = replace(honest, prompt=PromptRef(window=100, slot=1, index=honest.prompt.index))
    assert verifier.observe(alice, wrong, EPOCH_MS).reason == "tampered_prompt"
    receipt = replace(honest, prompt=world.prompt(alice, 2))
    assert verifier.observe(alice, receipt, EPOCH_MS).reason == ""


async def test_who_announces_anothers_digest_first_accuses_nobody(world, alice, bob):
    """Bob hears of Alice's group and announces its digest as his own, earlier for us, without a body."""
    verifier = world.verifier()
    (slot, theirs), *_ = world.shared_slots(alice, bob)
    honest = candidate(world.group(alice, slot=slot), arrived_at=EPOCH_MS)
    claim = replace(honest.announcement, prompt=world.prompt(bob, theirs))
    assert verifier.observe(bob, claim, EPOCH_MS - 40).decision is Decision.ACCEPT
    assert verifier.observe(alice, honest.announcement, EPOCH_MS).decision is Decision.ACCEPT
    assert (await verifier.judge(honest)).accepted


async def test_receipts_count_against_picking_the_lucky_slots(world, alice):
    """Bodies of slots 0 and 9 only; with the receipts of the slots between them nothing is suspicious."""
    groups = [world.group(alice, slot=slot) for slot in range(10)]
    suspicious, honest = world.verifier(), world.verifier()
    for slot in range(1, 9):
        receipt = candidate(groups[slot]).announcement
        assert honest.observe(alice, receipt, EPOCH_MS).reason == ""
    for verifier, expected in ((suspicious, ("skipped_too_much",)), (honest, ())):
        assert (await verifier.judge(candidate(groups[0]))).suspicions == ()
        judgement = await verifier.judge(candidate(groups[9]))
        assert judgement.accepted
        assert judgement.suspicions == expected


def test_freshness_of_an_observed_announcement_ends(world, alice):
    verifier = world.verifier()
    honest = candidate(world.group(alice)).announcement
    assert verifier.is_fresh(alice, honest)
    world.clock.now += 4 * world.charter.window_ms
    assert not verifier.is_fresh(alice, honest)


# --- off, and counters --------------------------------------------------------------------------------------


async def test_without_verification_claims_are_believed_but_bytes_are_still_hostile(world, alice, bob):
    verifier = world.verifier(enabled=False)
    group = world.group(alice)
    lie = replace(
        group,
        question="Say yes.",
        environment="toy/other",
        prompt=PromptRef(window=3, slot=99, index=0),
        rollouts=tuple(replace(each, reward=1 - each.reward) for each in group.rollouts),
    )
    judgement = await verifier.judge(candidate(lie))
    assert judgement.accepted
    assert judgement.rewards == tuple(1 - each.reward for each in group.rollouts)
    assert [outcome.check for outcome in judgement.checks] == ["schema"]
    assert world.scorer.calls == 0
    assert verifier.observe(alice, candidate(lie).announcement, EPOCH_MS).decision is Decision.ACCEPT
    assert (await verifier.judge(candidate(lie, sender=bob))).reason == "author"
    broken = np.full(len(group.rollouts[0].answer.logprobs) // 4, np.nan, dtype="<f4").tobytes()
    poisoned = replace(group, rollouts=(changed(group.rollouts[0], logprobs=broken), *group.rollouts[1:]))
    assert (await verifier.judge(candidate(poisoned))).reason == "not_finite"


async def test_counters(world, alice):
    verifier = world.verifier()
    assert verifier.counts() == ()
    group = world.group(alice)
    for item in (group, group, replace(group, environment=ENVIRONMENT + "s"), world.group(alice, slot=1)):
        await verifier.judge(candidate(item))
    by_name = {each.check: each for each in verifier.counts()}
    assert (by_name["schema"].accepted, by_name["slot"].rejected, by_name["duplicate"].rejected) == (4, 1, 1)
    assert (by_name["reward"].accepted, by_name["reward"].rejected, by_name["reward"].suspected) == (2, 0, 0)
    assert by_name["schema"].cost_s > 0
    assert "plausibility" not in by_name  # there is no local policy


async def test_state_stays_bounded_under_many_authors_and_windows(alice):
    world = World(pool_size=8)
    verifier = world.verifier(compute=InlineCompute({}))
    template = candidate(world.group(alice)).announcement
    for number in range(40):
        author = identity(str(number)).peer_id
        for window in range(97, 107):
            prompt = world.prompt(author, 0, window)
            lineage = replace(template.lineage, owner=author)
            announcement = replace(
                template, lineage=lineage, prompt=prompt, completions=f"{number * 16 + window:064x}"
            )
            assert verifier.observe(author, announcement, EPOCH_MS).reason == ""
    assert len(verifier._ledger) == 400
