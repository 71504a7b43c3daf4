"""The train stage: what it waits for, what it takes, what it leaves out, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from node.clock import SystemClock, VirtualClock, run_virtual
from node.compute import Compute, InlineCompute, ThreadCompute
from node.events import Event, EventBus, Notice, SourceShare, StepDone, decode_event, encode_event
from node.peers.trust import Hardness
from node.rollout.engine.base import TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.share.accepted import Accepted
from node.share.pool import PooledGroup, ReplayPool
from node.supervise import StageGauge
from node.train import prepare
from node.train.batch import TrainingBatch
from node.train.groups import OWN_SOURCE, TrainingDataError
from node.train.settings import TrainSettings, Treatment, TreatmentSettings
from node.train.stability import RollBack
from node.train.stage import StagePlan, TrainStage
from node.train.step import StepReport, Trainer
from node.weight.answered import AnsweredPrompts
from protocol.messages import (
    Announcement,
    BlobRef,
    FinishReason,
    Lineage,
    PromptRef,
    Rollout,
    RolloutGroup,
    Sampling,
    VerificationRules,
)
from tests.node.runtimes import ManualClock, make_peers, make_runtime
from tests.node.verify.world import World, identity, rollout
from tests.rollouts import changed

ME, ALICE, BOB = (identity(name).peer_id for name in ("me", "alice", "bob"))
TOKENS = [5, 6, 7, 1]
RULES = VerificationRules(max_policy_lag=5, max_age_windows=3)
NOW = 10.5
"""Windows."""


class ToyTrainer:
    """Remembers batches; its next report is `report` with the given changes."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.batches: list[TrainingBatch] = []
        self.changes: dict[str, Any] = {}

    def step(self, batch: TrainingBatch) -> StepReport:
        self.batches.append(batch)
        made = self.policy_version
        if not self.changes.get("skipped"):
            made += 1
            self.policy_version = made + (self.changes.get("rolled_back") is not None)
        values: dict[str, Any] = {
            "policy_version": made,
            "skipped": False,
            "loss": 0.5,
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "entropy": 2.0,
            "kl_start": 0.1,
            "tokens": 4,
            "sources": (),
            "logprobs_BT": torch.full(batch.mask_BT.shape, -1.0),
            "train_s": 0.25,
        }
        return StepReport(**(values | self.changes))


def rollouts_of(rewards: Sequence[float], **changes: Any) -> tuple[Rollout, ...]:
    return tuple(
        rollout(TOKENS, [-1.0] * 4, reward=reward, text="abc", finish=FinishReason.STOP, **changes)
        for reward in rewards
    )


class Bench:
    """A train stage on toys."""

    def __init__(
        self,
        policy: Policy,
        *,
        trainer: Any = None,
        settings: TrainSettings | None = None,
        compute: Compute | None = None,
        merge: Callable[[], Awaitable[bool]] | None = None,
        probe: Callable[[], Awaitable[RollBack | None]] | None = None,
        **plan: Any,
    ) -> None:
        self.policy = policy
        self.clock = VirtualClock()
        self.trainer = trainer or ToyTrainer()
        self.own: asyncio.Queue[Accepted] = asyncio.Queue()
        self.pool = ReplayPool(64, 2, random.Random(0))
        self.pooled = asyncio.Event()
        charter = World().charter
        at_ms = charter.created_at + round(NOW * charter.window_ms)
        _, self.peers = make_peers(make_runtime(ManualClock(at_ms)), identity("me"), charter)
        self.answered = AnsweredPrompts()
        self.active = False
        self.drawn = 0
        self.alone = 0
        self.used: list[int] = []
        self.held = asyncio.Event()
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.finished = asyncio.Event()
        self.gauge = StageGauge("train", self.clock, "own groups")
        self.weight = StageGauge("weight", self.clock, "a step")
        self.number = 0
        self.lineage = Lineage(ME, "a" * 64, policy.tokenizer_digest)
        bus = EventBus()
        bus.subscribe(self.events.append)
        values: dict[str, Any] = {
            "steps": 1,
            "local_groups": 1,
            "external_groups": 2,
            "external_wait_s": 2.0,
            "evaluate_every": 100,
            "checkpoint_every": 100,
        }
        self.plan = StagePlan(**(values | plan))
        self.stage = TrainStage(
            cast("Trainer", self.trainer),
            policy,
            settings or TrainSettings(),
            self.plan,
            own=self.own,
            pool=self.pool,
            pooled=self.pooled,
            peers=self.peers,
            answered=self.answered,
            rules=RULES,
            lineage=self.lineage,
            window=lambda: NOW,
            peers_active=lambda: self.active,
            drawn=self._drawn,
            used=self.used.append,
            held=self.held,
            alone=self._alone,
            broadcast=lambda version: self._call(f"broadcast {version}"),
            evaluate=lambda moment: self._call(f"evaluate {moment}"),
            save=lambda: self._call("save"),
            compute=compute or InlineCompute({}),
            clock=self.clock,
            bus=bus,
            gauge=self.gauge,
            weight_gauge=self.weight,
            finished=self.finished,
            merge=merge,
            probe=probe,
        )

    def _drawn(self) -> None:
        self.drawn += 1

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self.alone += 1
        batches = len(self.trainer.batches) if isinstance(self.trainer, ToyTrainer) else 0
        yield
        if isinstance(self.trainer, ToyTrainer):
            assert len(self.trainer.batches) == batches + 1

    async def _call(self, what: str) -> None:
        self.calls.append(what)

    def group(self, author: str, rewards: Sequence[float], **changes: Any) -> RolloutGroup:
        self.number += 1
        fields: dict[str, Any] = {
            "author": author,
            "lineage": Lineage(author, "a" * 64, self.policy.tokenizer_digest),
            "policy_version": 0,
            "mean_version": 0.0,
            "oldest_version": 0,
            "environment": "toy",
            "prompt": PromptRef(10, 0, 1000 + self.number),
            "question": "12+3",
            "sampling": Sampling(5),
            "engine": "toy",
            "dtype": "float32",
            "rollouts": rollouts_of(rewards),
        }
        return RolloutGroup(**(fields | changes))

    def make_own(self, *rewards: float, index: int | None = None, **changes: Any) -> None:
        """An own group is ready."""
        if index is not None:
            changes["prompt"] = PromptRef(10, 0, index)
        group = self.group(ME, rewards, **changes)
        self.own.put_nowait(
            Accepted(f"own{index}", group, (), rewards, self.clock.now_ms(), generate_s=0.5, own=True)
        )

    def pool_in(self, author: str, *rewards: float, index: int | None = None, **changes: Any) -> str:
        """A peer's group is accepted; returns its digest."""
        if index is not None:
            changes["prompt"] = PromptRef(10, 0, index)
        group = self.group(author, rewards, **changes)
        digest = f"{self.number:064x}"[::-1]
        self.pool.add(PooledGroup(digest, group, rewards, arrived_at=self.number))
        self.pooled.set()
        return digest

    def heard_version(self, author: str, version: int) -> None:
        lineage = Lineage(author, "a" * 64, self.policy.tokenizer_digest)
        said = Announcement(
            lineage,
            version,
            mean_version=version,
            oldest_version=version,
            prompt=PromptRef(10, 0, 0),
            completions="d" * 64,
            rewards=(1.0,),
            body=BlobRef("e" * 64, 1),
        )
        self.peers.announced(author, said)

    def rejected(self, author: str) -> dict[str, int]:
        rows = self.peers.table(frozenset({author}), {}, "")
        return next(row.rejected for row in rows if row.peer_id == author)

    @property
    def step(self) -> StepDone:
        """The only step so far."""
        (event,) = [event for event in self.events if isinstance(event, StepDone)]
        assert decode_event(encode_event(event)) == event  # finite: JSON has no NaN
        return event

    def sources(self) -> list[str]:
        """Source of each group of the last batch."""
        return [group.source for group in self.trainer.batches[-1].groups]


@pytest.fixture
def bench(policy: Policy) -> Callable[..., None]:
    """Runs a test with a bench whose stage it starts itself."""

    def run(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            await test(Bench(policy, **options))

        run_virtual(main())

    return run


# --- waiting -----------------------------------------------------------------------------------------------


def test_without_peers_nobody_is_waited_for(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        await bench.stage.run()
        assert (bench.step.wait_s, bench.step.groups_external) == (0.0, 0)
        assert bench.clock.monotonic_s() == 0.0
        assert bench.drawn == 1  # what is discarded or drawn may make room

    bench(test)


def test_active_peers_are_waited_for_so_long_and_no_longer(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.active = True
        bench.make_own(0.0, 1.0)
        running = asyncio.create_task(bench.stage.run())
        await asyncio.sleep(1)
        assert bench.weight.status().waiting_for == "peers' groups"
        assert bench.gauge.status().waiting_for == "peers' groups"
        bench.pool_in(ALICE, 0.0, 1.0)  # one of two
        await running
        assert bench.step.wait_s == pytest.approx(2.0)
        assert bench.step.groups_external == 1

    bench(test)


def test_a_step_goes_on_as_soon_as_there_are_enough(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.active = True
        bench.make_own(0.0, 1.0)
        loop = asyncio.get_running_loop()
        loop.call_later(0.4, bench.pool_in, ALICE, 0.0, 1.0)
        loop.call_later(0.7, bench.pool_in, BOB, 0.0, 1.0)
        await bench.stage.run()
        assert bench.step.wait_s == pytest.approx(0.7)
        assert sorted(bench.sources()) == sorted([OWN_SOURCE, ALICE, BOB])

    bench(test)


def test_peers_that_leave_meanwhile_end_the_wait_at_the_next_group(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.active = True
        bench.make_own(0.0, 1.0)

        def last() -> None:
            bench.active = False
            bench.pool_in(ALICE, 0.0, 1.0)

        asyncio.get_running_loop().call_later(0.5, last)
        await bench.stage.run()
        assert bench.step.wait_s == pytest.approx(0.5)

    bench(test)


def test_a_node_that_wants_no_external_groups_never_waits(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.active = True
        bench.pool_in(ALICE, 0.0, 1.0)
        bench.make_own(0.0, 1.0)
        await bench.stage.run()
        assert (bench.step.wait_s, bench.sources()) == (0.0, [OWN_SOURCE])

    bench(test, external_groups=0)


def test_own_groups_are_waited_for_by_name(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        running = asyncio.create_task(bench.stage.run())
        await asyncio.sleep(5)
        assert (bench.gauge.status().waiting_for, bench.gauge.status().waiting_s) == ("own groups", 5.0)
        bench.make_own(0.0, 1.0)
        await asyncio.sleep(5)
        assert not running.done()
        bench.make_own(1.0, 0.0)
        await running
        assert bench.step.wait_s == pytest.approx(10)
        assert bench.step.groups_local == 2

    bench(test, local_groups=2)


def test_a_step_takes_what_there_is_once_generation_holds(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1, bench.make_own, 0.0, 1.0)
        loop.call_later(2, bench.make_own, 1.0, 0.0)
        loop.call_later(3, bench.held.set)
        loop.call_later(9, bench.make_own, 1.0, 0.0)
        await bench.stage.run()
        assert bench.step.wait_s == pytest.approx(3)
        assert bench.step.groups_local == 2
        assert bench.used == [2]

    bench(test, local_groups=4)


def test_a_step_without_any_group_waits_for_one_also_when_generation_holds(
    bench: Callable[..., None],
) -> None:
    async def test(bench: Bench) -> None:
        bench.held.set()
        asyncio.get_running_loop().call_later(5, bench.make_own, 0.0, 1.0)
        await bench.stage.run()
        assert (bench.step.wait_s, bench.step.groups_local) == (5, 1)

    bench(test, local_groups=2)


def test_groups_that_are_there_are_taken_before_a_hold_is_looked_at(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.held.set()
        for _ in range(3):
            bench.make_own(0.0, 1.0)
        await bench.stage.run()
        assert (bench.used, bench.own.qsize()) == ([2], 1)

    bench(test, local_groups=2)


def test_each_step_has_the_device_to_itself(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            bench.make_own(0.0, 1.0)
        await bench.stage.run()
        assert bench.alone == 3

    bench(test, steps=3)


def test_tokens_of_older_versions_are_counted(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.trainer.policy_version = 3
        mixed = changed(rollouts_of([1.0])[0], versions=np.array([1, 2, 3, 3], "<u4").tobytes())
        bench.make_own(0.0, 1.0, rollouts=(*rollouts_of([0.0], version=3), mixed), policy_version=3)
        bench.make_own(0.0, 1.0, rollouts=rollouts_of([0.0, 1.0], version=2), policy_version=2)
        await bench.stage.run()
        assert bench.step.off_policy_share == pytest.approx((2 + 8) / 16)
        assert bench.step.partial_groups == 1

    bench(test, local_groups=2)


def test_followers_groups_are_trained_on_like_own_ones_at_their_true_lag(bench: Callable[..., None]) -> None:
    """Version 9 is trained. ALICE generated with version 6 of ours, 3 behind, whatever she announced; BOB's
    group is foreign, and 1 behind his own newest. An own group is 1 behind. Mean: (3 + 1 + 1) / 3."""

    async def test(bench: Bench) -> None:
        bench.trainer.policy_version = 9
        bench.heard_version(BOB, 4)
        bench.make_own(0.0, 1.0, policy_version=8)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=bench.lineage, policy_version=6)
        bench.pool_in(BOB, 0.0, 1.0, policy_version=3)
        await bench.stage.run()
        batch = bench.trainer.batches[-1]
        by_source = {group.source: group for group in batch.groups}
        assert by_source[ALICE].treatment is Treatment.OWN
        assert by_source[BOB].treatment is Treatment.COMPAT
        assert {source: group.lag for source, group in by_source.items()} == {"own": 1, ALICE: 3, BOB: 1}
        # (r - mean) / std of its own two rewards, as for the own group; anchored at what was sampled.
        assert by_source[ALICE].advantages == by_source["own"].advantages
        row = batch.sources.index(ALICE)
        assert batch.behaviour_BT[batch.source_B == row].tolist() == [[-1.0] * 4] * 2
        step = bench.step
        assert (step.groups_external, step.groups_followers, step.staleness_followers) == (2, 1, 3.0)
        assert step.staleness == pytest.approx(5 / 3)

    bench(test)


@pytest.mark.parametrize(("version", "used"), [(4, 1), (3, 0)])
def test_a_followers_group_is_gated_by_its_lag_behind_the_trainer(
    bench: Callable[..., None], version: int, used: int
) -> None:
    """5 versions are allowed; ALICE never announced anything newer."""

    async def test(bench: Bench) -> None:
        bench.trainer.policy_version = 9
        bench.make_own(0.0, 1.0, policy_version=9)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=bench.lineage, policy_version=version)
        await bench.stage.run()
        assert bench.step.groups_followers == used

    bench(test)


def test_groups_from_before_an_adopted_merge_are_counted(policy: Policy) -> None:
    """The step to version 4 is followed by a merge as 5. The next step trains on groups of versions 4 (own,
    ALICE's as a follower), 5 (own), and BOB's 1, which is of his own policy; the one after it on a newer
    one."""
    adopted = [True, False, False]

    async def merge() -> bool:
        made.calls.append("merge")
        if adopted[0]:
            made.trainer.policy_version += 1
        return adopted.pop(0)

    async def main() -> None:
        nonlocal made
        made = Bench(policy, steps=3, local_groups=2, merge=merge)
        made.trainer.policy_version = 3
        for version in (2, 3, 4, 5, 5, 6):
            made.make_own(0.0, 1.0, policy_version=version)
        running = asyncio.create_task(made.stage.run())
        made.stage._broadcast = arrive
        await running

    async def arrive(version: int) -> None:
        if version == 4:
            made.pool_in(ALICE, 0.0, 1.0, lineage=made.lineage, policy_version=4)
            made.pool_in(BOB, 0.0, 1.0, policy_version=1)

    made = cast("Bench", None)
    run_virtual(main())
    steps = [event for event in made.events if isinstance(event, StepDone)]
    assert [step.policy_version for step in steps] == [4, 6, 7]
    assert [step.groups_followers for step in steps] == [0, 1, 1]  # a group is drawn twice
    assert [step.groups_across_merge for step in steps] == [0, 2, 1]
    assert made.calls == ["evaluate before", "merge", "save", "merge", "merge", "save", "evaluate after"]


def test_a_merge_that_is_not_adopted_saves_nothing_and_counts_nothing(policy: Policy) -> None:
    async def merge() -> bool:
        made.trainer.policy_version += 2
        return False

    async def main() -> None:
        nonlocal made
        made = Bench(policy, steps=2, evaluate_every=1, merge=merge)
        for _ in range(2):
            made.make_own(0.0, 1.0)
        await made.stage.run()

    made = cast("Bench", None)
    run_virtual(main())
    steps = [event for event in made.events if isinstance(event, StepDone)]
    assert [(step.policy_version, step.groups_across_merge) for step in steps] == [(1, 0), (4, 0)]
    assert made.calls == [
        "evaluate before",
        "broadcast 1",
        "evaluate during",
        "broadcast 4",
        "save",
        "evaluate after",
    ]


def test_each_stage_works_while_its_work_is_done_and_waits_by_name_else(policy: Policy) -> None:
    """As (train, weight), while the train lane, the weight lane, and the two calls out of the stage run."""
    seen: dict[str, tuple[str, str]] = {}

    class Watched(InlineCompute):
        async def run(self, lane: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            look(lane)
            return await super().run(lane, function, *args, **kwargs)

    def look(what: str) -> None:
        seen[what] = (made.gauge.status().waiting_for, made.weight.status().waiting_for)

    async def call(what: str) -> None:
        look(what)

    async def main() -> None:
        nonlocal made
        made = Bench(policy, compute=Watched({}))
        made.stage._broadcast = lambda version: call("broadcast")
        made.stage._evaluate = call
        made.stage._save = lambda: call("save")
        look("first")
        made.make_own(0.0, 1.0)
        await made.stage.run()

    made = cast("Bench", None)
    run_virtual(main())
    assert seen == {
        "first": ("own groups", "a step"),
        "before": ("", "a step"),
        "weight": ("weights", ""),
        "train": ("", "a step"),
        "broadcast": ("broadcast", "a step"),
        "save": ("", "a step"),
        "after": ("", "a step"),
    }


# --- what is taken and what is not -------------------------------------------------------------------------


def test_stale_lagging_and_quarantined_groups_are_discarded(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, prompt=PromptRef(6, 0, 1))  # four windows old, three allowed
        kept = bench.pool_in(ALICE, 0.0, 1.0, prompt=PromptRef(7, 0, 2), policy_version=4)
        bench.pool_in(ALICE, 0.0, 1.0, policy_version=3)  # six versions behind, five allowed
        bench.heard_version(ALICE, 9)
        bench.pool_in(BOB, 0.0, 1.0)
        bench.peers.judged(BOB, Hardness.HARD)
        assert bench.peers.quarantined(BOB)
        await bench.stage.run()
        assert bench.sources() == [OWN_SOURCE, ALICE]
        (_, group) = bench.trainer.batches[-1].groups
        assert (group.group, group.lag, group.age_windows) == (kept[:12], 5, 3)
        assert (bench.step.pool, len(bench.pool)) == (1, 1)  # the kept one may be used once more
        assert (bench.step.staleness, bench.step.age_windows) == (2.5, 3.0)

    bench(test, external_groups=4)


def test_a_group_that_teaches_nothing_is_left_out(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 1.0, 1.0)
        bench.pool_in(BOB, 0.0, 1.0)
        await bench.stage.run()
        assert bench.sources() == [OWN_SOURCE, BOB]
        assert bench.rejected(ALICE) == {}
        assert bench.step.groups_external == 1

    bench(test)


@pytest.mark.parametrize(
    "rollouts",
    [
        (changed(rollouts_of([0.0])[0], token_ids=b"\xff" * 16), *rollouts_of([1.0])),
        (changed(rollouts_of([0.0])[0], token_ids=b"", logprobs=b""), *rollouts_of([1.0])),
        (changed(rollouts_of([0.0])[0], logprobs=b"\0" * 8), *rollouts_of([1.0])),
        (
            changed(rollouts_of([0.0])[0], logprobs=b"\x00\x00\xc0\x7f" * 4),
            *rollouts_of([1.0]),
        ),
    ],
    ids=["token_range", "empty", "lengths", "nan"],
)
def test_a_group_that_must_not_reach_the_optimiser_is_dropped_counted_and_the_step_goes_on(
    bench: Callable[..., None], rollouts: tuple[Rollout, ...]
) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, rollouts=rollouts)
        bench.pool_in(BOB, 0.0, 1.0)
        await bench.stage.run()
        assert bench.sources() == [OWN_SOURCE, BOB]
        assert bench.rejected(ALICE) == {"training_data": 1}
        assert bench.step.groups_external == 1

    bench(test)


def test_even_a_step_of_bad_externals_only_trains_on_the_own_groups(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        for author in (ALICE, BOB):
            bench.pool_in(author, 0.0, 1.0, sampling=Sampling(5, temperature=1e-9))
        await bench.stage.run()
        assert bench.sources() == [OWN_SOURCE]
        assert bench.rejected(ALICE) == bench.rejected(BOB) == {"training_data": 1}

    bench(test)


def test_a_bad_own_group_is_our_bug_and_ends_the_stage(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 5000.0)
        with pytest.raises(TrainingDataError, match="reward 5000"):
            await bench.stage.run()

    bench(test)


def test_another_tokenizers_group_is_tokenized_again(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=Lineage(ALICE, "a" * 64, "c" * 64))
        await bench.stage.run()
        group = bench.trainer.batches[-1].groups[1]
        wanted = bench.policy.encode_completion("abc", True)
        assert [rollout.tokens_T.tolist() for rollout in group.rollouts] == [wanted, wanted]
        assert group.rollouts[0].behaviour_T is None
        assert group.rollouts[0].behaviour_sum == pytest.approx(-4.0)

    bench(test)


# --- treatment ---------------------------------------------------------------------------------------------


def test_each_external_group_gets_its_treatment_and_is_counted(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 0.0, index=1)  # failed
        bench.make_own(0.0, 1.0, index=2)  # mixed
        bench.pool_in(ALICE, 0.0, 1.0, index=1)
        bench.pool_in(ALICE, 1.0, 1.0, index=2)  # alike, but not in view of both
        bench.pool_in(BOB, 0.0, 1.0, index=3)
        await bench.stage.run()
        treatments = {group.group: group.treatment for group in bench.trainer.batches[-1].groups[2:]}
        assert sorted(treatments.values()) == [Treatment.COMPAT, Treatment.GRAFT, Treatment.HACPO]
        step = bench.step
        assert (step.groups_external, step.graft_groups, step.hacpo_groups) == (3, 1, 1)
        assert step.prompts_shared == 2
        assert bench.answered.of(1)[OWN_SOURCE] == (0.0, 0.0)

    bench(test, local_groups=2, external_groups=3)


def test_capabilities_are_measured_on_mixed_groups_over_five_steps_worth(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 0.0)
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.5, 1.0)
        bench.pool_in(ALICE, 1.0, 1.0)  # with verification off such a thing may come in
        await bench.stage.run()
        capability = bench.stage._capability
        assert (capability.value(OWN_SOURCE), capability.value(ALICE)) == (0.5, 0.75)
        for _ in range(10):
            capability.observe(OWN_SOURCE, (0.8, 1.0))
        assert capability.value(OWN_SOURCE) == pytest.approx(0.9)  # five steps of two groups

    bench(test, local_groups=2)


def test_a_peer_of_another_tokenizer_is_not_blamed_for_a_forced_token_level_objective(
    bench: Callable[..., None],
) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=Lineage(ALICE, "a" * 64, "c" * 64))
        bench.pool_in(BOB, 0.0, 1.0)
        await bench.stage.run()
        treatments = {group.source: group.treatment for group in bench.trainer.batches[-1].groups}
        assert treatments == {OWN_SOURCE: Treatment.OWN, ALICE: Treatment.COMPAT, BOB: Treatment.OWN}
        assert bench.rejected(ALICE) == {}

    bench(test, settings=TrainSettings(treatment=TreatmentSettings(force=Treatment.OWN)))


def test_what_takes_long_runs_beside_the_loop(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {}

    def watch(name: str, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **kwargs)

        return watched

    for name in ("training_rollouts", "collate"):
        monkeypatch.setattr(prepare, name, watch(name, getattr(prepare, name)))

    async def main() -> None:
        compute = ThreadCompute()
        try:
            made = Bench(policy, compute=compute)
            made.clock = cast("VirtualClock", SystemClock())
            made.stage._clock = made.clock
            made.make_own(0.0, 1.0)
            made.pool_in(ALICE, 0.0, 1.0, lineage=Lineage(ALICE, "a" * 64, "c" * 64))
            await made.stage.run()
        finally:
            compute.close()

    asyncio.run(main())
    assert set(threads) == {"training_rollouts", "collate"}
    assert all(name.startswith("swarm-weight") for names in threads.values() for name in names)


def test_a_second_use_is_clipped_against_the_first(policy: Policy) -> None:
    """With a step of 0.05 the policy moves far; from then on the ratio to the log-probabilities of the first
    use leaves [0.8, 1.2] for most tokens. Against itself it would be 1, and nothing would be clipped."""

    async def main() -> None:
        settings = TrainSettings(measure_start_kl=False, learning_rate=0.05, warmup_steps=0)
        trainer = Trainer(policy, settings)
        made = Bench(policy, trainer=trainer, settings=settings, steps=2, external_groups=1)
        for _ in range(2):
            made.make_own(0.0, 1.0)
        digest = made.pool_in(ALICE, 0.0, 1.0)
        first_logprobs = TransformersEngine(policy).logprobs(
            [TokenSequence(tuple(policy.encode_prompt("12+3")), tuple(TOKENS))]
        )[0]
        kept: list[float] = []
        made.stage._broadcast = lambda version: look()

        async def look() -> None:
            rows = made.stage._ingestion.get(digest)
            if rows is not None:
                assert len(rows) == 2
                np.testing.assert_allclose(rows[0], first_logprobs, atol=1e-4)

        await made.stage.run()
        for event in made.events:
            if isinstance(event, StepDone):
                kept += [source.kept for source in event.sources if source.source == ALICE]
        assert kept[0] == 1.0
        assert kept[1] < 0.7
        assert made.stage._ingestion == {}  # twice used: the pool has dropped it

    run_virtual(main())


def test_a_second_use_of_a_group_without_its_median_is_clipped_against_the_first(policy: Policy) -> None:
    """MC-GRPO leaves the second of three rollouts out: what is remembered of it is nothing."""

    async def main() -> None:
        settings = TrainSettings(treatment=TreatmentSettings(advantage="mc_grpo"))
        made = Bench(policy, settings=settings, steps=2, external_groups=1)
        for _ in range(2):
            made.make_own(0.0, 1.0)
        digest = made.pool_in(ALICE, 0.0, 0.5, 1.0)
        remembered: list[Any] = []

        async def look(version: int) -> None:
            remembered.append(made.stage._ingestion.get(digest))

        made.stage._broadcast = look
        await made.stage.run()
        first, second = (batch.groups[1] for batch in made.trainer.batches)
        assert [rollout.ingestion_T for rollout in first.rollouts] == [None, None]
        assert [rollout.ingestion_T.tolist() for rollout in second.rollouts] == [[-1.0] * 4] * 2
        assert [None if row is None else row.tolist() for row in remembered[0]] == [
            [-1.0] * 4,
            None,
            [-1.0] * 4,
        ]

    run_virtual(main())


def test_after_a_skipped_step_a_group_starts_at_ratio_one_again(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.trainer.changes = {"skipped": True}
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0)
        await bench.stage.run()
        assert bench.stage._ingestion == {}

    bench(test)


def test_trust_of_the_author_and_uses_reach_the_batch(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            bench.peers.judged(ALICE, Hardness.ACCEPTED)
        trust = bench.peers.trust(ALICE)
        bench.make_own(0.0, 1.0)
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0)
        await bench.stage.run()
        uses = [batch.groups[1].uses for batch in bench.trainer.batches]
        assert uses == [0, 1]
        assert all(batch.groups[1].trust == trust for batch in bench.trainer.batches)

    bench(test, steps=2)


# --- the course of a run -----------------------------------------------------------------------------------


def test_evaluations_checkpoints_and_the_end(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(5):
            bench.make_own(0.0, 1.0)
        await bench.stage.run()
        assert bench.calls == [
            "evaluate before",
            "broadcast 1",
            "broadcast 2",
            "evaluate during",
            "save",
            "broadcast 3",
            "broadcast 4",
            "evaluate during",
            "save",
            "broadcast 5",
            "save",
            "evaluate after",
        ]
        assert bench.finished.is_set()

    bench(test, steps=5, evaluate_every=2, checkpoint_every=2)


def test_the_event_tells_the_step_in_numbers(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.trainer.policy_version = 3
        whole = rollouts_of([1.0])[0]
        cut = changed(
            whole,
            token_ids=b"\5\0\0\0" * 2,
            logprobs=whole.answer.logprobs[:8],
            versions=whole.answer.versions[:8],
            finish=FinishReason.LENGTH,
        )
        bench.make_own(0.0, 1.0, rollouts=(*rollouts_of([0.0]), cut), policy_version=2)
        bench.make_own(1.0, 1.0, policy_version=3)
        bench.pool_in(ALICE, 0.0, 0.5)
        await bench.stage.run()
        step = bench.step
        assert (step.policy_version, step.loss, step.skipped) == (4, 0.5, False)
        assert (step.reward, step.reward_external) == (0.75, 0.25)
        assert step.length_mean == pytest.approx((4 + 2 + 4 + 4) / 4)
        assert (step.finished_share, step.zero_variance_share) == (0.75, 0.5)
        assert (step.groups_local, step.groups_external) == (2, 1)
        assert step.staleness == pytest.approx((1 + 0 + 0) / 3)
        assert (step.generate_s, step.train_s, step.wait_s) == (1.0, 0.25, 0.0)
        assert step.pool == 1

    bench(test, local_groups=2)


def test_a_step_that_is_not_finite_is_told_and_gives_its_room_back(bench: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        share = SourceShare(
            source=OWN_SOURCE,
            groups=1,
            tokens=4,
            weight=1.0,
            loss=math.nan,
            kept=1.0,
            ess=math.inf,
            advantage_abs=1.0,
            gap=-math.inf,
        )
        bench.trainer.changes = {
            "skipped": True,
            "loss": math.nan,
            "grad_norm": math.inf,
            "kl_start": -math.inf,
            "sources": (share,),
        }
        bench.make_own(0.0, 1.0)
        await bench.stage.run()
        step = bench.step
        assert step.skipped
        assert (step.policy_version, step.loss, step.grad_norm, step.kl_start) == (0, 0.0, 0.0, 0.0)
        assert (step.sources[0].loss, step.sources[0].ess, step.sources[0].gap) == (0.0, 0.0, 0.0)
        assert (step.entropy, step.sources[0].kept) == (2.0, 1.0)
        (notice,) = [event for event in bench.events if isinstance(event, Notice)]
        assert notice.level == "warning"
        assert "left the weights untouched" in notice.text
        assert not any(call.startswith("broadcast") for call in bench.calls)
        assert bench.used == [1]

    bench(test)


def test_a_real_trainer_learns_from_own_and_external_groups(policy: Policy) -> None:
    async def main() -> None:
        settings = TrainSettings(measure_start_kl=False)
        made = Bench(policy, trainer=Trainer(policy, settings))
        before = {name: tensor.numpy().tobytes() for name, tensor in made.trainer.state_dict().items()}
        made.make_own(0.0, 1.0)
        made.pool_in(ALICE, 0.0, 1.0)
        await made.stage.run()
        step = made.step
        assert (step.policy_version, step.skipped) == (1, False)
        assert [source.source for source in step.sources] == [OWN_SOURCE, ALICE]
        assert step.grad_norm > 0
        after = {name: tensor.numpy().tobytes() for name, tensor in made.trainer.state_dict().items()}
        assert after != before

    run_virtual(main())
