"""Item 22: NaN, Inf, 1e30, wrong lengths and tokens outside the vocabulary never reach the optimiser.

Each hostile group is put between honest ones; the whole batch is refused with a typed error that names the
group, and parameters and optimiser state are byte-identical before and after. The same step then works
without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.rollout.policy import Policy
from node.train.batch import collate
from node.train.groups import TrainingDataError, training_rollouts
from node.train.settings import TrainSettings, Treatment
from node.train.step import Trainer
from protocol.errors import RemoteProtocolError
from protocol.messages import FinishReason
from protocol.rollouts import single_turn

SETTINGS = TrainSettings()
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


def snapshot(trainer: Trainer) -> dict[str, bytes]:
    found = {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}
    for place, entries in enumerate(trainer.optimiser.state.values()):
        found |= {f"{place}.{name}": value.numpy().tobytes() for name, value in entries.items()}
    return found


def test_refused_before_the_optimiser(
    tiny_policy_path: Path, make_training_group: Callable[..., Any]
) -> None:
    policy = Policy.open(tiny_policy_path)
    trainer = Trainer(policy, SETTINGS)
    honest = [make_training_group(seed=1), make_training_group("other", seed=2)]
    trainer.step(collate(honest, SETTINGS, policy))
    before = snapshot(trainer)
    tried = 0
    for name, hostile in hostile_groups(make_training_group):
        with pytest.raises(TrainingDataError, match="group group3") as caught:
            trainer.step(collate([honest[0], hostile, honest[1]], SETTINGS, policy))
        assert isinstance(caught.value, RemoteProtocolError), name
        assert caught.value.group == "group3", name
        assert caught.value.reason == "training_data"
        tried += 1
    assert tried >= 60
    assert snapshot(trainer) == before
    assert not trainer.step(collate(honest, SETTINGS, policy)).skipped
    assert snapshot(trainer) != before


@pytest.mark.parametrize("same_tokenizer", [True, False])
@pytest.mark.parametrize("bad", NUMBERS)
def test_hostile_bytes(
    tiny_policy_path: Path, make_training_group: Callable[..., Any], bad: float, same_tokenizer: bool
) -> None:
    """The same from the wire record on, where log-probabilities are raw bytes."""
    policy = Policy.open(tiny_policy_path)
    record = single_turn(
        text="42",
        token_ids=np.asarray([9, 7, 1], "<u4").tobytes(),
        logprobs=np.asarray([-1.0, bad, -1.0], "<f4").tobytes(),
        versions=np.zeros(3, "<u4").tobytes(),
        finish=FinishReason.STOP,
        reward=bad,
        seed=0,
    )
    group = make_training_group("peer", seed=3, size=2)
    rollouts = training_rollouts(group.group, [record, record], policy, same_tokenizer=same_tokenizer)
    with pytest.raises(TrainingDataError, match="group group3"):
        collate([dataclasses.replace(group, rollouts=rollouts)], SETTINGS, policy)


def test_hostile_ids_on_the_wire(tiny_policy_path: Path, make_training_group: Callable[..., Any]) -> None:
    policy = Policy.open(tiny_policy_path)
    record = single_turn(
        text="",
        token_ids=b"\xff" * 8,
        logprobs=np.asarray([-1.0, -1.0], "<f4").tobytes(),
        versions=b"\xff" * 8,
        finish=FinishReason.LENGTH,
        reward=1.0,
        seed=0,
    )
    group = make_training_group("peer", seed=3, size=1)
    rollouts = training_rollouts(group.group, [record], policy, same_tokenizer=True)
    with pytest.raises(TrainingDataError, match="4294967295"):
        collate([dataclasses.replace(group, rollouts=rollouts)], SETTINGS, policy)
    # another tokenizer: the ids are not looked at, but an empty text has no tokens to learn from
    rollouts = training_rollouts(group.group, [record], policy, same_tokenizer=False)
    with pytest.raises(TrainingDataError, match="0 tokens"):
        collate([dataclasses.replace(group, rollouts=rollouts)], SETTINGS, policy)
