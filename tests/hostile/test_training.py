"""Item 22: NaN, Inf, 1e30, wrong lengths and tokens outside the vocabulary never reach the optimiser.

Each hostile group is put between honest ones. It is left out of the batch and named with a typed error; what
is trained on is, byte for byte, the batch without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.rollout.policy import Policy
from node.weight.batch import TrainingBatch, collate
from node.weight.groups import training_rollouts
from node.weight.settings import Treatment, WeightSettings
from protocol.errors import RemoteProtocolError
from protocol.messages import FinishReason, Rollout
from protocol.rollouts import parse_tokens
from tests.node.verify.world import rollout

SETTINGS = WeightSettings()
NUMBERS = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def hostile_groups(make: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Named variations of one foreign group of four rollouts."""
    honest = make("peer", seed=3)
    first = honest.rollouts[0]
    length = len(first.tokens_T)

    def with_first(**fields: Any) -> Any:
        return dataclasses.replace(
            honest, rollouts=(dataclasses.replace(first, **fields), *honest.rollouts[1:])
        )

    for bad in NUMBERS:
        yield f"reward {bad}", dataclasses.replace(honest, rewards=(bad, *honest.rewards[1:]))
        yield f"advantage {bad}", dataclasses.replace(honest, advantages=(bad, *honest.advantages[1:]))
        yield f"trust {bad}", dataclasses.replace(honest, trust=bad)
        yield f"temperature {bad}", dataclasses.replace(honest, temperature=bad)
        yield f"age {bad}", dataclasses.replace(honest, age_windows=bad)
        yield f"behaviour sum {bad}", with_first(behaviour_sum=bad)
        spoiled_T = first.behaviour_T.copy()
        spoiled_T[-1] = bad
        yield f"behaviour {bad}", with_first(behaviour_T=spoiled_T)
        yield f"stored {bad}", with_first(ingestion_T=spoiled_T)
    for bad_id in (-1, 46, 2**31, 2**62):
        spoiled_T = first.tokens_T.copy()
        spoiled_T[0] = bad_id
        yield f"token {bad_id}", with_first(tokens_T=spoiled_T)
        yield f"prompt token {bad_id}", dataclasses.replace(honest, prompt_ids=(2, bad_id, 3))
    yield "positive log-probability", with_first(behaviour_T=np.full(length, 0.5, np.float32))
    yield "no tokens", with_first(tokens_T=np.zeros(0, np.int64), behaviour_T=np.zeros(0, np.float32))
    yield "fewer log-probabilities", with_first(behaviour_T=first.behaviour_T[:-1])
    yield "more log-probabilities", with_first(behaviour_T=np.append(first.behaviour_T, np.float32(-1)))
    yield "two dimensions", with_first(tokens_T=first.tokens_T[None])
    yield "float tokens", with_first(tokens_T=first.tokens_T.astype(np.float64))
    yield "too many tokens", with_first(tokens_T=np.full(257, 5, np.int64), behaviour_T=None)
    yield "too many positions", dataclasses.replace(honest, prompt_ids=(2,) * 128)
    yield "no prompt", dataclasses.replace(honest, prompt_ids=())
    yield "no rollouts", dataclasses.replace(honest, rollouts=(), rewards=(), advantages=())
    yield "fewer rewards", dataclasses.replace(honest, rewards=honest.rewards[:-1])
    yield "more advantages", dataclasses.replace(honest, advantages=(*honest.advantages, 1.0))
    yield "negative uses", dataclasses.replace(honest, uses=-1)
    yield (
        "no log-probabilities of tokens",
        dataclasses.replace(with_first(behaviour_T=None), treatment=Treatment.OWN),
    )


def tensors(batch: TrainingBatch) -> dict[str, bytes]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {
        name: value.numpy().tobytes() for name, value in values.items() if isinstance(value, torch.Tensor)
    }


def test_refused_before_the_optimiser(
    tiny_policy_path: Path, make_training_group: Callable[..., Any]
) -> None:
    policy = Policy.open(tiny_policy_path)
    honest = [make_training_group(seed=1), make_training_group("other", seed=2)]
    without = collate(honest, SETTINGS, policy)
    tried = 0
    for name, hostile in hostile_groups(make_training_group):
        batch = collate([honest[0], hostile, honest[1]], SETTINGS, policy)
        [(source, error)] = batch.refused
        assert isinstance(error, RemoteProtocolError), name
        assert (source, error.group, error.reason) == ("peer", "group3", "training_data"), name
        assert batch.groups == without.groups, name
        assert tensors(batch) == tensors(without), name
        tried += 1
    assert tried >= 60


def refusal(group: Any, policy: Policy, *, same_tokenizer: bool, record: Rollout) -> str:
    """What a peer's group of two such rollouts is refused for."""
    records = [record] * 2
    tokens = [parse_tokens(each) for each in records]
    rollouts = training_rollouts(records, tokens, policy, same_tokenizer=same_tokenizer)
    batch = collate([group, dataclasses.replace(group, source="peer", rollouts=rollouts)], SETTINGS, policy)
    [(_, error)] = batch.refused
    return str(error)


@pytest.mark.parametrize("same_tokenizer", [True, False])
@pytest.mark.parametrize("bad", NUMBERS)
def test_hostile_bytes(
    tiny_policy_path: Path, make_training_group: Callable[..., Any], bad: float, same_tokenizer: bool
) -> None:
    """The same from the wire record on, where log-probabilities are raw bytes."""
    record = rollout([9, 7, 1], [-1.0, bad, -1.0], text="42", finish=FinishReason.STOP, reward=bad)
    group = make_training_group(seed=3, size=2)
    policy = Policy.open(tiny_policy_path)
    assert "log-probability" in refusal(group, policy, same_tokenizer=same_tokenizer, record=record)


def test_hostile_ids_on_the_wire(tiny_policy_path: Path, make_training_group: Callable[..., Any]) -> None:
    policy = Policy.open(tiny_policy_path)
    record = rollout([2**32 - 1] * 2, [-1.0, -1.0], text="", finish=FinishReason.LENGTH, reward=1.0)
    group = make_training_group(seed=3, size=2)
    assert "4294967295" in refusal(group, policy, same_tokenizer=True, record=record)
    # another tokenizer: the ids are not looked at, but an empty text has no tokens to learn from
    assert "0 tokens" in refusal(group, policy, same_tokenizer=False, record=record)
