"""Two honest nodes whose scorers differ in one line: told on both sides, and nobody is called a liar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.clock import run_virtual
from node.environment.records import Completion, Prompt, Score
from node.events import GroupJudged, Notice, PeersSeen, PeerStatus
from node.open.parts import Parts
from node.rollout.policy import Policy
from tests.node.toy import TASK, Toy, ToyEnvironment, ToyHost, ToySwarm


class NewerEnvironment(ToyEnvironment):
    """Worth 1 is what is even, not odd."""

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(float(len(completion.text) % 2 == 0), ())


def newer(parts: Parts) -> Parts:
    return dataclasses.replace(parts, host=ToyHost(NewerEnvironment()))


def seen(toy: Toy, other: Toy) -> PeerStatus:
    """The last row of `other` in the table of `toy`."""
    return next(row for row in toy.of(PeersSeen)[-1].peers if row.peer_id == other.peer_id)


@pytest.mark.usefixtures("compiled_delta")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_scorer_that_differs_in_one_line(tmp_path: Path, policies: Sequence[Policy], pinned: bool) -> None:
    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            alice = await swarm.add("alice", 0, train__steps=14)
            bob = await swarm.add("bob", 1, bootstraps=[alice], change=newer, train__steps=14)
            if pinned:
                alice.membership.pins[TASK], bob.membership.pins[TASK] = "toy==1", "toy==2"
            await swarm.run()
            for toy, other in ((alice, bob), (bob, alice)):
                row, judged = seen(toy, other), [each for each in toy.of(GroupJudged) if not each.own]
                if not pinned:  # what the comparison is for
                    assert {each.reason for each in judged} == {"false_reward"}
                    assert row.trust < 0.5
                    continue
                told = [each.text for each in toy.of(Notice) if "environment_mismatch" in each.text]
                assert len(told) == 1
                assert all(part in told[0] for part in (other.peer_id, TASK, "toy==1", "toy==2"))
                assert judged == []
                assert row.rejected["environment_mismatch"] > 1
                assert set(row.rejected) == {"environment_mismatch"}
                assert row.trust == 0.5  # a newcomer's

    run_virtual(main())
