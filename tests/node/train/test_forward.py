"""Log-probabilities of chosen tokens: against a whole log-softmax, whatever the pieces, and what is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from node.train import forward
from node.train.forward import completion_logprobs, packed
from tests.node.train.tolerance import rounding

VOCABULARY = 11


class Table(torch.nn.Module):
    """A model whose logits for what follows a position are parameters of that position, of any type."""

    def __init__(self, rows: int, length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.randn(rows, length, VOCABULARY, generator=torch.Generator().manual_seed(7))
        self.logits = torch.nn.Parameter((3 * values).to(dtype))

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        assert input_ids.shape == self.logits.shape[:2]
        return type("Output", (), {"logits": self.logits[:, -logits_to_keep:] * 1.0})


STARTS_B = torch.tensor([2, 4])
MASK_BT = torch.tensor([[True, True, True], [True, False, False]])
TEMPERATURE_B = torch.tensor([0.5, 2.0])
LIMIT = rounding(VOCABULARY, 8.0)
"""Of a softmax over logits that reach 8 after the temperature."""
TOKENS_BL = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])


def whole(model: Table) -> tuple[Tensor, Tensor]:
    """Token by token, from a log-softmax over everything: what precedes a token predicts it."""
    logprobs_BT, entropy_BT = torch.zeros(2, 3), torch.zeros(2, 3)
    for row, place in MASK_BT.nonzero().tolist():
        at = int(STARTS_B[row]) + place
        logprobs_V = torch.log_softmax(model.logits[row, at - 1].float() / TEMPERATURE_B[row], -1)
        logprobs_BT[row, place] = logprobs_V[TOKENS_BL[row, at]]
        entropy_BT[row, place] = -(logprobs_V.exp() * logprobs_V).sum().detach()
    return logprobs_BT, entropy_BT


@pytest.fixture(params=[1, 2 * VOCABULARY, 2**20], ids=["token by token", "by twos", "at once"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK_VALUES", request.param)


@pytest.mark.usefixtures("pieces")
def test_numbers_and_gradients_are_those_of_a_whole_log_softmax() -> None:
    ours, theirs = Table(2, 5), Table(2, 5)
    weights_BT = torch.tensor([[0.5, -1.0, 2.0], [3.0, 70.0, 70.0]])
    logprobs_BT, entropy_BT = completion_logprobs(ours, TOKENS_BL, STARTS_B, MASK_BT, TEMPERATURE_B)
    expected_BT, entropies_BT = whole(theirs)
    assert logprobs_BT.detach() == pytest.approx(expected_BT.detach(), abs=LIMIT)
    assert entropy_BT == pytest.approx(entropies_BT, abs=LIMIT)
    assert logprobs_BT[1, 1:].tolist() == [0.0, 0.0]
    assert not entropy_BT.requires_grad
    torch.autograd.backward((weights_BT * logprobs_BT).sum())
    torch.autograd.backward((weights_BT * expected_BT).sum())
    assert ours.logits.grad is not None
    assert theirs.logits.grad is not None
    assert ours.logits.grad == pytest.approx(
        theirs.logits.grad, abs=4 * LIMIT
    )  # a temperature of 0.5, weights of up to 3


def test_two_tokens_by_hand() -> None:
    """Logits 0 and log 3 at temperature 1: 1/4 and 3/4; entropy 1/4 log 4 + 3/4 log 4/3 = 0.562335 nats."""
    model = Table(1, 3)
    with torch.no_grad():
        model.logits.fill_(-1e4)
        model.logits[0, 1, :2] = torch.tensor([0.0, 3.0]).clamp(min=1.0).log()
    logprobs_BT, entropy_BT = completion_logprobs(
        model,
        torch.tensor([[5, 5, 1]]),
        torch.tensor([2]),
        torch.tensor([[True]]),
        torch.tensor([1.0]),
    )
    assert logprobs_BT.item() == pytest.approx(math.log(3 / 4), abs=LIMIT)
    assert entropy_BT.item() == pytest.approx(math.log(4) / 4 + 3 / 4 * math.log(4 / 3), abs=LIMIT)
    torch.autograd.backward(logprobs_BT.sum())
    assert model.logits.grad is not None
    assert model.logits.grad[0, 1, :3].tolist() == pytest.approx([-0.25, 0.25, 0.0])
    assert model.logits.grad[0, 0].tolist() == [0.0] * VOCABULARY


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_kept_once_and_in_their_own_type(dtype: torch.dtype) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    model = Table(2, 5, dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_BT, _ = completion_logprobs(model, TOKENS_BL, STARTS_B, MASK_BT, TEMPERATURE_B)
    large = [tensor for tensor in kept if tensor.numel() >= 5 * VOCABULARY]
    assert [tensor.dtype for tensor in large] == [dtype]
    assert logprobs_BT.dtype == torch.float32
    torch.autograd.backward(logprobs_BT.sum())
    assert model.logits.grad is not None
    assert model.logits.grad.dtype == dtype


def test_without_any_token_there_is_nothing_to_learn() -> None:
    model = Table(2, 5)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    logprobs_BT, entropy_BT = completion_logprobs(model, TOKENS_BL, STARTS_B, nothing, TEMPERATURE_B)
    torch.autograd.backward(logprobs_BT.sum())
    assert logprobs_BT.tolist() == entropy_BT.tolist() == [[0.0] * 3] * 2
    assert model.logits.grad is not None
    assert not model.logits.grad.any()


def test_rows_are_packed_long_ones_together() -> None:
    assert list(packed([5, 1, 9, 2], 10)) == [[2], [0, 3], [1]]
    assert list(packed([30, 30], 10)) == [[0], [1]]
    assert list(packed([], 10)) == []
