"""What a group is made of, without a loop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.clock import VIRTUAL_EPOCH_MS
from node.config import load_config
from node.environment.host import Answers, FailureReason
from node.environment.records import Completion, Prompt
from node.membership import Membership
from node.rollout.engine.base import Engine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.generate import Generator, NoGroupError, request_seed
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt
from node.rollout.scoring import OwnScorer, answers_of
from protocol.codec import digest, encode
from protocol.messages import FinishReason, Lineage, PromptRef
from tests.node.runtimes import ManualClock
from tests.node.toy import TASK, ToyEnvironment, ToyHost, make_charter
from tests.node.verify.world import identity, rollout
from tests.rollouts import changed

ALICE, BOB = identity("alice"), identity("bob").peer_id
LINEAGE = Lineage(ALICE.peer_id, "a" * 64, "b" * 64)


def assigned(slot: int, text: str = "000012") -> AssignedPrompt:
    return AssignedPrompt(PromptRef(3, slot, 5), Prompt(TASK, text, 12, 0, {}))


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture(scope="module")
def engine(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy)


def generator(
    policy: Policy,
    engine: Engine,
    *,
    host: ToyHost | None = None,
    lineage: Lineage = LINEAGE,
    **charter: Any,
) -> Generator:
    membership = Membership(ALICE, make_charter([policy], VIRTUAL_EPOCH_MS, **charter), ManualClock())
    scorer = OwnScorer(host or ToyHost())
    return Generator(membership, lineage, policy, engine, scorer, load_config([], {}))


def test_the_seed_differs_by_node_author_slot_window_and_version() -> None:
    seeds = [
        request_seed(0, ALICE.peer_id, PromptRef(3, 4, 5), 7),
        request_seed(1, ALICE.peer_id, PromptRef(3, 4, 5), 7),
        request_seed(0, BOB, PromptRef(3, 4, 5), 7),
        request_seed(0, ALICE.peer_id, PromptRef(4, 4, 5), 7),
        request_seed(0, ALICE.peer_id, PromptRef(3, 5, 5), 7),
        request_seed(0, ALICE.peer_id, PromptRef(3, 4, 5), 8),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == request_seed(0, ALICE.peer_id, PromptRef(3, 4, 5), 7)


def test_what_is_scored_is_the_text_and_whether_it_ended() -> None:
    ended = rollout([65, 0], [-1.0, -1.0], reward=0.0)
    cut = changed(ended, finish=FinishReason.LENGTH)
    prompt = ToyEnvironment().prompt(5, 0)
    answers = Answers(TASK, 5, (Completion("A", True), Completion("A", False)))
    assert answers_of(prompt, [ended, cut]) == answers


def test_prompts_become_complete_scored_groups(policy: Policy, engine: Engine) -> None:
    made = generator(policy, engine).generate([assigned(4), assigned(5)], at_ms=77)
    assert [own.group.prompt.slot for own in made] == [4, 5]
    for own in made:
        group = own.group
        assert (group.author, group.lineage, group.environment) == (ALICE.peer_id, LINEAGE, TASK)
        assert (group.question, group.engine, group.dtype) == ("000012", engine.name, engine.dtype)
        assert own.rewards == tuple(float(len(each.text) % 2) for each in group.rollouts)
        assert own.rewards == tuple(each.reward for each in group.rollouts)
        assert [bytes(arrays.token_ids_T) for arrays in own.tokens] == [
            r.answer.token_ids for r in group.rollouts
        ]
        assert own.digest == digest(encode(group))
        assert (own.own, own.arrived_at) == (True, 77)
        assert own.generate_s > 0


def test_the_same_prompts_give_the_same_groups_in_any_company(policy: Policy, engine: Engine) -> None:
    together = generator(policy, engine).generate([assigned(4), assigned(5)], at_ms=0)
    alone = generator(policy, engine).generate([assigned(5)], at_ms=0)
    assert [each.answer.token_ids for each in alone[0].group.rollouts] == [
        each.answer.token_ids for each in together[1].group.rollouts
    ]


def test_a_prompt_that_gives_no_group_is_left_out(policy: Policy, engine: Engine) -> None:
    made = generator(policy, engine)
    long = assigned(4, "1" * 500)
    assert [own.group.prompt.slot for own in made.generate([long, assigned(5)], at_ms=0)] == [5]
    with pytest.raises(NoGroupError, match=f"of the engine's {policy.max_positions} tokens"):
        made.request(long)


def test_without_scores_there_is_no_group(policy: Policy, engine: Engine) -> None:
    host = ToyHost()
    host.failure = FailureReason.UNAVAILABLE
    made = generator(policy, engine, host=host)
    assert made.generate([assigned(4)], at_ms=0) == []
    (failed,) = made.complete([(assigned(4), [rollout([65], [-1.0], reward=0.0)], 0.0)], 0)
    assert isinstance(failed, NoGroupError)
    assert str(failed) == "it could not be scored (unavailable)"


def test_a_group_carries_its_newest_version(policy: Policy, engine: Engine) -> None:
    rollouts = [rollout([65], [-1.0], reward=0.0, version=version) for version in (2, 5, 3)]
    rollouts[0] = changed(rollouts[0], token_ids=b"\0" * 8, logprobs=b"\0" * 8, versions=b"\2\0\0\0\4\0\0\0")
    (made,) = generator(policy, engine).complete([(assigned(4), rollouts, 0.0)], 0)
    assert not isinstance(made, NoGroupError)
    own, body = made
    group = own.group
    assert (group.policy_version, group.mean_version, group.oldest_version) == (5, 3.5, 2)
    assert body == encode(group)


def test_a_body_above_what_peers_fetch_is_no_group(policy: Policy, engine: Engine) -> None:
    made = generator(policy, engine, max_new_tokens=1)
    text = rollout([65], [-1.0], reward=0.0)
    huge = [msgspec.structs.replace(text, text="x" * 100_000)] * 4
    (failed,) = made.complete([(assigned(4), huge, 0.0)], 0)
    assert isinstance(failed, NoGroupError)
    assert re.fullmatch(r"its body is larger than the \d+ bytes allowed", str(failed))


def test_who_makes_room_depends_on_whose_policy_generates(policy: Policy, engine: Engine) -> None:
    assert generator(policy, engine).own_lineage
    others = msgspec.structs.replace(LINEAGE, owner=BOB)
    assert not generator(policy, engine, lineage=others).own_lineage
