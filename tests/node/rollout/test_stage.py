"""The rollout stage: what it makes, what holds it back, what it survives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from node.clock import VirtualClock, run_virtual
from node.compute import Lane
from node.config import RolloutConfig, load_config
from node.environment.host import FailureReason
from node.environment.records import Completion, Prompt
from node.events import Event, GroupJudged, Notice
from node.membership import Membership
from node.rollout.admission import Admission
from node.rollout.engine.base import Engine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.generate import Generator
from node.rollout.policy import Policy
from node.rollout.prompts import PromptFeed, Universe
from node.rollout.scoring import OwnScorer
from node.rollout.stage import RolloutStage
from node.share.accepted import Accepted
from node.state.windows import MemoryWindows
from node.supervise import sole_cause
from protocol.charter import swarm_id
from protocol.codec import encode
from protocol.messages import Lineage, PromptRef, Rollout, RolloutGroup
from protocol.prompts import slots
from tests.node.runtimes import make_runtime
from tests.node.toy import ToyEnvironment, ToyHost, make_charter
from tests.node.verify.world import identity

ALICE = identity("alice")


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture(scope="module")
def engine(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy)


# --- the loop ----------------------------------------------------------------------------------------------


class Bench:
    """A running stage over a tiny policy. `options` are settings of `rollout.*` and fields of the charter."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        *,
        groups: int = 2,
        room: int = 100,
        environment: Any = None,
        generate_s: float = 0.5,
        **options: Any,
    ) -> None:
        options = {"max_staleness": 0, **options}
        settings = options.keys() & RolloutConfig.model_fields.keys()
        rollout = {f"rollout.{name}": options.pop(name) for name in settings}
        config = load_config([], {"network.transport": "none", **rollout})
        self.clock = VirtualClock()
        runtime = make_runtime(self.clock, {Lane.GENERATE: generate_s, Lane.SCORE: 0.1})
        self.charter = make_charter([policy], self.clock.now_ms(), **options)
        member = Membership(ALICE, self.charter, self.clock)
        self.tasks = ToyHost(environment)
        self.admission = Admission(config.rollout.max_staleness, groups, config.rollout.token_budget)
        self.awake = asyncio.Event()
        self.awake.set()
        self.events: list[Event] = []
        self.published: list[RolloutGroup] = []
        self.out: asyncio.Queue[Accepted] = asyncio.Queue(room)
        runtime.bus.subscribe(self.events.append)
        self.stage = RolloutStage(
            runtime,
            PromptFeed(runtime, member, Universe(member.swarm_id, self.charter, self.tasks), MemoryWindows()),
            self.admission,
            self.out,
            self.publish,
            max_in_flight=config.rollout.max_in_flight,
            awake=self.awake,
        )
        self.gauge = self.stage.gauge
        scorer = OwnScorer(self.tasks)
        lineage = Lineage(ALICE.peer_id, "a" * 64, "b" * 64)
        self.generator = Generator(member, lineage, policy, engine, scorer, config)

    async def publish(self, own: Accepted, body: bytes) -> None:
        assert body == encode(own.group)
        self.published.append(own.group)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def bench(policy: Policy, engine: TransformersEngine) -> Callable[..., None]:
    """Runs a test with a running stage and ends it."""

    def run(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            made = Bench(policy, **{"engine": engine, **options})
            running = asyncio.create_task(made.stage.run(made.generator))
            try:
                await test(made)
                assert not running.done(), "the stage ended"
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        run_virtual(main())

    return run


def test_groups_are_made_slot_by_slot_scored_queued_and_published(
    bench: Callable[..., None], policy: Policy
) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(1)
        own = [bench.out.get_nowait() for _ in range(2)]
        assert bench.out.empty()
        wanted = slots(swarm_id(bench.charter), bench.charter, 0, ALICE.peer_id)
        for slot, each in enumerate(own):
            group = each.group
            assert group.prompt == PromptRef(0, slot, wanted[slot])
            assert len(group.rollouts) == bench.charter.group_size
            assert each.rewards == tuple(float(len(r.text) % 2) for r in group.rollouts)
            assert each.rewards == tuple(r.reward for r in group.rollouts)
            assert all(policy.decode(ids(r)) == r.text for r in group.rollouts)
            assert each.generate_s == pytest.approx(0.25)  # half of the batch's 0.5 s
        assert bench.published == [each.group for each in own]
        judged = bench.of(GroupJudged)
        assert [(e.own, e.accepted, e.slot) for e in judged] == [(True, True, 0), (True, True, 1)]
        assert [e.group for e in judged] == [each.digest[:12] for each in own]

    bench(test)


def ids(each: Rollout) -> list[int]:
    return [
        int.from_bytes(each.answer.token_ids[at : at + 4], "little")
        for at in range(0, len(each.answer.token_ids), 4)
    ]


def test_groups_with_equal_rewards_are_published_too(bench: Callable[..., None]) -> None:
    class Generous(ToyEnvironment):
        def score(self, prompt: Any, completion: Any) -> Any:
            return msgspec.structs.replace(super().score(prompt, completion), reward=1.0)

    async def test(bench: Bench) -> None:
        await asyncio.sleep(1)
        assert [{each.reward for each in group.rollouts} for group in bench.published] == [{1.0}, {1.0}]

    bench(test, environment=Generous())


def test_generation_stops_at_the_staleness_bound_and_goes_on_with_the_trainer(
    bench: Callable[..., None],
) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(30)
        assert bench.out.qsize() == 4  # (0 + 1 + 1) * 2
        assert bench.gauge.status().waiting_for == "the trainer"
        bench.admission.used(2)
        await asyncio.sleep(30)
        assert bench.out.qsize() == 6
        bench.admission.used(1)
        await asyncio.sleep(30)
        assert bench.out.qsize() == 7

    bench(test, max_staleness=1)


def test_a_full_queue_and_an_empty_window_are_named_waits(bench: Callable[..., None]) -> None:
    async def full(bench: Bench) -> None:
        await asyncio.sleep(5)
        assert bench.out.qsize() == 1
        assert bench.gauge.status().waiting_for == "room in queue"

    bench(full, room=1)

    async def empty(bench: Bench) -> None:
        await asyncio.sleep(59)
        assert bench.out.qsize() == 2
        assert bench.gauge.status().waiting_for == "the next window"
        await asyncio.sleep(3)
        assert [bench.out.get_nowait().group.prompt.window for _ in range(4)] == [0, 0, 1, 1]

    bench(empty, max_staleness=9, slots_per_window=2, window_ms=60_000)


def test_a_group_that_cannot_be_scored_is_dropped_told_once_and_replaced(bench: Callable[..., None]) -> None:
    class Dangerous(ToyEnvironment):
        evaluates_answers = True

    async def test(bench: Bench) -> None:
        bench.tasks.failure = FailureReason.UNAVAILABLE
        await asyncio.sleep(1.5)  # two batches of two
        assert bench.out.empty()
        assert bench.published == []
        (notice,) = bench.of(Notice)
        assert notice.level == "warning"
        assert notice.text == "an own group on toy/odd was dropped: it could not be scored (unavailable)"
        bench.tasks.failure = None
        await asyncio.sleep(3)
        assert bench.out.qsize() == 2  # the dropped ones count no more
        assert bench.out.get_nowait().group.prompt.slot >= 2  # and their slots are not answered again

    bench(test, environment=Dangerous())


def test_a_prompt_that_does_not_fit_the_policy_is_skipped_and_told(
    bench: Callable[..., None], policy: Policy
) -> None:
    class Long(ToyEnvironment):
        def prompt(self, seed: int, index: int) -> Prompt:
            short = super().prompt(seed, index)
            return msgspec.structs.replace(short, text=short.text * 30) if seed % 2 else short

    async def test(bench: Bench) -> None:
        await asyncio.sleep(20)
        own = [bench.out.get_nowait() for _ in range(bench.out.qsize())]
        assert len(own) == 2
        assert all(len(each.group.question) == 6 for each in own)
        notices = bench.of(Notice)
        assert len(notices) <= 1
        assert all(f"of the engine's {policy.max_positions} tokens" in notice.text for notice in notices)

    bench(test, environment=Long())

    class Endless(ToyEnvironment):
        def prompt(self, seed: int, index: int) -> Prompt:
            return msgspec.structs.replace(super().prompt(seed, index), text=f"{seed} " * 99)

    async def nothing_fits(bench: Bench) -> None:
        await asyncio.sleep(20)
        assert bench.out.empty()
        assert len(bench.of(Notice)) <= 8
        assert bench.gauge.status().waiting_for == "the next window"

    bench(nothing_fits, environment=Endless(), window_ms=60_000)


def test_a_prompt_that_does_not_fit_the_engine_is_skipped_and_told(
    bench: Callable[..., None], engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may take less than the policy has."""
    monkeypatch.setattr(engine, "context", 8)

    async def test(bench: Bench) -> None:
        await asyncio.sleep(20)
        assert bench.out.empty()
        assert "of the engine's 8 tokens" in bench.of(Notice)[0].text

    bench(test)


def test_the_same_seed_makes_the_same_groups(bench: Callable[..., None]) -> None:
    runs: list[list[RolloutGroup]] = []

    async def test(bench: Bench) -> None:
        await asyncio.sleep(5)
        runs.append(bench.published)

    bench(test, max_staleness=1)
    bench(test, max_staleness=1)
    assert len(runs[0]) == 4
    assert runs[0] == runs[1]


def test_a_reward_that_is_no_number_is_a_zero_and_told_once(bench: Callable[..., None]) -> None:
    class Broken(ToyEnvironment):
        def score(self, prompt: Prompt, completion: Completion) -> Any:
            return msgspec.structs.replace(super().score(prompt, completion), reward=float("nan"))

    async def test(bench: Bench) -> None:
        await asyncio.sleep(3)
        assert {rollout.reward for group in bench.published for rollout in group.rollouts} == {0.0}
        (notice,) = bench.of(Notice)
        assert "cannot score an answer: it returned the reward nan; it counts as wrong" in notice.text

    bench(test, environment=Broken())


# --- partial rollouts --------------------------------------------------------------------------------------


def versions(group: RolloutGroup) -> set[int]:
    return {int(each) for r in group.rollouts for each in np.frombuffer(r.answer.versions, "<u4")}


LONG = {"max_new_tokens": 60, "slots_per_window": 64, "pool_size": 64}
"""The random policy ends a rollout anywhere up to there."""


@pytest.mark.slow
def test_partial_rollouts_are_the_same_groups_scored_queued_and_published(bench: Callable[..., None]) -> None:
    made: list[dict[PromptRef, RolloutGroup]] = []

    async def test(bench: Bench) -> None:
        await asyncio.sleep(60)
        own = [bench.out.get_nowait() for _ in range(8)]
        assert bench.out.empty()
        assert bench.published == [each.group for each in own]
        assert len(bench.of(GroupJudged)) == 8
        assert all(each.rewards == tuple(r.reward for r in each.group.rollouts) for each in own)
        assert (bench.stage.in_flight, bench.gauge.status().waiting_for) == (0, "the trainer")
        assert bench.stage.sampled == sum(
            len(r.answer.token_ids) // 4 for g in bench.published for r in g.rollouts
        )
        made.append({group.prompt: group for group in bench.published})

    options = {"groups": 4, "max_staleness": 1, "window_ms": 600_000, **LONG}
    bench(test, **options)
    bench(test, max_in_flight=8, **options)
    bench(test, max_in_flight=1000, **options)
    one, *others = made
    for other in others:
        assert set(other) == set(one)
        for prompt, group in one.items():
            assert [ids(r) for r in other[prompt].rollouts] == [ids(r) for r in group.rollouts]


@pytest.mark.slow
def test_the_room_is_kept_full_while_admission_allows(bench: Callable[..., None], policy: Policy) -> None:
    seen: list[tuple[int, int | None]] = []

    class Watched(TransformersEngine):
        def open(self, *, greedy: bool = False) -> Any:
            generation = super().open(greedy=greedy)
            wait = generation.wait

            def watched(*, tokens: int | None = None) -> Any:
                seen.append((generation.in_flight, tokens))
                return wait(tokens=tokens)

            generation.wait = watched  # type: ignore[method-assign]
            return generation

    async def test(bench: Bench) -> None:
        for _ in range(40):
            await asyncio.sleep(0.5)
            while not bench.out.empty():
                bench.out.get_nowait()
                bench.admission.used(1)
        assert len(bench.published) > 10
        # a group of four begins while fewer than twelve rollouts are under way
        assert {rollouts for rollouts, _ in seen} <= set(range(12, 16))
        assert {tokens for _, tokens in seen} == {None}

    # more slots than are used: the last groups of a window run alone
    slots = {"universe_size": 128, "pool_size": 128, "slots_per_window": 128, "window_ms": 600_000}
    bench(test, engine=Watched(policy), max_in_flight=12, groups=8, **LONG | slots)


@pytest.mark.slow
def test_long_rollouts_go_on_over_new_weights(bench: Callable[..., None], policy: Policy) -> None:
    fresh = TransformersEngine(policy)
    state = policy.load_model().state_dict()

    async def test(bench: Bench) -> None:
        for version in range(1, 30):
            await asyncio.sleep(0.5)
            fresh.update(state, version)
            while not bench.out.empty():
                bench.admission.used(1)
                bench.out.get_nowait()
        mixed = [group for group in bench.published if len(versions(group)) > 1]
        assert mixed
        assert all(group.policy_version == max(versions(group)) for group in bench.published)
        newest = [group.policy_version for group in bench.published]
        assert newest == sorted(newest)

    bench(test, engine=fresh, max_in_flight=16, groups=4, generate_s=1.0, window_ms=600_000, **LONG)


def test_a_full_queue_does_not_hold_up_generation(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(60)
        assert bench.out.qsize() == 1
        assert bench.stage.in_flight == 0  # all that admission allows is complete
        assert bench.admission.room() == 0

    bench(test, max_in_flight=8, groups=4, room=1, window_ms=600_000, **LONG)


def test_the_next_window_is_not_waited_for_while_rollouts_are_under_way(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(20)
        assert bench.out.qsize() == 3
        assert bench.gauge.status().waiting_for == "the next window"
        await asyncio.sleep(60)
        assert [bench.out.get_nowait().group.prompt.window for _ in range(6)] == [0] * 3 + [1] * 3

    options = LONG | {"slots_per_window": 3}
    bench(test, max_in_flight=100, groups=9, generate_s=0.1, window_ms=60_000, **options)


@pytest.mark.slow
def test_spent_tokens_stop_generation_until_the_next_step(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(60)
        for _ in range(3):
            before = bench.stage.sampled
            assert bench.gauge.status().waiting_for == "the next version"
            assert bench.admission.held.is_set()
            complete = bench.admission.complete
            assert 1 <= complete == bench.out.qsize()
            assert bench.stage.in_flight > 0
            for _ in range(complete):
                bench.out.get_nowait()
            bench.admission.used(complete)
            await asyncio.sleep(60)
            assert 1000 <= bench.stage.sampled - before < 1000 + 16 + 4  # whole steps of all rows

    bench(test, max_in_flight=16, groups=32, token_budget=1000, window_ms=600_000, **LONG)


def test_a_budget_too_small_for_one_group_goes_on_to_the_first(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(60)
        assert bench.out.qsize() == 1
        assert bench.admission.held.is_set()
        bench.out.get_nowait()
        bench.admission.used(1)
        await asyncio.sleep(60)
        assert bench.out.qsize() == 1

    bench(test, max_in_flight=4, groups=4, token_budget=1, window_ms=600_000, **LONG)


@pytest.mark.parametrize("max_in_flight", [0, 8])
def test_what_took_longer_than_peers_accept_is_trained_on_and_not_shared(
    bench: Callable[..., None], max_in_flight: int
) -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(30)
        assert bench.out.qsize() == 2
        assert bench.published == []
        assert bench.stage.unshared == 2
        (notice,) = bench.of(Notice)
        assert "was not shared: it took longer than peers accept" in notice.text

    bench(test, max_in_flight=max_in_flight, generate_s=7.0, rules={"max_age_windows": 1})


@pytest.mark.parametrize("max_in_flight", [0, 8])
def test_nothing_is_begun_while_the_engine_sleeps(bench: Callable[..., None], max_in_flight: int) -> None:
    async def test(bench: Bench) -> None:
        bench.awake.clear()
        await asyncio.sleep(9)
        assert bench.stage.sampled == 0
        bench.awake.set()
        await asyncio.sleep(9)
        assert bench.out.qsize() == 2

    bench(test, max_in_flight=max_in_flight)


@pytest.mark.parametrize("max_in_flight", [0, 8])
def test_earlier_rollouts_of_a_prompt_are_reused(bench: Callable[..., None], max_in_flight: int) -> None:
    """Same weights: with the exact rule every draft is kept whole, and costs no token."""

    async def test(bench: Bench) -> None:
        for _ in range(40):
            await asyncio.sleep(2)
            while not bench.out.empty():
                bench.out.get_nowait()
                bench.admission.used(1)
        await asyncio.sleep(5)
        groups, book = bench.published, bench.generator.reuse
        assert book is not None
        first: dict[int, RolloutGroup] = {}
        again = []
        for group in groups:
            known = first.setdefault(group.prompt.index, group)
            if known is not group:
                again.append(group)
                assert [ids(r) for r in group.rollouts] == [ids(r) for r in known.rollouts]
        assert len(again) >= 3
        total = sum(len(r.answer.token_ids) // 4 for group in groups for r in group.rollouts)
        assert bench.stage.sampled == total - book.accepted
        assert book.accepted == book.drafted > 0

    bench(
        test,
        max_in_flight=max_in_flight,
        reuse_lenience=1.0,
        universe_size=6,
        pool_size=4,
        slots_per_window=4,
        window_ms=10_000,
    )


@pytest.mark.parametrize("max_in_flight", [0, 8])
def test_an_error_of_the_engine_ends_the_stage(policy: Policy, max_in_flight: int) -> None:
    class Broken(TransformersEngine):
        def open(self, *, greedy: bool = False) -> Any:
            generation = super().open(greedy=greedy)
            generation.wait = self.fail  # type: ignore[method-assign]
            return generation

        def fail(self, *, tokens: int | None = None) -> Any:
            raise RuntimeError("out of memory")

    async def main() -> None:
        made = Bench(policy, Broken(policy), max_in_flight=max_in_flight)
        with pytest.raises(ExceptionGroup) as raised:
            await made.stage.run(made.generator)
        assert str(sole_cause(raised.value)) == "out of memory"
        assert made.admission.room() == 2  # nothing is running any more

    run_virtual(main())


def test_a_stage_goes_on_with_another_generator(policy: Policy, engine: TransformersEngine) -> None:
    """A follower's, when it has found another owner: what was under way is dropped, no slot comes twice."""

    async def main() -> None:
        made = Bench(policy, engine)
        for seconds in (0.3, 2.0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await made.stage.run(made.generator)
            assert made.stage.in_flight == 0
        assert [own.prompt.slot for own in made.published] == [2, 3]

    run_virtual(main())
