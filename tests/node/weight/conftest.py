"""The tiny policy, opened once, and accepted groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node.rollout.policy import Policy
from node.share.accepted import Accepted
from protocol.messages import FinishReason, Lineage, PromptRef, Rollout, RolloutGroup, Sampling
from protocol.rollouts import parse_tokens
from tests.node.verify.world import identity, rollout

TOKENS = [5, 6, 7, 1]
ME, ALICE, BOB = (identity(name).peer_id for name in ("me", "alice", "bob"))


@pytest.fixture(scope="session")
def policy(tiny_policy_path: Path) -> Policy:
    """Has 46 tokens, 128 positions, end token 1."""
    return Policy.open(tiny_policy_path)


def lineage_of(policy: Policy, owner: str, tokenizer: str | None = None) -> Lineage:
    """Of this owner's policy, with the tokenizer of `policy` unless told otherwise."""
    return Lineage(owner, policy.base_model, tokenizer or policy.tokenizer_digest)


def accepted(
    policy: Policy,
    author: str,
    rewards: Sequence[float],
    *,
    prompt: tuple[int, int] = (10, 0),
    rollouts: Sequence[Rollout] = (),
    **fields: Any,
) -> Accepted:
    """A group by `author`, own if that is ME, of four tokens with log-probability -1 each, for `prompt`
    (window, index); its digest tells author and prompt."""
    made = tuple(rollouts) or tuple(
        rollout(TOKENS, [-1.0] * 4, reward=reward, text="abc", finish=FinishReason.STOP) for reward in rewards
    )
    values: dict[str, Any] = {
        "author": author,
        "lineage": lineage_of(policy, author),
        "policy_version": fields.get("policy_version", 0),
        "mean_version": float(fields.get("policy_version", 0)),
        "oldest_version": fields.get("policy_version", 0),
        "environment": "toy",
        "prompt": PromptRef(prompt[0], 0, prompt[1]),
        "question": "12+3",
        "sampling": Sampling(5),
        "engine": "toy",
        "dtype": "float32",
        "rollouts": made,
    }
    group = RolloutGroup(**(values | fields))
    tokens = tuple(parse_tokens(each) for each in made)
    digest = f"{author[-8:]}-{prompt[0]}-{prompt[1]}".ljust(64, "0")
    return Accepted(digest, group, tokens, tuple(rewards), prompt[1], generate_s=0.5, own=author == ME)
