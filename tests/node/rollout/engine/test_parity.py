"""The probe after an update, on engines that are right, wrong once, and wrong for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.rollout.engine.base import Engine, Generation, TokenSequence
from node.rollout.engine.parity import ParityError, ParityProbe, parity, probe_sequences

SEQUENCES = (TokenSequence((1, 2), (3, 4)), TokenSequence((1,), (5,)))
REFERENCE = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]


class Fake(Engine):
    """Its log-probabilities are off by `errors`, one per loading of weights."""

    name = "fake"
    dtype = "float32"

    def __init__(self, *errors: float) -> None:
        self.errors = list(errors)
        self.error = 0.0
        self.loads: list[str] = []

    @property
    def policy_version(self) -> int:
        return 4

    def open(self, *, greedy: bool = False) -> Generation:
        raise NotImplementedError

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return [reference + np.float32(self.error) for reference in REFERENCE]

    def update(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self.error = self.errors.pop(0)
        self.loads.append("update")

    def reload(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self.error = self.errors.pop(0)
        self.loads.append("reload")

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


PROBE = ParityProbe(SEQUENCES, tolerance=0.01)


def test_a_right_engine_passes() -> None:
    engine = Fake(0.005)
    apart, reloaded = PROBE.update(engine, {}, 4, REFERENCE)
    assert apart == pytest.approx(0.005, rel=1e-3)
    assert not reloaded
    assert engine.loads == ["update"]


@pytest.mark.parametrize("wrong", [0.02, -0.02, float("nan"), float("-inf")])
def test_a_failure_loads_everything(wrong: float) -> None:
    engine = Fake(wrong, 0.0)
    assert PROBE.update(engine, {}, 4, REFERENCE) == (0.0, True)
    assert engine.loads == ["update", "reload"]


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_second_failure_is_an_error(wrong: float) -> None:
    with pytest.raises(ParityError, match=r"fake engine at version 4 differs .* at most 0\.01"):
        PROBE.update(Fake(wrong, wrong), {}, 4, REFERENCE)


@pytest.mark.parametrize(
    ("gaps", "passes"),
    [
        ([0.009, 0.009, 0.009], True),
        ([0.011, 0.011, 0.011], False),
        ([0.0, 0.0, 0.029], True),  # the mean is 0.0097, the .99 quantile 0.0284: a fifth of it is 0.0057
        ([0.0, 0.0, 0.031], False),
    ],
)
def test_the_mean_decides(gaps: list[float], passes: bool) -> None:
    off = [REFERENCE[0] + np.float32(gaps[:2]), REFERENCE[1] + np.float32(gaps[2:])]
    if passes:
        PROBE.check(Fake(), off)
    else:
        with pytest.raises(ParityError):
            PROBE.check(Fake(), off)


def test_one_token_in_fifty_that_is_far_off_is_found() -> None:
    """One row of a layer that went wrong: the mean is 0.004, a fifth of the quantile is not."""
    sequences = (TokenSequence((1,), tuple(range(50))),)

    class Long(Fake):
        def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
            return [np.zeros(50, np.float32)]

    off = np.zeros(50, np.float32)
    off[7] = 0.2
    with pytest.raises(ParityError, match=r"by 0\.02"):
        ParityProbe(sequences, tolerance=0.01).check(Long(), [off])
    off[7] = 0.05
    ParityProbe(sequences, tolerance=0.01).check(Long(), [off])


def test_lengths_must_agree() -> None:
    assert parity(Fake(), [REFERENCE[1], REFERENCE[1]], SEQUENCES) == float("inf")
    with pytest.raises(ValueError, match="zip"):
        parity(Fake(), REFERENCE[:1], SEQUENCES)


def test_probe_tokens_are_fixed() -> None:
    one, other = probe_sequences([[1, 2], [3]], 50), probe_sequences([[1, 2], [3]], 50)
    assert one == other
    assert [len(sequence.token_ids) for sequence in one] == [24, 24]
    assert all(0 <= token < 50 for sequence in one for token in sequence.token_ids)
