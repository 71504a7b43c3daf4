"""Whole trainers that merge: the same bytes everywhere, judged by each, told to everybody who has to know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.clock import run_virtual
from node.events import (
    MergeJudged,
    NodeStopped,
    Notice,
    StagesSeen,
    StepDone,
    VersionPublished,
    VersionReached,
    encode_event,
)
from node.rollout.policy import Policy
from tests.node.toy import Toy, ToySwarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_merge")]

MERGING: dict[str, Any] = {
    "merge__enabled": True,
    "merge__every_windows": 5,  # 10 s
    "merge__settle_s": 2.0,
    "merge__probe_prompts": 16,
    "merge__tolerance": 1.0,  # rewards lie in [0, 1]: everything is adopted
    "train__steps": 45,
    "train__local_groups": 2,
}


def published(toy: Toy) -> dict[int, tuple[str, str]]:
    """Kind and digest of every version."""
    return {event.policy_version: (event.kind, event.digest) for event in toy.of(VersionPublished)}


async def trainers(swarm: ToySwarm, *names: str, **settings: Any) -> list[Toy]:
    """Of one base model, each connected to the first."""
    first = await swarm.add(names[0], 0, **MERGING | settings)
    rest = [await swarm.add(name, 0, bootstraps=[first], **MERGING | settings) for name in names[1:]]
    return [first, *rest]


def test_trainers_that_merge_have_the_same_weights_and_followers_get_them(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            nodes = await trainers(swarm, "ann", "ben", "cat")
            follower, *_ = [
                await swarm.add_follower(
                    f"of-{toy.node.config.name}", 0, bootstraps=[toy], follow__owner=toy.peer_id
                )
                for toy in nodes
            ]
            swarm.start()
            await swarm.finished(*nodes)
            merged: dict[str, set[str]] = {}
            for toy in nodes:
                judged = toy.of(MergeJudged)
                assert judged
                assert all(event.adopted for event in judged)
                assert {each.peer_id for each in nodes} in [set(event.authors) for event in judged]
                for event in judged:
                    kind, digest = published(toy)[event.policy_version]
                    assert kind == "anchor"
                    merged.setdefault(event.contributions, set()).add(digest)
                merge = next(stage for stage in toy.of(StagesSeen)[-1].stages if stage.stage == "merge")
                assert merge.waiting_for in ("the next round", "partners' sets")
                # the steps after it begin with a warm-up, and know which groups are from before
                steps = [step for step in toy.of(StepDone) if step.policy_version > judged[0].policy_version]
                assert steps[0].learning_rate == pytest.approx(3e-4 / 5)
                assert sum(step.groups_across_merge for step in steps) > 0
                assert [notice for notice in toy.of(Notice) if notice.level != "info"] == []
            assert all(len(digests) == 1 for digests in merged.values())
            assert any(
                sum(event.contributions == name for toy in nodes for event in toy.of(MergeJudged)) == 3
                for name in merged
            )
            first = nodes[0].of(MergeJudged)[0].policy_version
            reached = {event.policy_version: event.digest for event in follower.of(VersionReached)}
            assert max(reached) > first
            theirs = published(nodes[0])
            assert all(theirs[version][1] == digest for version, digest in reached.items())
            for event in nodes[0].events:
                encode_event(event)

    run_virtual(main())


def test_a_merge_that_is_worse_on_held_out_prompts_is_not_adopted(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            nodes = await trainers(swarm, "ann", "ben", merge__tolerance=0.0)
            for toy in nodes:
                calls = iter(range(10**6))
                monkeypatch.setattr(
                    toy.node.role.held_out,
                    "rewards",
                    lambda count, calls=calls: [0.5 - 0.1 * (next(calls) % 2)] * count,
                )
            swarm.start()
            await swarm.finished()
            for toy in nodes:
                judged = toy.of(MergeJudged)
                assert judged
                assert not any(event.adopted for event in judged)
                assert all(event.gain == pytest.approx(-0.1) for event in judged)
                # the merged weights were v + 1 in the engine only: nobody else has seen them
                versions = published(toy)
                for event in judged:
                    assert event.policy_version - 1 not in versions
                assert toy.of(Notice)[-1].text.startswith(
                    "a merge of 2 trainers was not adopted: mean reward -0.1"
                )
                made = [step.policy_version for step in toy.of(StepDone)]
                skipped = {event.policy_version - delta for event in judged for delta in (0, 1)}
                assert sorted({*made, *skipped}) == list(range(1, max(*made, *skipped) + 1))
                await toy.task
                assert toy.of(NodeStopped)[-1].steps == len(made) == MERGING["train__steps"]
                assert sum(step.groups_across_merge for step in toy.of(StepDone)) == 0

    run_virtual(main())


def test_whose_engine_has_failed_for_good_takes_part_no_more(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            ann, ben, cat = await trainers(swarm, "ann", "ben", "cat")
            cat.node.role.engine.not_sharing = "as told"
            swarm.start()
            await swarm.finished()
            assert cat.of(MergeJudged) == []
            for toy in (ann, ben):
                assert {cat.peer_id} & set(toy.of(MergeJudged)[-1].authors) == set()

    run_virtual(main())


def test_what_was_contributed_counts_no_more_once_the_engine_has_failed_for_good(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            ann, ben, cat = await trainers(swarm, "ann", "ben", "cat", train__steps=90)
            swarm.start()
            async with asyncio.timeout(60):
                while not all(toy.of(MergeJudged) for toy in (ann, ben, cat)):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
            merges = {toy.peer_id: len(toy.of(MergeJudged)) for toy in (ann, ben)}
            assert cat.peer_id in ann.of(MergeJudged)[-1].authors
            cat.node.role.engine.not_sharing = "as told"
            await swarm.finished()
            for toy in (ann, ben):
                later = toy.of(MergeJudged)[merges[toy.peer_id] :]
                assert later
                assert all(cat.peer_id not in event.authors for event in later)

    run_virtual(main())
