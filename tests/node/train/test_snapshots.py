"""Snapshots: exact log pi_old of rollouts of one and of several versions, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.settings import TrainSettings
from node.train.snapshots import Snapshots
from node.train.step import Trainer
from node.weight.batch import collate
from protocol.errors import ConfigError, LocalProtocolError
from tests.node.train.tolerance import near

ROOM = 1 << 30
SETTINGS = TrainSettings(measure_start_kl=False, micro_batch_tokens=1)
"""Every row by itself, so that its numbers do not depend on its company."""
SEQUENCES = [
    TokenSequence((2, 7, 9, 3), (5, 6, 7, 8, 9, 10)),
    TokenSequence((2, 3), (40, 41, 42), temperature=0.5),
    TokenSequence((2, 20, 3), (30, 31, 32, 33)),
]
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")


def versions(*rows: Sequence[int]) -> list[NDArray[np.integer]]:
    return [np.array(row, np.uint32) for row in rows]


@dataclass
class Counter:
    """Weights of one number, and a model whose log pi is that number, with what it was asked for."""

    weights: dict[str, torch.Tensor]
    asked: list[list[int]]
    """Lengths of the sequences of every call."""

    @classmethod
    def at(cls, value: float) -> Counter:
        return cls({"w": torch.tensor([value])}, [])

    def compute(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        self.asked.append([len(sequence.token_ids) for sequence in sequences])
        return [np.full(len(each.token_ids), float(self.weights["w"]), np.float32) for each in sequences]


def counted(held: int, last: int, max_bytes: int = ROOM) -> tuple[Snapshots, Counter]:
    """Version v has the weight v / 10; versions 0 to `last` were made."""
    snapshots, counter = Snapshots(versions=held, max_bytes=max_bytes), Counter.at(0.0)
    snapshots.keep(0, counter.weights)
    for version in range(1, last + 1):
        counter.weights["w"].fill_(version / 10)
        snapshots.keep(version, counter.weights)
    return snapshots, counter


def ask(snapshots: Snapshots, counter: Counter, *rows: Sequence[int]) -> tuple[list[Any], list[Any]]:
    sequences = [TokenSequence((2,), tuple(range(len(row)))) for row in rows]
    found = snapshots.logprobs(sequences, versions(*rows), lambda: counter.weights, counter.compute)
    return [row.tolist() for row in found.logprobs], [row.tolist() for row in found.exact]


def test_each_token_gets_the_version_that_generated_it() -> None:
    snapshots, counter = counted(held=5, last=4)
    logprobs, exact = ask(snapshots, counter, (4, 4), (1, 1, 3), (3,))
    assert logprobs == [pytest.approx([0.4, 0.4]), pytest.approx([0.1, 0.1, 0.3]), pytest.approx([0.3])]
    assert exact == [[True, True], [True, True, True], [True]]
    assert float(counter.weights["w"]) == np.float32(0.4)


def test_a_pass_is_made_for_each_version_and_only_as_far_as_its_tokens_go() -> None:
    snapshots, counter = counted(held=5, last=4)
    ask(snapshots, counter, (4, 4), (1, 1, 3, 3), (3,), (1, 1))
    assert counter.asked == [[2], [4, 1], [2, 2]]


def test_what_is_no_longer_kept_gets_the_nearest_and_says_so() -> None:
    """Of versions 0 to 6 the last 3 are kept: 6, 5, 4."""
    snapshots, counter = counted(held=3, last=6)
    assert snapshots.held == (6, 5, 4)
    logprobs, exact = ask(snapshots, counter, (1, 4, 5), (9, 6))
    assert logprobs == [pytest.approx([0.4, 0.4, 0.5]), pytest.approx([0.6, 0.6])]
    assert exact == [[False, True, True], [False, True]]


def test_a_version_that_never_was_gets_the_one_before() -> None:
    """Merged weights that were probed as version 2 and not adopted: the trainer went on as 3."""
    snapshots, counter = Snapshots(versions=4, max_bytes=ROOM), Counter.at(1.0)
    snapshots.keep(1, counter.weights)
    snapshots.keep(3, counter.weights)
    counter.weights["w"].fill_(4.0)
    snapshots.keep(4, counter.weights)
    assert ask(snapshots, counter, (1, 2, 3, 4)) == ([[1.0, 1.0, 1.0, 4.0]], [[True, False, True, True]])


def test_one_version_is_the_newest() -> None:
    snapshots, counter = counted(held=1, last=3)
    assert snapshots.held == (3,)
    assert ask(snapshots, counter, (3, 2))[1] == [[True, False]]


def test_bytes_are_bounded_and_the_oldest_goes_first() -> None:
    """A copy is 4,000 bytes; steps of 100 units in the last place are 2,000 each."""
    weights = {"w": torch.full((1000,), 0.5)}
    snapshots = Snapshots(versions=10, max_bytes=9_000)
    for version in range(6):
        weights["w"].view(torch.int32).add_(100)
        snapshots.keep(version, weights)
        assert snapshots.nbytes == 4_000 + 2_000 * min(version, 2)
    assert snapshots.held == (5, 4, 3)


def test_less_than_one_copy_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.snapshot_bytes is 10 and one copy of the weights takes 4000"
    ):
        Snapshots(versions=2, max_bytes=10).keep(0, {"w": torch.zeros(1000)})
    with pytest.raises(ConfigError, match=r"train\.snapshots is 0"):
        Snapshots(versions=0, max_bytes=10)


def test_no_version_comes_twice_and_every_token_needs_one() -> None:
    snapshots, counter = counted(held=3, last=2)
    with pytest.raises(LocalProtocolError, match="version 2 follows 2"):
        snapshots.keep(2, counter.weights)
    sequences = [TokenSequence((2,), (5, 6))]
    with pytest.raises(LocalProtocolError, match="one version for each token"):
        snapshots.logprobs(sequences, versions((1,)), lambda: counter.weights, counter.compute)


def test_an_error_on_the_way_brings_the_weights_back() -> None:
    snapshots, counter = counted(held=5, last=4)

    def broken(_: object) -> list[NDArray[np.float32]]:
        assert float(counter.weights["w"]) == pytest.approx(0.1)
        raise RuntimeError("out of everything")

    with pytest.raises(RuntimeError, match="out of everything"):
        snapshots.logprobs([SEQUENCES[1]], versions((1, 1, 1)), lambda: counter.weights, broken)
    assert float(counter.weights["w"]) == np.float32(0.4)


def trained(
    policy: Policy, settings: TrainSettings, make: Callable[..., Any], steps: int = 3
) -> tuple[Trainer, Snapshots, list[list[NDArray[np.float32]]]]:
    """A trainer, its snapshots, and log pi of SEQUENCES at each of its versions."""
    trainer = Trainer(policy, settings)
    snapshots = Snapshots(versions=steps + 1, max_bytes=ROOM)
    snapshots.keep(0, trainer.learning())
    seen = [trainer.logprobs(SEQUENCES)]
    batch = collate([make(seed=1)], settings.weight, policy)
    for _ in range(steps):
        trainer.step(batch)
        snapshots.keep(trainer.policy_version, trainer.learning())
        seen.append(trainer.logprobs(SEQUENCES))
    return trainer, snapshots, seen


def test_log_probabilities_are_the_trainers_own_to_the_last_bit(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    trainer, snapshots, seen = trained(policy, SETTINGS, make_training_group)
    before = {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}
    for version, expected in enumerate(seen):
        asked = [np.full(len(each.token_ids), version) for each in SEQUENCES]
        found = snapshots.logprobs(SEQUENCES, asked, trainer.learning, trainer.logprobs)
        for one, there in zip(found.logprobs, expected, strict=True):
            assert one.tobytes() == there.tobytes()
    assert {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()} == before


def test_a_rollout_of_several_versions_is_joined_of_their_parts(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    trainer, snapshots, seen = trained(policy, SETTINGS, make_training_group)
    asked = versions((0, 0, 1, 1, 3, 3), (2, 2, 2), (1, 2, 2, 2))
    found = snapshots.logprobs(SEQUENCES, asked, trainer.learning, trainer.logprobs)
    expected = [
        np.concatenate([seen[0][0][:2], seen[1][0][2:4], seen[3][0][4:]]),
        seen[2][1],
        np.concatenate([seen[1][2][:1], seen[2][2][1:]]),
    ]
    for one, there in zip(found.logprobs, expected, strict=True):
        assert one == near(there, policy)
    assert not np.allclose(found.logprobs[0], seen[3][0], atol=1e-4)


@pytest.mark.slow
@needs_peft
def test_of_an_adapter_only_its_own_tensors_are_kept(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    settings = TrainSettings(adapter=AdapterSpec(rank=2, alpha=4.0), learning_rate=1e-2, micro_batch_tokens=1)
    trainer, snapshots, seen = trained(policy, settings, make_training_group)
    asked = [np.full(len(each.token_ids), 1) for each in SEQUENCES]
    found = snapshots.logprobs(SEQUENCES, asked, trainer.learning, trainer.logprobs)
    for one, there in zip(found.logprobs, seen[1], strict=True):
        assert one.tobytes() == there.tobytes()
    copy = sum(tensor.nbytes for tensor in trainer.state_dict().values())
    assert copy < snapshots.nbytes <= 4 * copy
