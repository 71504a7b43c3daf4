"""The moving average: its numbers by hand, its loan to the model, its memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.ewma import Ewma
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import collate
from protocol.errors import ConfigError, LocalProtocolError
from tests.node.train.tolerance import near

SETTINGS = TrainSettings(measure_start_kl=False)
SEQUENCES = [TokenSequence((2, 7, 9, 3), (5, 6, 7, 8)), TokenSequence((2, 3), (40, 41), temperature=0.5)]
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")


def of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value])}


def average(ewma: Ewma) -> float:
    """What the model would compute with."""
    weights = of(100.0)
    found: list[float] = []

    def compute(_: object) -> list[Any]:
        found.append(float(weights["w"]))
        return []

    ewma.logprobs([], lambda: weights, compute)
    assert float(weights["w"]) == 100.0
    return found[0]


def test_average_of_few_weights_is_corrected_for_their_number() -> None:
    """beta 0.5: 1; (0.5 x 1 + 2) / 1.5 = 5/3; (0.25 x 1 + 0.5 x 2 + 4) / 1.75 = 3."""
    ewma = Ewma(of(1.0), beta=0.5)
    assert average(ewma) == 1.0
    ewma.add(of(2.0))
    assert average(ewma) == pytest.approx(5 / 3)
    ewma.add(of(4.0))
    assert average(ewma) == pytest.approx(3.0)


def test_without_memory_it_is_the_newest_and_a_restart_forgets() -> None:
    ewma = Ewma(of(1.0), beta=0.0)
    ewma.add(of(2.0))
    assert average(ewma) == 2.0
    slow = Ewma(of(1.0), beta=0.9)
    slow.add(of(2.0))
    slow.restart(of(7.0))
    assert average(slow) == 7.0
    slow.add(of(9.0))  # (0.9 x 7 + 9) / 1.9
    assert average(slow) == pytest.approx(15.3 / 1.9)


def test_after_many_updates_it_is_as_old_as_beta_says() -> None:
    """On weights that count updates, the newest is 400 and the mean age 0.8 / 0.2 = 4."""
    ewma = Ewma(of(0.0), beta=0.8)
    for update in range(1, 401):
        ewma.add(of(float(update)))
    assert average(ewma) == pytest.approx(396.0, abs=1e-2)


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_what_is_no_beta_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.ewma_beta"):
        Ewma(of(1.0), beta=beta)


def test_only_float32_is_averaged() -> None:
    with pytest.raises(LocalProtocolError, match=r"w is torch\.bfloat16"):
        Ewma({"w": torch.zeros(1, dtype=torch.bfloat16)})


def test_logprobs_are_those_of_a_model_with_the_average(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    trainer, other = Trainer(policy, SETTINGS), Trainer(policy, SETTINGS)
    batch = collate([make_training_group(seed=1)], SETTINGS.weight, policy)
    ewma = Ewma(trainer.learning(), beta=0.5)
    seen = [trainer.state_dict()]
    for _ in range(2):
        trainer.step(batch)
        ewma.add(trainer.learning())
        seen.append(trainer.state_dict())
    other.take({name: (seen[0][name] + 2 * seen[1][name] + 4 * seen[2][name]) / 7 for name in seen[0]}, 0)
    found = ewma.logprobs(SEQUENCES, trainer.learning, trainer.logprobs)
    expected, own = other.logprobs(SEQUENCES), trainer.logprobs(SEQUENCES)
    for one, there, newest in zip(found, expected, own, strict=True):
        assert one == near(there, policy)
        assert not np.allclose(one, newest, atol=1e-3)
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in trainer.state_dict().items())
    assert ewma.nbytes == sum(tensor.nbytes for tensor in trainer.learning().values())


def test_an_error_while_it_is_lent_leaves_both_as_they_were() -> None:
    weights, ewma = of(5.0), Ewma(of(1.0))

    def broken(_: object) -> list[Any]:
        raise RuntimeError("out of everything")

    with pytest.raises(RuntimeError, match="out of everything"):
        ewma.logprobs([], lambda: weights, broken)
    assert float(weights["w"]) == 5.0
    assert average(ewma) == 1.0


def test_weights_that_move_meanwhile_get_back_what_was_theirs() -> None:
    """As those of a trainer that leaves the device to the engine do."""
    lies = {"at": of(5.0)}
    ewma = Ewma(of(1.0))

    def moving(_: object) -> list[Any]:
        lies["at"] = {"w": lies["at"]["w"].clone()}
        return []

    ewma.logprobs([], lambda: lies["at"], moving)
    assert float(lies["at"]["w"]) == 5.0
    assert average(ewma) == 1.0


@pytest.mark.slow
@needs_peft
def test_of_an_adapter_only_its_own_tensors_are_averaged(
    policy: Policy, make_training_group: Callable[..., Any]
) -> None:
    settings = TrainSettings(adapter=AdapterSpec(rank=2, alpha=4.0), learning_rate=1e-2)
    trainer = Trainer(policy, settings)
    batch = collate([make_training_group(seed=1)], settings.weight, policy)
    ewma = Ewma(trainer.learning(), beta=0.5)
    assert ewma.nbytes == sum(tensor.nbytes for tensor in trainer.state_dict().values())
    start = trainer.logprobs(SEQUENCES)
    trainer.step(batch)
    ewma.add(trainer.learning())
    ended = trainer.logprobs(SEQUENCES)
    found = ewma.logprobs(SEQUENCES, trainer.learning, trainer.logprobs)
    assert not np.allclose(found[0], start[0], atol=1e-5)
    assert not np.allclose(found[0], ended[0], atol=1e-5)
    assert np.array_equal(trainer.logprobs(SEQUENCES)[0], ended[0])
