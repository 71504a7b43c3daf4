"""Every single write of a node fails, one after the other, and then all of them for a while, in four ways.

The node goes on or waits by name, tells each kind once, and what is on the disk is right: no slot answered
twice, no number used twice, nothing counted twice, trust kept, versions and checkpoints whole."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from node.clock import VirtualClock, run_virtual
from node.events import GroupJudged, Notice, StepDone, VersionPublished, VersionReached
from node.open.stores import Stores, open_stores
from node.peers.trust import load_standings
from node.rollout.policy import Policy
from node.state.paths import Home
from node.state.stores import ReplayStore, SequenceStore
from node.state.windows import WindowStore
from node.train.checkpoint import checkpoints_of
from protocol.errors import ReplayError
from protocol.replay import ReplayCache
from tests.node.faults import ERRORS, FaultyDisk
from tests.node.toy import COSTS_S, Toy, ToySwarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_delta")]


class Numbers(SequenceStore):
    """Remembers which it gave."""

    BLOCK_TICKS = 500

    def __init__(self, home: Home, clock: VirtualClock) -> None:
        super().__init__(home.state / "sequence", clock.now_ms)
        self.given: list[int] = []

    def next(self) -> int:
        self.given.append(super().next())
        return self.given[-1]


class Counted(ReplayStore):
    """Remembers what it admitted."""

    def __init__(self, home: Home, clock: VirtualClock) -> None:
        self.admitted: list[tuple[str, int, int, int, int]] = []
        super().__init__(home.state, ReplayCache(), clock.now_ms(), journal_records=10)

    def admit(self, sender: str, sequence: int, created_at: int, expires_at: int, now_ms: int) -> None:
        super().admit(sender, sequence, created_at, expires_at, now_ms)
        self.admitted.append((sender, sequence, created_at, expires_at, now_ms))


@pytest.mark.parametrize("role", ["trainer", "follower"])
def test_every_single_write_fails_and_all_at_once(
    role: str, tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer that is followed, and of its follower."""

    async def main() -> None:
        home = Home(tmp_path / role).create()
        async with ToySwarm(tmp_path, policies, costs_s=COSTS_S | {"train": 1.6}) as swarm:
            numbers, counted = Numbers(home, swarm.clock), Counted(home, swarm.clock)
            windows = WindowStore(home.state / "window")
            kept = Stores(sequence=numbers, replay=counted, windows=windows, trust=home.trust)
            stores = {role: kept}
            trainer = await swarm.add(
                "trainer", stores=stores.get("trainer"), train__steps=1000, train__checkpoint_every=1
            )
            follower = await swarm.add_follower(
                "follower", bootstraps=[trainer], stores=stores.get("follower")
            )
            node = trainer if role == "trainer" else follower
            disk = FaultyDisk(home.root, monkeypatch)
            swarm.start()
            for _ in range(12):  # until every write has failed once and then worked
                await asyncio.sleep(10)
                if len(saved(home, policies[0])) == 2 or len(node.of(VersionReached)) > 5:
                    break
            assert set(disk.refused.values()) == {1}
            assert len(disk.seen) > {"trainer": 70, "follower": 35}[role], (
                "so many kinds of writes were found"
            )
            for error in ERRORS:
                disk.full_of = error
                await asyncio.sleep(4)
                disk.full_of, before = 0, versions(node)
                await asyncio.sleep(10)  # the longest pause between two tries
                assert versions(node) >= before + 2, "it goes on"
            assert node.task is not None
            assert not node.task.done()
            disk.first = 0
            shutil.copytree(home.root, tmp_path / "killed")
            right(Home(tmp_path / "killed"), swarm, node, numbers, counted)
            node.node.stop("enough")
            await node.task
            counted.close()
            told_once(node, home)
            if role == "trainer":
                assert saved(home, policies[0])[0] == f"v{trainer.trainer.policy_version}"
            published = {event.policy_version: event.digest for event in trainer.of(VersionPublished)}
            reached = follower.of(VersionReached)
            assert len(reached) > 10
            assert all(event.digest == published[event.policy_version] for event in reached)

    run_virtual(main())


def saved(home: Home, policy: Policy) -> list[str]:
    """Names of whole checkpoints, the newest first."""
    return [path.name for path in checkpoints_of(home.run("latest").checkpoints, policy.base_model)]


def versions(node: Toy) -> int:
    """How many it made or reached."""
    return len(node.of(StepDone)) + len(node.of(VersionReached))


def right(home: Home, swarm: ToySwarm, node: Toy, numbers: Numbers, counted: Counted) -> None:
    """What a node finds that starts from `home`."""
    slots = [(event.window, event.slot) for event in node.of(GroupJudged) if event.own]
    assert len(set(slots)) == len(slots) > 20
    assert all(later > earlier for earlier, later in pairwise(numbers.given))
    assert len(counted.admitted) > 20
    standings = node.node.peers.standings()
    assert load_standings(home.trust, swarm.swarm_id) == standings
    assert bool(standings) == (node.parts.learner is not None)
    with open_stores(home, swarm.swarm_id, swarm.clock.now_ms) as stores:
        assert all(stores.windows.was_begun(window) for window, _ in slots)
        assert stores.sequence.next() > numbers.given[-1]
        for admitted in counted.admitted[-20:]:
            with pytest.raises(ReplayError):
                stores.replay.admit(*admitted)


def told_once(node: Toy, home: Home) -> None:
    """Each kind of trouble once a time, with the path and what to do."""
    kinds = Counter[str]()
    for notice in node.of(Notice):
        if notice.level != "info":
            assert str(home.root) in notice.text
            assert "make room, or let this user write there" in notice.text
            kinds[re.sub(r"\d+", "#", notice.text.partition(":")[0])] += 1
    assert len(kinds) >= 3
    assert max(kinds.values()) <= 1 + len(ERRORS) + 1  # site by site, and with each error
