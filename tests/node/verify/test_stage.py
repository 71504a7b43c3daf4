"""What a judgement means for pool, trust, counters and screen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import pytest

from node.clock import run_virtual
from node.compute import Lane
from node.environment.host import FailureReason
from node.events import Event, GroupJudged
from node.share.heard import Candidate
from node.share.pool import ReplayPool
from node.verify.base import ACCEPT, BLAMELESS_REASONS, UNCERTAIN_REASONS, Item, Judgement, reject
from node.verify.pipeline import Verifier
from node.verify.stage import VerifyStage
from protocol.messages import PromptRef, RolloutGroup
from tests.node.runtimes import ManualClock, make_links, make_peers, make_runtime
from tests.node.verify.world import EOS, EPOCH_MS, World, candidate, identity, rollout, served

ALICE, BOB, MALLORY = (identity(name).peer_id for name in ("alice", "bob", "mallory"))


class Bench:
    """A running verify stage with the book and the pool it writes to."""

    def __init__(self, world: World, verifier: Verifier | None = None) -> None:
        self.world = world
        self.events: list[Event] = []
        runtime = make_runtime(world.clock, {Lane.VERIFY: 0.1}, self.events)
        _, self.peers = make_peers(runtime, identity("node"), world.charter)
        self.pool = ReplayPool(16, 2, random.Random(0))
        self.queue: asyncio.Queue[Candidate] = asyncio.Queue(64)
        self.stage = VerifyStage(
            runtime, self.peers, self.queue, verifier or world.verifier(peers=self.peers), self.pool
        )

    async def take(self, item: Candidate) -> GroupJudged:
        """Put one candidate through the stage."""
        self.queue.put_nowait(item)
        before = len(self.events)
        await asyncio.sleep(1)
        (event,) = self.events[before:]
        assert isinstance(event, GroupJudged)
        return event

    def standing(self, peer: str) -> tuple[float, float, float]:
        """(accepted, soft, hard) of a peer."""
        for standing in self.peers.standings():
            if standing.peer == peer:
                return standing.accepted, standing.soft, standing.hard
        return 0.0, 0.0, 0.0

    def rejected(self, peer: str) -> dict[str, int]:
        rows = self.peers.table(make_links(ManualClock(), peer), {}, "")
        return next(row.rejected for row in rows if row.peer_id == peer)


def bench(
    test: Callable[[Bench], Awaitable[None]],
    *,
    verifier: Verifier | None = None,
    world: World | None = None,
) -> None:
    async def main() -> None:
        stand = Bench(world or World(), verifier)
        running = asyncio.create_task(stand.stage.run())
        try:
            await asyncio.sleep(0)
            assert stand.stage.gauge.status().waiting_for == "fetched bodies"
            await test(stand)
            assert not running.done(), "the stage ended"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


def upside_down(group: RolloutGroup) -> RolloutGroup:
    """The same group with every reward claimed wrongly."""
    rollouts = tuple(msgspec.structs.replace(each, reward=1.0 - each.reward) for each in group.rollouts)
    return msgspec.structs.replace(group, rollouts=rollouts)


# --- with the real verifier --------------------------------------------------------------------------------


def test_an_accepted_group_is_pooled_trusted_remembered_and_shown() -> None:
    async def test(bench: Bench) -> None:
        group = bench.world.group(ALICE)
        item = candidate(group, arrived_at=EPOCH_MS - 5)
        event = await bench.take(item)
        rewards = tuple(each.reward for each in group.rollouts)
        ((pooled, _),) = bench.pool.draw(1)
        assert (pooled.group, pooled.rewards, pooled.arrived_at) == (group, rewards, EPOCH_MS - 5)
        assert pooled.digest == item.heard.announcement.body.digest
        assert bench.pool.arrived.is_set()
        assert [len(arrays.token_ids_T) for arrays in pooled.tokens] == [
            len(each.answer.token_ids) // 4 for each in group.rollouts
        ]
        assert bench.standing(ALICE) == (1.0, 0.0, 0.0)
        assert (event.accepted, event.own, event.reason, event.author) == (True, False, "", ALICE)
        assert event.group == pooled.digest[:12]
        assert event.rewards == rewards
        assert [outcome.verdict for outcome in event.checks] == ["accept"] * len(event.checks)
        assert event.question == group.question
        (row,) = bench.peers.table(make_links(ManualClock()), {}, "")
        assert (row.accepted, row.lag, row.age_windows) == (1, 0.0, 0.0)

    bench(test)


def test_a_false_reward_is_a_hard_failure_and_our_rewards_are_shown() -> None:
    async def test(bench: Bench) -> None:
        group = bench.world.group(MALLORY)
        true = tuple(each.reward for each in group.rollouts)
        lie = upside_down(group)
        event = await bench.take(candidate(lie))
        assert (event.accepted, event.reason) == (False, "false_reward")
        assert event.rewards == true
        assert len(bench.pool) == 0
        assert not bench.pool.arrived.is_set()
        assert bench.standing(MALLORY) == (0.0, 0.0, 1.0)
        assert bench.rejected(MALLORY) == {"false_reward": 1}
        assert bench.peers.quarantined(MALLORY)

    bench(test)


def test_who_loses_by_arrival_loses_no_trust() -> None:
    async def test(bench: Bench) -> None:
        (slot, copied_slot), *_ = bench.world.shared_slots(ALICE, MALLORY)
        original = bench.world.group(ALICE, slot=slot, base="same")
        await bench.take(candidate(original))
        copy = msgspec.structs.replace(
            original,
            author=MALLORY,
            lineage=bench.world.lineage(MALLORY),
            prompt=bench.world.prompt(MALLORY, copied_slot),
        )
        event = await bench.take(candidate(copy, arrived_at=EPOCH_MS + 1))
        assert (event.accepted, event.reason) == (False, "copied")
        assert bench.standing(MALLORY) == (0.0, 0.0, 0.0)
        assert bench.rejected(MALLORY) == {"copied": 1}
        assert len(bench.pool) == 1

    bench(test)


def test_a_suspicious_group_is_used_and_its_author_trusted_less() -> None:
    async def test(bench: Bench) -> None:
        group = bench.world.group(ALICE)
        pair = tuple(rollout([ord("x"), EOS], [-1.0, logprob], reward=0.0) for logprob in (-0.1, -3.0))
        group = msgspec.structs.replace(group, rollouts=(*pair, *group.rollouts[2:]))
        event = await bench.take(candidate(group))
        assert event.accepted
        assert len(bench.pool) == 1
        assert bench.standing(ALICE) == (0.0, 1.0, 0.0)

    bench(test)


@pytest.mark.parametrize(
    ("failure", "standing"),
    [
        (FailureReason.UNAVAILABLE, (0.0, 0.0, 0.0)),  # our sandbox, nobody's fault
        (FailureReason.REFUSED, (0.0, 0.0, 0.0)),
        (FailureReason.TIMEOUT, (0.0, 1.0, 0.0)),  # a slow machine may miss the deadline
        (FailureReason.MEMORY, (0.0, 1.0, 0.0)),
        (FailureReason.FORBIDDEN, (0.0, 0.0, 1.0)),
    ],
)
def test_failures_of_the_scorer_cost_what_their_author_is_to_blame_for(
    failure: FailureReason, standing: tuple[float, float, float]
) -> None:
    async def test(bench: Bench) -> None:
        group = bench.world.group(ALICE)
        bench.world.judge.failures = {each.text: failure for each in group.rollouts}
        event = await bench.take(candidate(group))
        assert event.reason == f"scorer_{failure}"
        assert bench.standing(ALICE) == standing
        assert bench.rejected(ALICE) == {f"scorer_{failure}": 1}

    bench(test)


def test_late_and_double_groups_cost_nothing() -> None:
    async def test(bench: Bench) -> None:
        item = candidate(bench.world.group(ALICE))
        await bench.take(item)
        assert (await bench.take(item)).reason == "duplicate"
        old = candidate(bench.world.group(BOB, window=10))
        assert (await bench.take(old)).reason == "stale"
        assert bench.standing(ALICE) == (1.0, 0.0, 0.0)
        assert bench.standing(BOB) == (0.0, 0.0, 0.0)
        assert len(bench.pool) == 1

    bench(test)


def test_bodies_that_mean_nothing_are_refused_and_the_stage_goes_on() -> None:
    async def test(bench: Bench) -> None:
        honest = candidate(bench.world.group(ALICE))
        for number, body in enumerate((b"", b"\xc1", b"\x00" * 100, honest.body[:-1], honest.body + b"\x00")):
            event = await bench.take(served(ALICE, honest.heard.announcement, body))
            assert (event.accepted, event.question, event.completions) == (False, "", ())
            assert event.rewards == honest.heard.announcement.rewards
            assert bench.standing(ALICE)[2] == number + 1.0
        assert (await bench.take(candidate(bench.world.group(BOB)))).accepted

    bench(test)


def test_with_verification_off_claims_are_believed_but_only_sane_ones() -> None:
    async def test(bench: Bench) -> None:
        group = bench.world.group(MALLORY)
        lie = upside_down(group)
        assert (await bench.take(candidate(lie))).accepted
        ((pooled, _),) = bench.pool.draw(1)
        assert pooled.rewards == tuple(each.reward for each in lie.rollouts)
        for huge in (1e200, -1e300, 1001.0):
            rollouts = (msgspec.structs.replace(group.rollouts[0], reward=huge), *group.rollouts[1:])
            event = await bench.take(candidate(msgspec.structs.replace(group, rollouts=rollouts)))
            assert (event.accepted, event.reason) == (False, "reward_range")

    world = World()
    bench(test, world=world, verifier=world.verifier(enabled=False))


# --- every reason there is, by a verifier that says so -----------------------------------------------------


class Says:
    """Judges as told."""

    def __init__(self, group: RolloutGroup) -> None:
        self.group = group
        self.verdict = ACCEPT

    def judge(self, candidate: Candidate) -> Judgement:
        heard = candidate.heard
        item = Item(heard.sender, heard.announcement, heard.arrived_at, heard.envelope, self.group, ())
        return Judgement(item, self.verdict, ())


@pytest.mark.parametrize(
    ("reason", "blames", "standing"),
    [
        ("", True, (1.0, 0.0, 0.0)),
        ("false_reward", True, (0.0, 0.0, 1.0)),
        ("tampered_prompt", True, (0.0, 0.0, 1.0)),
        ("replayed", True, (0.0, 0.0, 1.0)),
        ("equivocation", True, (0.0, 0.0, 1.0)),
        ("not_finite", True, (0.0, 0.0, 1.0)),
        *((reason, True, (0.0, 1.0, 0.0)) for reason in sorted(UNCERTAIN_REASONS)),
        *((reason, False, (0.0, 0.0, 0.0)) for reason in sorted(BLAMELESS_REASONS)),
    ],
)
def test_hard_soft_and_blameless(reason: str, blames: bool, standing: tuple[float, float, float]) -> None:
    world = World()
    says = Says(world.group(ALICE))
    says.verdict = reject(reason, blames_author=blames) if reason else ACCEPT

    async def test(bench: Bench) -> None:
        await bench.take(candidate(says.group))
        assert bench.standing(ALICE) == standing

    bench(test, verifier=cast("Verifier", says), world=world)


def test_text_of_peers_is_shown_inert_and_short() -> None:
    world = World(group_size=3)
    group = world.group(MALLORY)
    texts = ("\x1b]8;;http://evil\x1b\\", "\u202etxt", "x" * 600)
    rollouts = tuple(
        msgspec.structs.replace(each, text=text) for each, text in zip(group.rollouts, texts, strict=True)
    )
    says = Says(msgspec.structs.replace(group, rollouts=rollouts, question="\x1b[2J" + "q" * 5000))
    says.verdict = reject("tampered_prompt")

    async def test(bench: Bench) -> None:
        event = await bench.take(candidate(says.group))
        assert not any(c in text for text in (event.question, *event.completions) for c in "\x1b\u202e")
        assert len(event.question) == 2000
        assert [len(text) for text in event.completions] == [len(texts[0]), 4, 500]

    bench(test, verifier=cast("Verifier", says), world=world)


def test_the_age_at_arrival_is_counted_from_the_end_of_the_prompts_window() -> None:
    world = World()
    says = Says(world.group(ALICE))
    world.clock.now += world.charter.window_ms // 2  # in the middle of window 100

    async def test(bench: Bench) -> None:
        for window in (100, 99, 98):
            says.group = msgspec.structs.replace(says.group, prompt=PromptRef(window, 0, 0))
            await bench.take(candidate(says.group))
        (row,) = bench.peers.table(make_links(ManualClock()), {}, "")
        assert row.age_windows == pytest.approx((0 + 0.5 + 1.5) / 3)

    bench(test, verifier=cast("Verifier", says), world=world)


def test_an_error_of_ours_ends_the_stage() -> None:
    class Broken:
        def judge(self, candidate: Candidate) -> Judgement:
            raise KeyError("a bug of ours")

    async def main() -> None:
        world = World()
        stand = Bench(world, cast("Verifier", Broken()))
        item = candidate(world.group(ALICE))
        stand.queue.put_nowait(item)
        with pytest.raises(KeyError, match="a bug of ours"):
            await stand.stage.run()

    run_virtual(main())
