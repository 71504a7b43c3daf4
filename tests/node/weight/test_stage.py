"""The weight stage: what it waits for, what it takes, what it leaves out, what it remembers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from node.clock import SystemClock, VirtualClock, run_virtual
from node.compute import ThreadCompute
from node.events import EventBus
from node.membership import Membership
from node.peers.book import PeerBook
from node.peers.trust import Hardness, TrustSettings
from node.rollout.admission import Admission
from node.rollout.policy import Policy
from node.runtime import Runtime
from node.share.pool import ReplayPool
from node.weight.batch import TrainingBatch
from node.weight.groups import OWN_SOURCE, Kind, TrainingDataError
from node.weight.own import OwnGroups
from node.weight.settings import Treatment, WeightSettings
from node.weight.stage import WeightStage
from protocol.messages import Announcement, BlobRef, Lineage, PromptRef, Rollout, Sampling
from tests.node.runtimes import ManualClock, make_links, make_runtime
from tests.node.toy import make_charter
from tests.node.verify.world import identity, rollout
from tests.node.weight.conftest import ALICE, BOB, ME, TOKENS, accepted, lineage_of

PLAIN = {"force": Treatment.OWN, "local_groups": 1, "external_groups": 2}


class Bench:
    """A weight stage; its swarm is in window 10, where groups may be three windows and five versions old."""

    def __init__(self, policy: Policy, runtime: Runtime, **settings: Any) -> None:
        self.policy = policy
        self.runtime = runtime
        rules = {"max_policy_lag": 5, "max_age_windows": 3}
        charter = make_charter([policy], runtime.now_ms() - 21_000, rules=rules)
        membership = Membership(identity("me"), charter, runtime.clock)
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.admission = Admission(1, 4)
        self.pool = ReplayPool(64, 2, random.Random(0))
        self.peers = PeerBook(runtime, membership, TrustSettings())
        self.stage = WeightStage(
            runtime,
            membership,
            WeightSettings(**(PLAIN | settings)),
            policy,
            OwnGroups(self.queue, self.admission),
            self.pool,
            self.peers,
        )
        self.prompts = iter(range(1000, 2000))

    def make_own(self, *rewards: float, **fields: Any) -> None:
        """An own group is ready."""
        fields.setdefault("prompt", (10, next(self.prompts)))
        self.queue.put_nowait(accepted(self.policy, ME, rewards, **fields))
        self.admission.started(1)
        self.admission.finished(accepted=1)

    def pool_in(self, author: str, *rewards: float, **fields: Any) -> str:
        """A peer's group is accepted; returns its digest."""
        fields.setdefault("prompt", (10, next(self.prompts)))
        group = accepted(self.policy, author, rewards, **fields)
        self.pool.add(group)
        return group.digest

    def trust(self, author: str) -> None:
        """It has sent good groups for long."""
        for _ in range(9):
            self.peers.judged(author, Hardness.ACCEPTED)

    def announce(self, author: str, version: int = 0) -> None:
        """The peer is active, with this version of its own policy."""
        lineage = lineage_of(self.policy, author)
        prompt, body = PromptRef(10, 0, 0), BlobRef("e" * 64, 1)
        said = Announcement(lineage, version, float(version), version, prompt, "d" * 64, (0.0, 1.0), body)
        self.peers.announced(author, said)

    async def draw(self, version: int = 0, **options: Any) -> TrainingBatch:
        return await self.stage.draw(version, **options)

    def rejected(self, author: str) -> dict[str, int]:
        rows = self.peers.table(make_links(ManualClock(), author), {}, self.policy.tokenizer_digest)
        return next(row.rejected for row in rows if row.peer_id == author)


Test = Callable[[Bench], Coroutine[Any, Any, None]]
Run = Callable[..., None]


@pytest.fixture
def run(policy: Policy) -> Run:
    """Runs a test on a bench in virtual time."""

    def on_bench(test: Test, **settings: Any) -> None:
        async def main() -> None:
            await test(Bench(policy, make_runtime(VirtualClock()), **settings))

        run_virtual(main())

    return on_bench


def sources(batch: TrainingBatch) -> list[str]:
    return sorted(group.source for group in batch.groups)


# --- waiting -----------------------------------------------------------------------------------------------


def test_without_peers_nobody_is_waited_for(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        assert sources(await bench.draw()) == [OWN_SOURCE]
        assert bench.runtime.monotonic_s() == 0.0

    run(test)


@pytest.mark.parametrize(("options", "external", "waited_s"), [({}, 2, 2.0), ({"wait": False}, 2, 0.0)])
def test_active_peers_are_waited_for_so_long_and_no_longer(
    run: Run, options: dict[str, bool], external: int, waited_s: float
) -> None:
    async def test(bench: Bench) -> None:
        bench.announce(ALICE)
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0)  # one of two
        drawing = asyncio.create_task(bench.draw(**options))
        await asyncio.sleep(0)
        if waited_s:
            assert bench.stage.gauge.status().waiting_for == "peers' groups"
        assert sources(await drawing) == sorted([OWN_SOURCE, ALICE])
        assert bench.runtime.monotonic_s() == pytest.approx(waited_s)

    run(test, external_groups=external)


def test_a_step_goes_on_as_soon_as_there_are_enough(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.announce(ALICE)
        bench.make_own(0.0, 1.0)
        loop = asyncio.get_running_loop()
        loop.call_later(0.4, bench.pool_in, ALICE, 0.0, 1.0)
        loop.call_later(0.7, bench.pool_in, BOB, 0.0, 1.0)
        assert sources(await bench.draw()) == sorted([OWN_SOURCE, ALICE, BOB])
        assert bench.runtime.monotonic_s() == pytest.approx(0.7)

    run(test)


def test_peers_that_are_gone_end_the_wait_at_the_next_group(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.announce(BOB)
        bench.make_own(0.0, 1.0)

        def last() -> None:
            bench.peers.judged(BOB, Hardness.HARD)
            bench.pool_in(ALICE, 0.0, 1.0)

        asyncio.get_running_loop().call_later(0.5, last)
        await bench.draw()
        assert bench.runtime.monotonic_s() == pytest.approx(0.5)

    run(test)


def test_a_node_that_wants_no_external_groups_never_waits(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.announce(ALICE)
        bench.pool_in(ALICE, 0.0, 1.0)
        bench.make_own(0.0, 1.0)
        assert sources(await bench.draw()) == [OWN_SOURCE]
        assert bench.runtime.monotonic_s() == 0.0

    run(test, external_groups=0)


def test_own_groups_are_waited_for_by_name(run: Run) -> None:
    async def test(bench: Bench) -> None:
        drawing = asyncio.create_task(bench.draw())
        await asyncio.sleep(5)
        status = bench.stage.gauge.status()
        assert (status.waiting_for, status.waiting_s) == ("own groups", 5.0)
        bench.make_own(0.0, 1.0)
        await asyncio.sleep(5)
        assert not drawing.done()
        bench.make_own(1.0, 0.0)
        assert sources(await drawing) == [OWN_SOURCE] * 2

    run(test, local_groups=2)


def test_a_step_takes_what_there_is_once_generation_holds(run: Run) -> None:
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1, bench.make_own, 0.0, 1.0)
        loop.call_later(2, bench.make_own, 1.0, 0.0)
        loop.call_later(3, bench.admission.held.set)
        loop.call_later(9, bench.make_own, 1.0, 0.0)
        assert sources(await bench.draw()) == [OWN_SOURCE] * 2
        assert bench.runtime.monotonic_s() == pytest.approx(3)

    run(test, local_groups=4)


def test_a_step_without_any_group_waits_for_one_also_when_generation_holds(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.admission.held.set()
        asyncio.get_running_loop().call_later(5, bench.make_own, 0.0, 1.0)
        assert sources(await bench.draw()) == [OWN_SOURCE]
        assert bench.runtime.monotonic_s() == 5

    run(test, local_groups=2)


def test_groups_that_are_there_are_taken_before_a_hold_is_looked_at(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.admission.held.set()
        for _ in range(3):
            bench.make_own(0.0, 1.0)
        batch = await bench.draw()
        assert (sources(batch), bench.queue.qsize()) == ([OWN_SOURCE] * 2, 1)
        bench.stage.stepped(batch, None)
        assert bench.admission.complete == 1  # a step that has ended gives the room of its groups back

    run(test, local_groups=2)


# --- the gate ----------------------------------------------------------------------------------------------


def test_stale_lagging_and_quarantined_groups_are_discarded(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, prompt=(6, 1))  # four windows old, three allowed
        kept = bench.pool_in(ALICE, 0.0, 1.0, prompt=(7, 2), policy_version=4)
        bench.pool_in(ALICE, 0.0, 1.0, policy_version=3)  # six versions behind, five allowed
        bench.announce(ALICE, 9)
        bench.pool_in(BOB, 0.0, 1.0)
        bench.peers.judged(BOB, Hardness.HARD)
        batch = await bench.draw(wait=False)  # another window would begin meanwhile
        assert sources(batch) == sorted([OWN_SOURCE, ALICE])
        (_, group) = batch.groups
        assert (group.group, group.lag, group.age_windows) == (kept, 5, 3)
        assert len(bench.pool) == 1  # the kept one may be used once more

    run(test, external_groups=4)


@pytest.mark.parametrize(("version", "used"), [(4, 1), (3, 0)])
def test_a_followers_group_is_gated_by_its_lag_behind_the_trainer(run: Run, version: int, used: int) -> None:
    """Version 9 is trained, and 5 behind it are allowed; ALICE never announced anything newer."""

    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0, policy_version=9)
        ours = lineage_of(bench.policy, ME)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=ours, policy_version=version)
        assert len((await bench.draw(9)).groups) == 1 + used

    run(test)


def test_followers_groups_are_trained_on_like_own_ones_at_their_true_lag(run: Run) -> None:
    """ALICE generated with version 6 of ours, 3 behind, whatever she announced; BOB's group is foreign, and 1
    behind his own newest. An own group is 1 behind."""

    async def test(bench: Bench) -> None:
        bench.announce(BOB, 4)
        bench.trust(ALICE)
        bench.make_own(0.0, 1.0, policy_version=8)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=lineage_of(bench.policy, ME), policy_version=6)
        bench.pool_in(BOB, 0.0, 1.0, policy_version=3)
        batch = await bench.draw(9)
        by_source = {group.source: group for group in batch.groups}
        assert by_source[ALICE].treatment is Treatment.OWN
        assert by_source[BOB].treatment is Treatment.COMPAT
        assert {source: group.lag for source, group in by_source.items()} == {OWN_SOURCE: 1, ALICE: 3, BOB: 1}
        row = batch.sources.index(ALICE)
        assert batch.behaviour_BT[batch.source_B == row].tolist() == [[-1.0] * 4] * 2

    run(test, force=Treatment.COMPAT)


def test_a_stranger_that_claims_this_lineage_is_trained_on_as_a_foreign_policy(run: Run) -> None:
    """Anybody can write the owner's name; one group that passed every check has not earned it yet."""

    async def test(bench: Bench) -> None:
        bench.peers.judged(ALICE, Hardness.ACCEPTED)
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=lineage_of(bench.policy, ME))
        batch = await bench.draw()
        (group,) = (each for each in batch.groups if each.source == ALICE)
        assert (group.kind, group.treatment) == (Kind.FOREIGN, Treatment.COMPAT)
        assert not bool(batch.own_lineage_B[batch.source_B == batch.sources.index(ALICE)].any())

    run(test, force=Treatment.COMPAT)


# --- what reaches the batch --------------------------------------------------------------------------------


def nan_logprobs() -> Rollout:
    return rollout(TOKENS, [float("nan")] * 4, reward=0.0, text="abc")


def unknown_tokens() -> Rollout:
    return rollout([2**32 - 1] * 4, [-1.0] * 4, reward=0.0, text="abc")


@pytest.mark.parametrize("bad", [nan_logprobs(), unknown_tokens()], ids=["nan", "token_range"])
def test_a_bad_group_of_a_peer_is_dropped_counted_and_the_step_goes_on(run: Run, bad: Rollout) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        good = rollout(TOKENS, [-1.0] * 4, reward=1.0, text="abc")
        bench.pool_in(ALICE, 0.0, 1.0, rollouts=(bad, good))
        bench.pool_in(BOB, 0.0, 1.0)
        assert sources(await bench.draw()) == sorted([OWN_SOURCE, BOB])
        assert bench.rejected(ALICE) == {"training_data": 1}

    run(test)


def test_even_a_step_of_bad_externals_only_trains_on_the_own_groups(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        for author in (ALICE, BOB):
            bench.pool_in(author, 0.0, 1.0, sampling=Sampling(5, temperature=1e-9))
        assert sources(await bench.draw()) == [OWN_SOURCE]
        assert bench.rejected(ALICE) == bench.rejected(BOB) == {"training_data": 1}

    run(test)


def test_a_bad_own_group_is_our_bug(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 5000.0)
        with pytest.raises(TrainingDataError, match="reward 5000"):
            await bench.draw()

    run(test)


def test_a_peer_of_another_tokenizer_is_not_blamed_for_a_token_level_objective(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 1.0)
        bench.pool_in(ALICE, 0.0, 1.0, lineage=lineage_of(bench.policy, ALICE, "c" * 64))
        bench.pool_in(BOB, 0.0, 1.0)
        treatments = {group.source: group.treatment for group in (await bench.draw()).groups}
        assert treatments == {OWN_SOURCE: Treatment.OWN, ALICE: Treatment.COMPAT, BOB: Treatment.OWN}

    run(test)


def test_each_external_group_gets_its_treatment(run: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.make_own(0.0, 0.0, prompt=(10, 1))  # failed
        bench.make_own(0.0, 1.0, prompt=(10, 2))  # mixed
        bench.pool_in(ALICE, 0.0, 1.0, prompt=(10, 1))
        bench.pool_in(ALICE, 1.0, 1.0, prompt=(10, 2))  # alike, but not in view of both
        bench.pool_in(BOB, 0.0, 1.0, prompt=(10, 3))
        external = (await bench.draw()).groups[2:]
        assert sorted(group.treatment for group in external) == ["compat", "graft", "hacpo"]
        assert sorted(group.prompt for group in external if group.prompt_shared) == [1, 2]

    run(test, force=None, local_groups=2, external_groups=3)


def test_trust_of_the_author_and_uses_reach_the_batch(run: Run) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            bench.peers.judged(ALICE, Hardness.ACCEPTED)
        bench.pool_in(ALICE, 0.0, 1.0)
        for uses in (0, 1):
            bench.make_own(0.0, 1.0)
            group = (await bench.draw()).groups[1]
            assert (group.uses, group.trust) == (uses, bench.peers.trust(ALICE))

    run(test)


def test_what_takes_long_runs_beside_the_loop(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of another tokenizer are tokenised again on the stage's own thread."""
    threads: set[str] = set()
    encode = Policy.encode_completion

    def watched(policy: Policy, text: str, finished: bool) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(policy, text, finished)

    monkeypatch.setattr(Policy, "encode_completion", watched)

    async def main() -> None:
        compute = ThreadCompute()
        try:
            bench = Bench(policy, Runtime(SystemClock(), compute, EventBus(), random.Random(0)))
            bench.make_own(0.0, 1.0)
            bench.pool_in(ALICE, 0.0, 1.0, lineage=Lineage(ALICE, "a" * 64, "c" * 64))
            await bench.draw()
        finally:
            compute.close()

    asyncio.run(main())
    assert len(threads) == 1
    assert threads.pop().startswith("swarm-weight")


# --- what later uses are measured from ---------------------------------------------------------------------


async def used_twice(bench: Bench, rewards: Sequence[float], *, came_to_nothing: bool) -> TrainingBatch:
    """The second batch with ALICE's group, after a first step that met -2 everywhere."""
    bench.pool_in(ALICE, *rewards)
    for _ in range(2):
        bench.make_own(0.0, 1.0)
    first = await bench.draw()
    assert first.ingestion_BT.isnan().all()
    bench.stage.stepped(first, None if came_to_nothing else torch.full(first.mask_BT.shape, -2.0))
    return await bench.draw()


def test_a_second_use_is_clipped_against_the_first(run: Run) -> None:
    async def test(bench: Bench) -> None:
        batch = await used_twice(bench, [0.0, 1.0], came_to_nothing=False)
        assert batch.ingestion_BT[batch.own_B].isnan().all()
        assert batch.ingestion_BT[~batch.own_B].tolist() == [[-2.0] * 4] * 2

    run(test)


def test_a_second_use_without_its_median_rollout_is_clipped_against_the_first(run: Run) -> None:
    """MC-GRPO leaves the second of three rollouts out."""

    async def test(bench: Bench) -> None:
        batch = await used_twice(bench, [0.0, 0.5, 1.0], came_to_nothing=False)
        assert batch.ingestion_BT[~batch.own_B].tolist() == [[-2.0] * 4] * 2

    run(test, advantage="mc_grpo")


def test_after_a_step_that_came_to_nothing_a_group_starts_at_ratio_one_again(run: Run) -> None:
    async def test(bench: Bench) -> None:
        batch = await used_twice(bench, [0.0, 1.0], came_to_nothing=True)
        assert batch.ingestion_BT.isnan().all()

    run(test)


def test_versions_of_tokens_reach_the_batch(run: Run) -> None:
    async def test(bench: Bench) -> None:
        versions = np.array([1, 2, 3, 3], "<u4").tobytes()
        mixed = rollout(TOKENS, [-1.0] * 4, reward=1.0, text="abc", versions=versions)
        bench.make_own(1.0, 0.0, rollouts=(mixed, mixed), policy_version=3)
        assert (await bench.draw(3)).versions_BT.tolist() == [[1, 2, 3, 3]] * 2

    run(test)
