"""Whole followers in one process: they track an owner, generate for it, and find another one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from node.clock import run_virtual
from node.events import (
    GroupJudged,
    Health,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    StagesSeen,
    StepDone,
    VersionPublished,
    VersionReached,
    WeightsSeen,
    encode_event,
)
from node.open.parts import Parts
from node.peers.trust import load_standings
from node.rollout.adapter import AdapterSpec
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.weights.chain.chains import Chains
from protocol.errors import ConfigError
from tests.node.toy import COSTS_S, Toy, ToySwarm, trained_otherwise
from tests.node.weights.test_engine_sync import Drifting

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_delta")]


def made(toy: Toy) -> list[GroupJudged]:
    """A follower's own groups."""
    return [event for event in toy.of(GroupJudged) if event.own]


def judged_by(toy: Toy, author: Toy) -> list[GroupJudged]:
    return [event for event in toy.of(GroupJudged) if event.author == author.peer_id]


async def until_reached(toy: Toy, version: int = 0, owner: Toy | None = None) -> VersionReached:
    """The first event of this version or a newer one, of `owner` if given; within two virtual minutes."""
    for _ in range(1200):
        for event in toy.of(VersionReached):
            if event.policy_version >= version and (owner is None or event.owner == owner.peer_id):
                return event
        if toy.task is not None and toy.task.done():
            await toy.task
        await asyncio.sleep(0.1)
    pytest.fail(f"v{version} was not reached, only {toy.of(VersionReached)[-1:]}")


def test_an_owner_trains_on_what_its_followers_generate(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=25, linger=True)
            stranger = await swarm.add("stranger", 1, bootstraps=[owner], train__steps=25, linger=True)
            first = await swarm.add_follower("first", 0, bootstraps=[owner])
            second = await swarm.add_follower("second", 0, bootstraps=[owner])
            swarm.start()
            await swarm.finished()
            await asyncio.gather(*(until_reached(toy, 25) for toy in (first, second)))
            for toy in swarm.toys:
                toy.node.stop("enough")
                await toy.task

            steps = owner.of(StepDone)
            assert sum(step.groups_followers for step in steps) >= 8
            lags = [step.staleness_followers for step in steps if step.groups_followers]
            assert sum(lags) / len(lags) > 0
            assert max(lags) <= owner.membership.charter.rules.max_policy_lag
            published = {event.policy_version: event.digest for event in owner.of(VersionPublished)}
            for follower in (first, second):
                assert all(event.accepted for event in judged_by(owner, follower))
                # at every version, and so at the end, the very weights that the owner published
                reached = follower.of(VersionReached)
                assert {event.owner for event in reached} == {owner.peer_id}
                assert all(published[event.policy_version] == event.digest for event in reached)
                assert [event.policy_version for event in reached] == sorted(
                    {event.policy_version for event in reached}
                )
                # nothing was generated before the first version, and all with a version that it had
                versions = {event.policy_version for event in reached}
                assert made(follower)[0].at >= reached[0].at
                assert {event.policy_version for event in made(follower)} <= versions
                assert isinstance(follower.events[0], NodeStarted)
                assert follower.events[0].role == "follower"
                assert isinstance(follower.events[-1], NodeStopped)
                assert follower.events[-1].steps == len(reached)
                seen = follower.of(WeightsSeen)[-1]
                assert (seen.owner, seen.policy_version, seen.head) == (owner.peer_id, 25, 25)
                assert seen.received_bytes > 0
                assert follower.of(Notice)[0].text == f"follows {owner.peer_id}"
            # to the stranger they are another model's groups
            from_followers = [*judged_by(stranger, first), *judged_by(stranger, second)]
            assert from_followers
            assert all(event.accepted for event in from_followers)
            assert sum(step.groups_followers for step in stranger.of(StepDone)) == 0
            rows = {row.peer_id: row for row in owner.of(PeersSeen)[-1].peers}
            assert rows[first.peer_id].follows == rows[second.peer_id].follows == owner.peer_id
            assert rows[stranger.peer_id].follows == ""
            assert owner.of(WeightsSeen)[-1].policy_version == 25
            assert max(event.followers for event in owner.of(WeightsSeen)) == 2
            for toy in swarm.toys:
                for event in toy.events:
                    encode_event(event)

    run_virtual(main())


def test_one_version_gets_only_so_many_groups(tmp_path: Path, policies: Sequence[Policy]) -> None:
    """(max_staleness 2 + 1) * 2 local groups for each version, however long it lasts."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies, costs_s=COSTS_S | {"train": 8.0}) as swarm:
            owner = await swarm.add("owner", 0, train__steps=3, linger=True)
            follower = await swarm.add_follower("follower", 0, bootstraps=[owner], rollout__max_staleness=2)
            swarm.start()
            await swarm.finished()
            await asyncio.sleep(30)
            follower.node.stop("enough")
            await follower.task
            room = 0
            for event in follower.events:
                if isinstance(event, VersionReached):
                    room = 6
                elif isinstance(event, GroupJudged):
                    room -= 1
                    assert room >= 0
            versions = len(follower.of(VersionReached))
            assert versions >= 3
            assert len(made(follower)) == 6 * versions
            strip = {status.stage: status for status in follower.of(StagesSeen)[-1].stages}
            assert strip["rollout"].waiting_for == "the next version"
            assert strip["rollout"].waiting_s > 20

    run_virtual(main())


def test_an_owner_that_falls_silent_is_given_up_for_another(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            settings = {"train__steps": 1000}
            one = await swarm.add("one", 0, **settings)
            other = await swarm.add("other", 0, bootstraps=[one], **settings)
            follower = await swarm.add_follower(
                "follower", 0, bootstraps=[one, other], follow__owner_timeout_s=5
            )
            swarm.start()
            first = (await until_reached(follower, 0)).owner
            await asyncio.sleep(3)
            gone, left = (one, other) if first == one.peer_id else (other, one)
            gone.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone.task
            gone_at = swarm.clock.now_ms()
            switched_at = (await until_reached(follower, owner=left)).at
            # Its last sign of life came up to a step before it ended.
            assert 4000 <= switched_at - gone_at < 15_000
            await asyncio.sleep(3)
            assert f"{gone.peer_id} was silent for 5 s" in follower.of(Notice)[1].text
            later = [event for event in judged_by(left, follower) if event.at > switched_at + 1000]
            assert later
            assert all(event.accepted for event in later)

    run_virtual(main())


def test_a_follower_without_an_owner_waits_and_says_so(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            stranger = await swarm.add("stranger", 1, train__steps=1000)
            follower = await swarm.add_follower("follower", 0, bootstraps=[stranger])
            swarm.start()
            await asyncio.sleep(10)
            follower.node.stop("enough")
            await follower.task
            assert made(follower) == follower.of(VersionReached) == []
            strip = {status.stage: status.waiting_for for status in follower.of(StagesSeen)[-1].stages}
            assert strip == {"rollout": "an owner", "broadcast": "an owner"}
            assert load_standings(tmp_path / "follower" / "state" / "trust.json", swarm.swarm_id) == ()

    run_virtual(main())


def test_an_owner_killed_between_checkpoints_goes_on_where_its_chain_is(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """No checkpoint was written: all that is left of the run is what was published."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=1000)
            follower = await swarm.add_follower("follower", 0, bootstraps=[owner], follow__owner_timeout_s=60)
            swarm.start()
            await until_reached(follower, 6)
            owner.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await owner.task
            head = owner.of(VersionPublished)[-1]
            again = await swarm.add("owner", 0, bootstraps=[follower], train__steps=5)
            await swarm.run(again)
            last = head.policy_version + 5
            assert [step.policy_version for step in again.of(StepDone)] == [*range(last - 4, last + 1)]
            assert f"goes on from v{head.policy_version}, which was published" in again.of(Notice)[0].text
            reached = await until_reached(follower, last)
            assert reached.digest == again.of(VersionPublished)[-1].digest
            assert len(follower.of(Notice)) == 1  # follows the owner, as before

    run_virtual(main())


def test_another_run_of_the_same_node_never_takes_its_chain_back(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chains, "wanted", True)  # every version is published

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=4)
            await swarm.run()
            await owner.task
            begin = policies[0].load_model().state_dict()
            again = await swarm.add("owner", 0, run="another", train__steps=2, linger=True)
            follower = await swarm.add_follower("follower", 0, bootstraps=[again])
            swarm.start(again, follower)
            assert await until_reached(follower, 5)
            await swarm.finished(again)
            assert again.of(Notice)[0].text == "another run published up to v4: this one begins at v5"
            assert [step.policy_version for step in again.of(StepDone)] == [6, 7]
            start = again.trainer.settings.learning_rate * 20
            for name, tensor in again.trainer.state_dict().items():
                assert torch.allclose(tensor, begin[name], atol=start)

    run_virtual(main())


def test_an_owner_that_contradicts_itself_is_left_and_not_chosen_again(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=1000)
            follower = await swarm.add_follower("follower", 0, bootstraps=[owner])
            swarm.start()
            await until_reached(follower, 2)
            follower.node.role.following.tracker.stopped = (
                "chain_fork"  # how that is found: tests of the tracker
            )
            await asyncio.sleep(5)
            text = "signed versions that contradict each other (chain_fork); looking for an owner"
            assert follower.of(Notice)[-1].text == f"{owner.peer_id} {text}"
            assert follower.node.role.following.lineage is None
            made_by_then = len(made(follower))
            await asyncio.sleep(5)
            assert len(made(follower)) == made_by_then

    run_virtual(main())


def lies_at(owner: Toy, *versions: int) -> None:
    """From now on this running owner signs blobs for these versions that lack their last byte."""
    store = owner.node.role.publisher.sharing.store
    honest, lies = store.add, set(versions)

    def add(data: bytes) -> Any:
        lying = owner.trainer.policy_version in lies
        lies.discard(owner.trainer.policy_version)
        return honest(data[:-1] if lying else data)

    store.add = add


LEFT = r"signed a version that is of no use \(delta_[a-z]+\); looking for an owner"


async def follower_of_one_of_two(swarm: ToySwarm) -> tuple[Toy, Toy, Toy, VersionReached]:
    """A follower that has a version of an owner, that owner, another one, and the version."""
    owners = [await swarm.add(name, 0, train__steps=1000) for name in ("one", "other")]
    follower = await swarm.add_follower("follower", 0, bootstraps=owners)
    swarm.start()
    reached = await until_reached(follower, 2)
    followed, other = owners if owners[0].peer_id == reached.owner else reversed(owners)
    return follower, followed, other, reached


def test_an_owner_that_signs_what_is_not_so_is_left_for_another(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            follower, liar, other, reached = await follower_of_one_of_two(swarm)
            lie = reached.policy_version + 5
            lies_at(liar, lie)
            switched_at = (await until_reached(follower, owner=other)).at
            await asyncio.sleep(5)
            _, text, _ = (notice.text for notice in follower.of(Notice))
            assert re.fullmatch(f"{liar.peer_id} {LEFT}", text)
            assert follower.node.role.following.lineage.owner == other.peer_id
            of_liar = [event for event in follower.of(VersionReached) if event.owner == liar.peer_id]
            assert max(event.policy_version for event in of_liar) < lie
            assert max(event.at for event in of_liar) < switched_at
            rows = {row.peer_id: row for row in follower.of(PeersSeen)[-1].peers}
            assert rows[liar.peer_id].trust == 0
            assert rows[other.peer_id].trust == 0.5
            counted = follower.node.peers.refusals()
            assert sum(n for reason, n in counted.items() if reason.startswith("delta_")) == 1
            (standing,) = [each for each in follower.node.peers.standings() if each.peer == liar.peer_id]
            assert 0.9 < standing.hard <= 1  # once

    run_virtual(main())


def test_an_owner_whose_finite_weights_give_no_numbers_is_left_for_another(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            follower, liar, other, reached = await follower_of_one_of_two(swarm)
            offer = liar.node.role.publisher.offer

            def offer_huge(policy_version: int, state: dict[str, torch.Tensor], **rest: bool) -> None:
                huge = {name: torch.full_like(each, 3e38) for name, each in state.items() if "norm" in name}
                offer(policy_version, {**state, **huge}, **rest)

            liar.node.role.publisher.offer = offer_huge
            await until_reached(follower, owner=other)
            _, left, _ = (notice.text for notice in follower.of(Notice))
            assert left.startswith(f"{liar.peer_id} signed a version that is of no use (version ")
            assert "NaN or infinite" in left
            assert follower.node.peers.trust(liar.peer_id) == 0
            assert made(follower)[-1].at >= reached.at

    run_virtual(main())


def test_the_configured_owner_is_waited_for_while_it_is_in_quarantine(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """Of 6 windows of 2 s each; the other owner is no choice."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=1000, broadcast__anchor_every=4)
            other = await swarm.add("other", 0, bootstraps=[owner], train__steps=1000)
            follower = await swarm.add_follower(
                "follower",
                0,
                bootstraps=[owner, other],
                follow__owner=owner.peer_id,
                weight__quarantine_windows=6,
            )
            swarm.start()
            reached = await until_reached(follower, 2)
            lie = reached.policy_version + 5
            lie += lie % 4 == 0  # no anchor, which has two blobs
            lies_at(owner, lie)
            async with asyncio.timeout(60):
                while len(follower.of(Notice)) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
            left = follower.of(Notice)[1]
            assert re.fullmatch(f"{owner.peer_id} {LEFT}", left.text)
            waits = f"waits: follow.owner {owner.peer_id} is in quarantine for what it signed"
            assert [notice.text.startswith(waits) for notice in follower.of(Notice)] == [False, False, True]
            assert follower.node.role.following.lineage is None
            again = await until_reached(follower, lie)
            assert 11_000 <= again.at - left.at < 22_000
            assert {event.owner for event in follower.of(VersionReached)} == {owner.peer_id}
            assert len(follower.of(Notice)) == 4  # follows it, as before

    run_virtual(main())


def engine_off(nats: float, *, heals: bool) -> Callable[[Parts], Parts]:
    """An engine that asks to be probed and computes with something else."""

    def change(parts: Parts) -> Parts:
        engine = Drifting(parts.policy)
        engine.probe_each, engine.off_nats, engine.heals = True, nats, heals
        return dataclasses.replace(parts, engine=engine)

    return change


def test_a_follower_whose_engine_stays_wrong_shares_nothing(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add("owner", 0, train__steps=1000)
            wrong = await swarm.add_follower(
                "wrong", 0, bootstraps=[owner], change=engine_off(0.01, heals=False)
            )
            healed = await swarm.add_follower(
                "healed", 0, bootstraps=[owner], change=engine_off(0.01, heals=True)
            )
            swarm.start()
            await asyncio.gather(until_reached(wrong, 20), until_reached(healed, 20))
            for toy in (wrong, healed):
                toy.node.stop("enough")
                await toy.task
            _, notice = wrong.of(Notice)
            assert notice.level == "error"
            assert "by 0.01 nats" in notice.text
            assert notice.text.endswith("with all weights loaded anew; this node shares nothing more")
            health = wrong.of(Health)[-1]
            assert health.not_sharing in notice.text
            assert health.not_sharing != ""
            assert health.announced == 0
            assert wrong.parts.engine.reloads == 1
            assert wrong.parts.engine.policy_version == wrong.of(VersionReached)[-1].policy_version
            assert judged_by(owner, wrong) == []
            assert len(made(wrong)) <= 6  # what one version is given, and no more after that

            _, notice = healed.of(Notice)
            assert notice.level == "warning"
            assert "passed it once loaded anew" in notice.text
            assert healed.of(Health)[-1].not_sharing == ""
            assert judged_by(owner, healed)

    run_virtual(main())


def test_an_adapter_travels_the_same_way(tmp_path: Path, policies: Sequence[Policy]) -> None:
    pytest.importorskip("peft")
    spec = AdapterSpec(4, 8.0)
    settings = {"policy__tuning": "lora", "policy__lora_rank": 4, "policy__lora_alpha": 8.0}

    def trains_adapter(parts: Parts) -> Parts:
        return dataclasses.replace(trained_otherwise(parts, adapter=spec), engine=engine(parts.policy))

    def engine(policy: Policy) -> TransformersEngine:
        return TransformersEngine(policy, adapter=spec)

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            owner = await swarm.add(
                "owner", 0, change=trains_adapter, train__steps=8, linger=True, **settings
            )
            follower = await swarm.add_follower(
                "follower",
                0,
                bootstraps=[owner],
                change=lambda parts: dataclasses.replace(parts, engine=engine(parts.policy)),
                **settings,
            )
            swarm.start()
            await swarm.finished()
            reached = await until_reached(follower, 8)
            published = owner.of(VersionPublished)[-1]
            assert reached.digest == published.digest
            assert published.full_bytes < 2 * policies[0].params
            assert all(event.accepted for event in judged_by(owner, follower))

    run_virtual(main())


async def test_a_follower_needs_a_network(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async with ToySwarm(tmp_path, policies) as swarm:
        with pytest.raises(ConfigError, match="nobody to follow"):
            await swarm.add_follower("alone", 0, connected=False)
