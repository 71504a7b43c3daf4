"""Whole nodes in one process: they share, lose the network, stop, break, and repeat exactly."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from node.clock import run_virtual
from node.compute import ThreadCompute
from node.environment.records import Prompt
from node.events import (
    Evaluated,
    GroupJudged,
    Health,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    StagesSeen,
    StepDone,
    encode_event,
)
from node.open.parts import Parts
from node.open.stores import Stores
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.state.paths import Home
from node.train.checkpoint import resume
from node.weight.groups import OWN_SOURCE
from protocol.errors import ModelError, OurFault
from protocol.replay import ReplayCache
from tests.node.toy import COSTS_S, TASK, Toy, ToyEnvironment, ToyHost, ToySwarm, ToyTrouble

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_delta")]
SLOW_TRAINING = COSTS_S | {"train": 0.8}
"""Fewer steps in the same virtual time, where a test needs the time."""


def sources(toy: Toy) -> Counter[str]:
    """Groups trained on, by source."""
    found = Counter[str]()
    for step in toy.of(StepDone):
        found.update({share.source: share.groups for share in step.sources})
    return found


# --- sharing -----------------------------------------------------------------------------------------------


def test_groups_flow_between_nodes_and_are_trained_on(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            settings = {"train__steps": 14, "weight__external": "auto"}
            alice = await swarm.add("alice", 0, **settings)
            bob = await swarm.add("bob", 1, bootstraps=[alice], **settings)
            await swarm.run()
            for toy, other in ((alice, bob), (bob, alice)):
                await toy.task
                steps = toy.of(StepDone)
                assert [step.policy_version for step in steps] == list(range(1, 15))
                assert set(sources(toy)) == {OWN_SOURCE, other.peer_id}
                assert sum(step.groups_external for step in steps) >= 8
                assert sum(step.prompts_shared for step in steps) >= 3
                assert sum(step.hacpo_groups + step.graft_groups for step in steps) >= 3
                judged = [event for event in toy.of(GroupJudged) if not event.own]
                assert len(judged) >= 8
                assert {(event.author, event.accepted, event.reason) for event in judged} == {
                    (other.peer_id, True, "")
                }
                (row,) = toy.of(PeersSeen)[-1].peers
                assert (row.peer_id, row.name) == (other.peer_id, other.node.config.name)
                assert row.accepted == len(judged)
                assert row.trust > 0.8
                assert row.policy_version >= 12
                assert 0 <= row.lag <= 2
                assert 0 <= row.age_windows < 2
                counts = {count.check: count for count in toy.of(Health)[-1].checks}
                assert list(counts) == [outcome.check for outcome in judged[0].checks]  # as they ran
                assert counts["reward"].accepted == len(judged)
                assert all(count.cost_s > 0 for count in counts.values())
                health = toy.of(Health)[-1]
                assert (health.refused, health.bodies_fetched) == ({}, len(judged))
                assert toy.of(Notice) == []
                # every slot was announced, mixed or not
                assert health.announced == len([event for event in toy.of(GroupJudged) if event.own])

    run_virtual(main())


def test_the_course_of_a_run_as_events(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alone = await swarm.add("alone", 0, connected=False, train__steps=4, evaluate__every=2)
            await swarm.run()
            await alone.task
            first, last = alone.events[0], alone.events[-1]
            assert isinstance(first, NodeStarted)
            assert (first.name, first.peer_id, first.swarm) == ("alone", alone.peer_id, "toys")
            assert isinstance(last, NodeStopped)
            assert (last.reason, last.steps) == ("steps done", 4)
            assert [event.moment for event in alone.of(Evaluated)] == ["before", "during", "after"]
            assert [event.policy_version for event in alone.of(Evaluated)] == [0, 2, 4]
            assert all(step.wait_s < 0.5 and step.groups_external == 0 for step in alone.of(StepDone))
            assert alone.of(PeersSeen) == []
            times = [event.at for event in alone.events]
            assert times == sorted(times)
            stages = alone.of(StagesSeen)
            assert [status.stage for status in stages[0].stages] == [
                "rollout",
                "weight",
                "train",
                "broadcast",
            ]
            assert all(later.at - earlier.at == 500 for earlier, later in itertools.pairwise(stages))
            checkpoint = tmp_path / "alone" / "runs" / "latest" / "checkpoints" / "v4"
            assert (checkpoint / "model.safetensors").is_file()
            assert Policy.open(checkpoint).tokenizer_digest == policies[0].tokenizer_digest
            for event in alone.events:
                json.loads(encode_event(event), parse_constant=pytest.fail)  # NaN, Infinity

    run_virtual(main())


def test_rollouts_never_run_further_ahead_than_allowed(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toys = [
                await swarm.add(
                    f"node{bound}", 0, connected=False, rollout__max_staleness=bound, train__steps=8
                )
                for bound in (0, 1, 3)
            ]
            await swarm.run()
            for bound, toy in zip((0, 1, 3), toys, strict=True):
                made = trained = 0
                for event in toy.events:
                    if isinstance(event, GroupJudged):
                        made += 1
                        assert made <= (trained + bound + 1) * 2
                    elif isinstance(event, StepDone):
                        trained += 1
                        assert event.staleness <= bound
                assert trained == 8

    run_virtual(main())


def test_refusals_of_invented_peers_are_bounded_and_their_sum_is_right(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", train__steps=1)
            for number in range(5000):
                alice.node.peers.refused(f"invented {number}", "decode")
            await swarm.run()
            await alice.task
            assert alice.of(Health)[-1].refused == {"decode": 5000}
            assert len(alice.of(PeersSeen)[-1].peers) <= 1024

    run_virtual(main())


@pytest.mark.parametrize("max_in_flight", [0, 16])
async def test_on_a_real_loop_with_real_threads(
    tmp_path: Path, policies: Sequence[Policy], max_in_flight: int
) -> None:
    compute = ThreadCompute()
    async with ToySwarm(tmp_path, policies) as swarm:
        toy = await swarm.add(
            "alice",
            train__steps=5,
            train__external_wait_s=0.0,
            rollout__max_in_flight=max_in_flight,
            compute=compute,
        )
        async with asyncio.timeout(60):
            await swarm.run()
            await toy.task
        assert [step.policy_version for step in toy.of(StepDone)] == [1, 2, 3, 4, 5]
        assert all(step.staleness <= 1 for step in toy.of(StepDone))
    compute.close()


# --- partial rollouts, one device, a wrong engine -----------------------------------------------------------

PARTIAL = {"rollout__max_in_flight": 32, "train__external_wait_s": 0.5}
LONG = {"max_new_tokens": 40, "group_size": 2, "slots_per_window": 32}


def test_partial_rollouts_are_shared_and_trained_on_over_versions(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        slow = COSTS_S | {"generate": 0.5}
        settings = PARTIAL | {"train__steps": 12, "rollout__max_staleness": 3}
        async with ToySwarm(tmp_path, policies, costs_s=slow, **LONG) as swarm:
            alice = await swarm.add("alice", 0, **settings)
            bob = await swarm.add("bob", 1, bootstraps=[alice], **settings)
            await swarm.run()
            for toy, other in ((alice, bob), (bob, alice)):
                await toy.task
                steps = toy.of(StepDone)
                assert [step.policy_version for step in steps] == list(range(1, 13))
                assert max(step.staleness for step in steps) <= 3
                assert sources(toy)[other.peer_id] >= 6
                assert sum(step.partial_groups for step in steps) > 0
                assert 0 < max(step.off_policy_share for step in steps) <= 1
                judged = [event for event in toy.of(GroupJudged) if not event.own]
                assert {event.reason for event in judged} == {""}
                stages = toy.of(StagesSeen)
                assert max(event.rollouts_in_flight for event in stages) >= 8
                assert stages[-1].tokens_sampled > 100
                assert toy.of(Notice) == []

    run_virtual(main())


@pytest.mark.parametrize("settings", [{}, {"rollout__token_budget": 150, "rollout__in_flight": "recompute"}])
def test_partial_rollouts_repeat_exactly(
    tmp_path: Path, policies: Sequence[Policy], settings: dict[str, Any]
) -> None:
    async def main(home: Path) -> list[list[bytes]]:
        async with ToySwarm(home, policies, **LONG) as swarm:
            alice = await swarm.add("alice", 0, train__steps=4, **PARTIAL, **settings)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=4, **PARTIAL, **settings)
            await swarm.run()
            for toy in (alice, bob):
                await toy.task
            return [reproducible(toy) for toy in (alice, bob)]

    assert run_virtual(main(tmp_path / "one")) == run_virtual(main(tmp_path / "other"))


def reproducible(toy: Toy) -> list[bytes]:
    """Steps and own groups; measured times left out."""
    return [
        encode_event(msgspec.structs.replace(event, train_s=0.0) if isinstance(event, StepDone) else event)
        for event in toy.events
        if isinstance(event, GroupJudged | StepDone)
        and not (isinstance(event, GroupJudged) and not event.own)
    ]


def test_a_token_budget_makes_short_steps(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, **LONG) as swarm:
            settings = {"rollout__max_in_flight": 32, "rollout__token_budget": 200, "train__local_groups": 8}
            toy = await swarm.add("alice", 0, connected=False, train__steps=8, **settings)
            await swarm.run()
            await toy.task
            groups = [step.groups_local for step in toy.of(StepDone)]
            assert len(groups) == 8
            assert 1 <= min(groups) < 8
            assert max(step.staleness for step in toy.of(StepDone)) <= 1

    run_virtual(main())


@pytest.mark.parametrize("max_in_flight", [0, 32])
def test_engine_and_trainer_take_turns_on_one_device(
    tmp_path: Path, policies: Sequence[Policy], max_in_flight: int
) -> None:
    asleep: list[bool] = []

    class Watched(TransformersEngine):
        def _next_logits(self, *args: Any, **kwargs: Any) -> Any:
            asleep.append(self._paused)
            return super()._next_logits(*args, **kwargs)

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toy = await swarm.add(
                "alice",
                connected=False,
                train__steps=4,
                policy__sharing="sequential",
                rollout__max_in_flight=max_in_flight,
                change=lambda parts: dataclasses.replace(parts, engine=Watched(parts.policy)),
            )
            await swarm.run()
            await toy.task
            assert len(toy.of(StepDone)) == 4
            assert asleep
            assert not any(asleep)

    run_virtual(main())


def test_a_node_whose_engine_stays_wrong_shares_nothing_more_and_trains_on(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    class Wrong(TransformersEngine):
        probe_each = True

        def logprobs(self, sequences: Any) -> Any:
            return [scored - 0.1 * (self.policy_version >= 4) for scored in super().logprobs(sequences)]

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add(
                "alice",
                0,
                train__steps=12,
                change=lambda parts: dataclasses.replace(parts, engine=Wrong(parts.policy)),
            )
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=12)
            await swarm.run()
            await alice.task
            (notice,) = alice.of(Notice)
            assert (notice.level, "trains on alone" in notice.text) == ("error", True)
            at = next(event for event in alice.of(StepDone) if event.policy_version == 5).at
            published = {event.announced for event in alice.of(Health) if event.at > at}
            assert len(published) == 1
            assert alice.of(Health)[-1].not_sharing in notice.text
            assert alice.of(Health)[-1].not_sharing != ""
            assert len(alice.of(StepDone)) == 12
            await swarm.finished(bob)

    run_virtual(main())


# --- the network goes ---------------------------------------------------------------------------------------


def test_without_a_network_a_node_trains_alone_and_says_so(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, costs_s=SLOW_TRAINING) as swarm:
            gone = await swarm.add("gone", 1)
            await gone.transport.close()
            swarm.toys.remove(gone)
            alone = await swarm.add("alone", 0, bootstraps=[gone], train__steps=20)
            await swarm.run()
            await alone.task
            assert alone.of(NodeStopped)[0].steps == 20
            assert max(step.wait_s for step in alone.of(StepDone)) < 0.5
            (notice,) = alone.of(Notice)
            assert "training alone, still trying" in notice.text

    run_virtual(main())


def test_a_partition_is_survived_and_sharing_resumes(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, costs_s=SLOW_TRAINING) as swarm:
            alice = await swarm.add("alice", 0, train__steps=60)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=60)
            swarm.start()
            await asyncio.sleep(12)
            split_at = swarm.clock.now_ms()
            swarm.network.partition([[alice.peer_id]])
            await asyncio.sleep(24)
            healed_at = swarm.clock.now_ms()
            swarm.network.heal()
            await asyncio.sleep(16)
            for toy in (alice, bob):
                assert not toy.task.done()
                steps = toy.of(StepDone)
                before = [step for step in steps if step.at < split_at]
                # what was pooled before is used up; then the node goes on alone and waits for nobody
                alone = [step for step in steps if split_at + 14_000 < step.at < healed_at]
                after = [step for step in steps if step.at > healed_at + 5_000]
                assert sum(step.groups_external for step in before) > 0
                assert len(alone) >= 4
                assert {step.groups_external for step in alone} == {0}
                assert max(step.wait_s for step in alone) < 0.5
                assert sum(step.groups_external for step in after) >= len(after)
                rejected = toy.of(PeersSeen)[-1].peers[0].rejected
                assert set(rejected) <= {"stale"}
                assert toy.of(Health)[-1].refused == {}
            assert alice.of(Notice) == []
            (notice,) = bob.of(Notice)  # it has a bootstrap to miss
            assert "training alone, still trying" in notice.text

    run_virtual(main())


def test_a_node_whose_network_stack_dies_trains_on(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, costs_s=SLOW_TRAINING) as swarm:
            alice = await swarm.add("alice", 0, train__steps=60)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=60)
            swarm.start()
            await asyncio.sleep(8)
            swarm.network.kill(alice.peer_id)
            await asyncio.sleep(10)
            at_restart = len(alice.of(StepDone))
            assert at_restart >= 8
            swarm.network.restart(alice.peer_id)
            await asyncio.sleep(12)
            later = alice.of(StepDone)[at_restart + 4 :]
            assert sum(step.groups_external for step in later) > 0
            assert alice.of(Health)[-1].transport_restarts == 1
            assert not alice.task.done()
            assert not bob.task.done()

    run_virtual(main())


def test_lossy_links_between_three_nodes(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, link="lossy") as swarm:
            alice = await swarm.add("alice", 0, train__steps=16)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=16)
            carol = await swarm.add("carol", 0, bootstraps=[alice, bob], train__steps=16)
            await swarm.run()
            for toy in (alice, bob, carol):
                others = {other.peer_id for other in (alice, bob, carol)} - {toy.peer_id}
                assert set(sources(toy)) - {OWN_SOURCE} == others
                rejected = Counter[str]()
                for row in toy.of(PeersSeen)[-1].peers:
                    rejected.update(row.rejected)
                    assert row.trust > 0.5
                assert not set(rejected) - {"stale", "duplicate"}

    run_virtual(main())


# --- the end ------------------------------------------------------------------------------------------------


def test_stop_ends_a_node_within_seconds_also_with_a_stalling_peer(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, train__steps=1000)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=1000)
            swarm.start()
            await asyncio.sleep(6)
            for protocol in ("/murmuration/hello", "/murmuration/2/blob", "/murmuration/2/reconcile"):
                channel = (await bob.transport.open_stream(alice.peer_id, protocol)).channel
                await channel.write(b"\0")  # and then nothing
            before_s = swarm.clock.monotonic_s()
            alice.node.stop("enough")
            await alice.task
            assert swarm.clock.monotonic_s() - before_s <= 5
            last = alice.events[-1]
            assert isinstance(last, NodeStopped)
            assert last.reason == "enough"
            await asyncio.sleep(5)
            assert not bob.task.done()  # one that leaves ends nobody else

    run_virtual(main())


def test_a_node_lingers_until_it_is_stopped(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, train__steps=3, linger=True)
            await swarm.run()
            await asyncio.sleep(30)
            assert not alice.task.done()
            groups = len(alice.of(GroupJudged))
            await asyncio.sleep(30)
            assert len(alice.of(GroupJudged)) == groups == (3 + 2) * 2  # it serves, it generates no more
            alice.node.stop("done here")
            await alice.task
            assert alice.of(NodeStopped)[0].steps == 3

    run_virtual(main())


def test_a_stage_that_raises_ends_its_node_with_that_error_and_no_other(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    class Breaking(TransformersEngine):
        def open(self, *, greedy: bool = False) -> Any:
            generation = super().open(greedy=greedy)
            wait, turns = generation.wait, itertools.count(1)

            def breaking(*, tokens: int | None = None) -> Any:
                if next(turns) > 8:
                    raise ToyTrouble("out of memory")
                return wait(tokens=tokens)

            generation.wait = breaking  # type: ignore[method-assign]
            return generation

    def breaking(parts: Parts) -> Parts:
        return dataclasses.replace(parts, engine=Breaking(parts.policy))

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, train__steps=100, change=breaking)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=10)
            swarm.start()
            with pytest.raises(ToyTrouble, match="out of memory"):
                await alice.task
            assert alice.of(NodeStopped)[0].reason == "ToyTrouble: out of memory"
            assert not alice.transport.up
            await swarm.finished(bob)
            assert len(bob.of(StepDone)) == 10

    run_virtual(main())


def test_steps_that_are_never_finite_end_too(tmp_path: Path, policies: Sequence[Policy]) -> None:
    """Each skipped step gives its groups' room back, else generation waits for a version for ever."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toy = await swarm.add("alice", 0, connected=False, train__steps=6)
            with torch.no_grad():
                next(toy.trainer.model.parameters()).fill_(torch.nan)
            async with asyncio.timeout(120):
                await swarm.run()
            steps = toy.of(StepDone)
            assert [step.skipped for step in steps] == [True] * 6
            assert [step.policy_version for step in steps] == [0] * 6
            assert len(toy.of(Notice)) == 6

    run_virtual(main())


def test_a_policy_that_no_prompt_fits_is_refused_at_the_first_evaluation(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    class Long(ToyEnvironment):
        derived = 0

        def prompt(self, seed: int, index: int) -> Prompt:
            Long.derived += 1
            return Prompt(TASK, f"{seed} " * 50, seed, index, {})

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toy = await swarm.add(
                "alice", change=lambda parts: dataclasses.replace(parts, host=ToyHost(Long()))
            )
            assert Long.derived == 0  # seconds of work, and the network is up when a node is made
            with pytest.raises(ModelError, match="within the 128 that the engine takes"):
                await swarm.run()
            assert toy.of(StepDone) == []

    run_virtual(main())


# --- a restart ----------------------------------------------------------------------------------------------


def resumed(parts: Parts) -> Parts:
    """The parts of a node that starts again in the same home."""
    assert parts.learner is not None
    resume(parts.learner.trainer, parts.engine, Home(parts.config.home).run("latest").checkpoints)
    return parts


def stores_after(toy: Toy) -> Stores:
    """What outlived the process of `toy`."""
    return dataclasses.replace(toy.stores, replay=ReplayCache(), standings=toy.node.peers.standings())


def test_a_restarted_node_goes_on_and_its_peers_take_it_back(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """With a lag of 2 versions allowed, a node that began at version 0 again would be refused as stale."""

    async def main() -> None:
        rules = {"max_logprob_gap": 50.0, "max_age_windows": 5, "max_policy_lag": 2}
        async with ToySwarm(tmp_path, policies, costs_s=SLOW_TRAINING, rules=rules) as swarm:
            bob = await swarm.add("bob", 1, train__steps=100)
            alice = await swarm.add("alice", 0, bootstraps=[bob], train__steps=8, train__checkpoint_every=3)
            swarm.start(bob)
            await swarm.run(alice)
            await alice.task
            folder = tmp_path / "alice" / "runs" / "latest" / "checkpoints"
            assert sorted(path.name for path in folder.iterdir()) == ["v6", "v8"]

            again = await swarm.add(
                "alice",
                0,
                bootstraps=[bob],
                train__steps=6,
                train__checkpoint_every=3,
                change=resumed,
                stores=stores_after(alice),
            )
            assert again.parts.engine.policy_version == 8
            restarted_at = swarm.clock.now_ms()
            await swarm.run(again)
            await again.task
            steps = again.of(StepDone)
            assert [step.policy_version for step in steps] == list(range(9, 15))
            assert max(step.staleness for step in steps) <= 1
            assert again.of(NodeStopped)[0].steps == 6
            assert again.of(Evaluated)[0].policy_version == 8
            (notice,) = again.of(Notice)
            assert notice.text == "goes on from the checkpoint of version 8"
            assert sorted(path.name for path in folder.iterdir()) == ["v11", "v14"]
            # what was known of others is known again, and others take what comes
            known = alice.node.peers.trust(bob.peer_id)
            assert again.stores.standings[0].peer == bob.peer_id
            assert again.stores.standings[0].accepted > 3
            assert known > 0.7
            judged = [
                e for e in bob.of(GroupJudged) if e.author == alice.peer_id and e.at > restarted_at + 1000
            ]
            assert len(judged) >= 2
            assert {event.reason for event in judged} == {""}
            assert set(bob.of(PeersSeen)[-1].peers[0].rejected) <= {"stale"}

    run_virtual(main())


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = save_file, itertools.count()

    def full(*args: Any, **kwargs: Any) -> None:
        if next(calls) in (1, 2):
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(*args, **kwargs)

    monkeypatch.setattr("node.train.checkpoint.save_file", full)

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toy = await swarm.add("alice", connected=False, train__steps=6, train__checkpoint_every=2)
            await swarm.run()
            await toy.task
            assert [step.policy_version for step in toy.of(StepDone)] == [1, 2, 3, 4, 5, 6]
            notices = toy.of(Notice)
            assert [notice.level for notice in notices] == ["warning", "info"]  # once, and when it is over
            assert notices[0].text.startswith("version 2 was not saved: cannot write")
            assert "No space left on device" in notices[0].text
            assert notices[1].text == "checkpoints: written again"
            folder = tmp_path / "alice" / "runs" / "latest" / "checkpoints"
            assert [path.name for path in folder.iterdir()] == ["v6"]

    run_virtual(main())


def test_a_last_version_that_is_not_saved_ends_the_run_with_that_fault(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.train.checkpoint.save_file", full)

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            toy = await swarm.add("alice", connected=False, train__steps=2)
            swarm.start()
            with pytest.raises(OurFault, match=r"version 2 was not saved.* goes on from version 0"):
                await toy.task
            assert len(toy.of(StepDone)) == 2

    run_virtual(main())


# --- the stage strip ----------------------------------------------------------------------------------------


def test_the_strip_says_who_works_and_who_waits_for_what(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, costs_s=SLOW_TRAINING) as swarm:
            alice = await swarm.add("alice", 0, train__steps=16)
            await swarm.add("bob", 1, bootstraps=[alice], train__steps=16)
            await swarm.run()
            seen: dict[str, Counter[str]] = {}
            for event in alice.of(StagesSeen):
                for status in event.stages:
                    seen.setdefault(status.stage, Counter())[status.waiting_for] += 1
            total = len(alice.of(StagesSeen))
            # the update of the engine takes as long as a step here, and both are done on the train lane
            assert 0.2 * total < seen["broadcast"][""] < 0.7 * total
            assert 0.2 * total < seen["train"][""] < 0.8 * total
            assert seen["broadcast"]["a new version"] + seen["broadcast"][""] == total
            assert seen["weight"]["a step"] > 0.7 * total
            assert seen["verify"]["fetched bodies"] > 0.8 * total
            assert seen["rollout"]["the trainer"] > 0.5 * total
            for names in seen.values():
                for name in names:
                    assert len(name) <= 24
                    assert all(len(word) <= 12 for word in name.split())

    run_virtual(main())


# --- again --------------------------------------------------------------------------------------------------


def untimed(value: Any) -> Any:
    """Without measured seconds, which are all that may differ."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if not key.endswith("_s")}
    if isinstance(value, list):
        return [untimed(item) for item in value]
    return value


def test_the_same_seed_gives_the_same_events(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main(seed: int) -> list[Any]:
        # A second run in the same home would go on with the chain of the first.
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        async with ToySwarm(tmp_path / "again", policies, seed=seed, link="home") as swarm:
            alice = await swarm.add("alice", 0, train__steps=8, seed=seed)
            bob = await swarm.add("bob", 1, bootstraps=[alice], train__steps=8, seed=seed)
            await swarm.run()
            for toy in (alice, bob):
                await toy.task
            assert sum(step.groups_external for step in alice.of(StepDone)) > 0
            return [untimed(json.loads(encode_event(event))) for toy in (alice, bob) for event in toy.events]

    first = run_virtual(main(1))
    second = run_virtual(main(1))
    assert len(first) > 50
    for left, right in zip(first, second, strict=True):
        assert left == right
    assert run_virtual(main(2)) != first


def test_a_restart_within_a_window_answers_no_slot_twice(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies, window_ms=10_000, slots_per_window=32, pool_size=64) as swarm:
            bob = await swarm.add("bob", 1, train__steps=100)
            alice = await swarm.add("alice", 0, bootstraps=[bob], train__steps=100)
            swarm.start()
            await asyncio.sleep(6)
            alice.node.stop("restart")
            await alice.task
            again = await swarm.add(
                "alice",
                0,
                bootstraps=[bob],
                train__steps=5,
                stores=dataclasses.replace(alice.stores, replay=ReplayCache()),
            )
            await swarm.run(again)
            announced = [
                (event.window, event.slot)
                for toy in (alice, again)
                for event in toy.of(GroupJudged)
                if event.own
            ]
            assert len(set(announced)) == len(announced) > 10
            (row,) = bob.of(PeersSeen)[-1].peers
            assert row.rejected == {}
            assert row.trust > 0.5

    run_virtual(main())
