"""Whole nodes whose updates go wrong, and nodes that keep earlier weights: what others see of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from node.clock import run_virtual
from node.events import (
    GroupJudged,
    NodeStopped,
    Notice,
    RolledBack,
    StepDone,
    VersionPublished,
    VersionReached,
    encode_event,
)
from node.open.parts import Parts
from node.rollout.policy import Policy
from node.train.checkpoint import read_state
from node.train.objectives import open_objective
from node.train.step import StepReport
from node.weight.batch import TrainingBatch
from node.weights.chain.chains import Chains
from protocol.errors import UnstableError
from tests.node.toy import Toy, ToySwarm, trained_otherwise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_delta")]


def poison(toy: Toy, *numbers: int) -> None:
    """These steps, counted from 1, are far too large."""
    trainer, made = toy.trainer, iter(range(1, 10**6))
    real: Callable[[TrainingBatch], StepReport] = trainer.step

    def step(batch: TrainingBatch) -> StepReport:
        usual = trainer.settings
        if next(made) in numbers:
            trainer.settings = dataclasses.replace(usual, learning_rate=100.0)
        try:
            return real(batch)
        finally:
            trainer.settings = usual

    trainer.step = step


def published(toy: Toy) -> dict[int, str]:
    """Digest of every version."""
    return {event.policy_version: event.digest for event in toy.of(VersionPublished)}


def test_a_poisoned_update_goes_back_before_anybody_sees_it_and_training_goes_on(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """Step 6 makes version 6, which is bad; version 7 has the weights of 5, and step 7 makes version 8."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, train__steps=14, supervise__enabled=True)
            follower = await swarm.add_follower(
                "follower", 0, bootstraps=[alice], follow__owner=alice.peer_id
            )
            poison(alice, 6)
            swarm.start()
            await swarm.finished(alice)
            await alice.task
            steps = alice.of(StepDone)
            assert [step.policy_version for step in steps] == [1, 2, 3, 4, 5, 6, *range(8, 16)]
            assert [step.policy_version for step in steps if step.rolled_back] == [6]
            kl = {step.policy_version: step.kl_step for step in steps}
            assert max(kl[version] for version in kl if version != 6) < 0.1
            assert kl[6] > 0.5
            assert not any(step.skipped for step in steps)
            assert alice.of(NodeStopped)[0].steps == 13
            (event,) = alice.of(RolledBack)
            assert (event.sign, event.value, event.total) == ("kl_step", kl[6], 1)
            assert (event.bad_version, event.good_version, event.policy_version) == (6, 5, 7)
            (notice,) = alice.of(Notice)
            assert notice.text == event.why

            digests = published(alice)
            assert 6 not in digests
            assert digests[7] == digests[5]
            assert len({digests[version] for version in digests if version not in (5, 7)}) == len(digests) - 2
            assert 6 not in {judged.policy_version for judged in alice.of(GroupJudged)}
            reached = [(each.policy_version, each.digest) for each in follower.of(VersionReached)]
            assert [version for version, _ in reached] == sorted({version for version, _ in reached})
            assert reached[-1][0] > 7
            assert all(digests[version] == digest for version, digest in reached)
            assert alice.parts.engine.policy_version == alice.trainer.policy_version == 15
            for each in alice.events:
                encode_event(each)

    run_virtual(main())


def test_without_supervision_the_same_update_stays(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, connected=False, train__steps=5)
            poison(alice, 3)
            await swarm.run()
            steps = alice.of(StepDone)
            assert [step.policy_version for step in steps] == [1, 2, 3, 4, 5]
            assert [step.kl_step for step in steps] == [None] * 5
            assert alice.of(RolledBack) == []

    run_virtual(main())


def test_poison_in_every_step_ends_the_node_with_the_good_weights_saved(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, connected=False, train__steps=20, supervise__enabled=True)
            poison(alice, *range(3, 20))
            swarm.start()
            with pytest.raises(UnstableError, match="3 times in a row an update had to be rolled back"):
                await alice.task
            assert [event.policy_version for event in alice.of(RolledBack)] == [4, 6, 8]
            assert {event.good_version for event in alice.of(RolledBack)} == {2, 4, 6}
            assert alice.of(NodeStopped)[0].steps == 2
            assert alice.of(NodeStopped)[0].reason.startswith("UnstableError: 3 times in a row")
            saved = tmp_path / "alice" / "runs" / "latest" / "checkpoints" / "v8"
            assert read_state(saved).updates == 2

    run_virtual(main())


def test_a_decline_that_only_a_probe_shows_goes_back_to_the_last_good_one(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes before the first step and after 2, 4, 6: good, good, bad, good. Version 5 has the weights of 2,
    in the engine, too, and at the followers."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            keys = {"supervise__enabled": True, "supervise__probe_every": 2}
            alice = await swarm.add("alice", 0, train__steps=6, **keys)
            rewards = iter([1.0, 1.0, 0.0, 1.0])
            asked: list[int] = []

            def answer(count: int) -> list[float]:
                asked.append(count)
                return [next(rewards)] * count

            monkeypatch.setattr(alice.node.role.held_out, "rewards", answer)
            monkeypatch.setattr(Chains, "wanted", True)  # every version is published
            await swarm.run()
            await alice.task
            assert asked == [64] * 4
            (event,) = alice.of(RolledBack)
            assert event.sign == "probe_reward"
            assert (event.bad_version, event.good_version, event.policy_version) == (4, 2, 5)
            assert [step.policy_version for step in alice.of(StepDone)] == [1, 2, 3, 4, 6, 7]
            digests = published(alice)
            assert digests[5] == digests[2] != digests[4]
            checkpoints = tmp_path / "alice" / "runs" / "latest" / "checkpoints"
            assert {path.name for path in checkpoints.iterdir()} == {"v5", "v7"}
            assert read_state(checkpoints / "v5").updates == 2

    run_virtual(main())


def test_by_turns_with_the_engine_no_rollout_is_looked_at_again_and_probes_still_go_back(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            keys = {"supervise__enabled": True, "supervise__probe_every": 2, "policy__sharing": "sequential"}
            alice = await swarm.add("alice", 0, connected=False, train__steps=4, **keys)
            rewards = iter([1.0, 0.0, 1.0])
            monkeypatch.setattr(alice.node.role.held_out, "rewards", lambda count: [next(rewards)] * count)
            await swarm.run()
            await alice.task
            assert [step.kl_step for step in alice.of(StepDone)] == [None] * 4
            assert [step.policy_version for step in alice.of(StepDone)] == [1, 2, 4, 5]
            assert [event.policy_version for event in alice.of(RolledBack)] == [3]
            assert alice.parts.engine.policy_version == alice.trainer.policy_version == 5

    run_virtual(main())


def with_objective(name: str, **options: Any) -> Callable[[Parts], Parts]:
    return lambda parts: trained_otherwise(parts, own=open_objective(name, options))


def test_a_node_tells_engine_mismatch_from_staleness_where_it_keeps_snapshots(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """The embedded engine computes as the trainer does; own rollouts are up to one version old. A roll-back
    in between is no gap in what is kept."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add(
                "alice",
                0,
                connected=False,
                train__steps=10,
                supervise__enabled=True,
                change=with_objective("copris"),
            )
            poison(alice, 5)
            await swarm.run()
            await alice.task
            steps = alice.of(StepDone)
            assert sum(step.rolled_back for step in steps) == 1
            for step in steps:
                assert step.gaps is not None
                assert step.gaps.exact == 1.0
                assert step.gaps.mismatch.mean_abs < 1e-4
                assert step.gaps.mismatch.tokens == step.sources[0].tokens
            behind = [step for step in steps if sum(step.sources[0].lags[1:])]
            assert len(behind) >= 5
            moved = [step for step in behind if step.policy_version not in (6, 7, 8)]
            assert all(step.gaps.staleness.mean_abs > 1e-4 for step in moved if step.gaps is not None)

    run_virtual(main())


def test_a_node_keeps_a_moving_average_for_an_objective_that_needs_one(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add(
                "alice", 0, connected=False, train__steps=4, change=with_objective("ppo_ewma")
            )
            async with asyncio.timeout(120):
                await swarm.run()
            steps = alice.of(StepDone)
            assert [(step.policy_version, step.skipped, step.gaps) for step in steps] == [
                (version, False, None) for version in range(1, 5)
            ]

    run_virtual(main())
