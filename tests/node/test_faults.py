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


def test_every_single_write_fails_and_all_at_once(
    tmp_path: Path, policies: Sequence[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        home = Home(tmp_path / "alice").create()
        async with ToySwarm(tmp_path, policies, costs_s=COSTS_S | {"train": 0.8}) as swarm:
            numbers, counted = Numbers(home, swarm.clock), Counted(home, swarm.clock)
            windows = WindowStore(home.state / "window")
            stores = Stores(sequence=numbers, replay=counted, windows=windows, trust=home.trust)
            alice = await swarm.add("alice", stores=stores, train__steps=1000, train__checkpoint_every=1)
            fay = await swarm.add_follower("fay", bootstraps=[alice])
            disk = FaultyDisk(home.root, monkeypatch)
            swarm.start()
            for _ in range(12):  # until every write has failed once and then worked
                await asyncio.sleep(10)
                if checkpoints_of(home.run("latest").checkpoints, policies[0].base_model):
                    break
            assert set(disk.refused.values()) == {1}
            assert len(disk.seen) > 70, "that many kinds of writes were found"
            episodes = 1
            for error in ERRORS:
                disk.full_of = error
                await asyncio.sleep(4)
                disk.full_of, before = 0, len(alice.of(StepDone))
                await asyncio.sleep(10)  # the longest pause between two tries
                episodes += 1
                assert len(alice.of(StepDone)) >= before + 2, "it goes on"
            assert alice.task is not None
            assert not alice.task.done()
            disk.first = 0
            shutil.copytree(home.root, tmp_path / "killed")
            right(Home(tmp_path / "killed"), swarm, alice, numbers, counted)
            alice.node.stop("enough")
            await alice.task
            (newest, *_) = checkpoints_of(home.run("latest").checkpoints, policies[0].base_model)
            assert newest.name == f"v{alice.trainer.policy_version}"
            counted.close()
            told_once(alice, home, episodes)
            published = {event.policy_version: event.digest for event in alice.of(VersionPublished)}
            reached = fay.of(VersionReached)
            assert len(reached) > 10
            assert all(event.digest == published[event.policy_version] for event in reached)

    run_virtual(main())


def right(home: Home, swarm: ToySwarm, alice: Toy, numbers: Numbers, counted: Counted) -> None:
    """What a node finds that starts from `home`."""
    slots = [(event.window, event.slot) for event in alice.of(GroupJudged) if event.own]
    assert len(set(slots)) == len(slots) > 20
    assert all(later > earlier for earlier, later in pairwise(numbers.given))
    assert len(counted.admitted) > 20
    assert load_standings(home.trust, swarm.swarm_id) == alice.node.peers.standings() != ()
    with open_stores(home, swarm.swarm_id, swarm.clock.now_ms) as stores:
        assert all(stores.windows.was_begun(window) for window, _ in slots)
        assert stores.sequence.next() > numbers.given[-1]
        for admitted in counted.admitted[-20:]:
            with pytest.raises(ReplayError):
                stores.replay.admit(*admitted)


def told_once(alice: Toy, home: Home, episodes: int) -> None:
    """Each kind of trouble once an episode, with the path and what to do."""
    kinds = Counter[str]()
    for notice in alice.of(Notice):
        if notice.level != "info":
            assert str(home.root) in notice.text
            assert "make room, or let this user write there" in notice.text
            kinds[re.sub(r"\d+", "#", notice.text.partition(":")[0])] += 1
    assert len(kinds) >= 6
    assert max(kinds.values()) <= episodes + 1
