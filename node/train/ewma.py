"""A moving average of the weights as proximal policy (PPO-EWMA).

    weights after each update --add--> average <--lent to the model-- logprobs(sequences)

theta_ewma = sum_i beta^(t-i) theta_i / sum_i beta^(t-i), i = 0..t: the exponentially weighted mean of all
weights since the start, already corrected for their finite number. The mean age of what is in it tends to
beta / (1 - beta) updates, 8 for the default. Source: arXiv 2110.00641, `openai/ppo-ewma` (EXACT; beta is
ours); as a stand-in for the policies that generated the data, arXiv 2605.12070, whose "revision" and beta are
not known (RECONSTRUCTED).

Memory: one float32 copy of what learns, in RAM if asked for, and while it computes one more of the largest
single tensor: weights and average change places in the model, tensor by tensor, and back again, bit for bit.
Of an adapter only its own tensors are averaged, A and B each for itself: their product is not the mean of the
products, but near it while they move little. Not kept in checkpoints: a resumed run starts a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.engine.base import TokenSequence
from protocol.errors import ConfigError, LocalProtocolError

__all__ = ["Ewma"]

Weights = Mapping[str, Tensor]
Logprobs = Callable[[Sequence[TokenSequence]], list[NDArray[np.float32]]]


class Ewma:
    """The average, beginning at `weights`, on `device` or where they lie. Raises ConfigError for a beta
    outside [0, 1), LocalProtocolError for weights that are not float32."""

    def __init__(
        self, weights: Weights, *, beta: float = 0.889, device: torch.device | str | None = None
    ) -> None:
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"train.ewma_beta is {beta:g}; it is at least 0 and below 1")
        wrong = [name for name, tensor in weights.items() if tensor.dtype is not torch.float32]
        if wrong:
            raise LocalProtocolError(f"{wrong[0]} is {weights[wrong[0]].dtype}; an average is of float32")
        self._beta = beta
        self._total = 1.0
        """Sum of the weights beta^(t-i)."""
        self._average = {name: _copy(tensor, device) for name, tensor in weights.items()}

    @property
    def nbytes(self) -> int:
        """Of the average."""
        return sum(tensor.nbytes for tensor in self._average.values())

    @torch.no_grad()
    def add(self, weights: Weights) -> None:
        """Count the weights that an update has made."""
        self._total = self._beta * self._total + 1.0
        for name, average in self._average.items():
            average.lerp_(weights[name].to(average.device), 1.0 / self._total)

    @torch.no_grad()
    def restart(self, weights: Weights) -> None:
        """Begin again at weights that no update of this training led to: merged, or rolled back."""
        self._total = 1.0
        for name, average in self._average.items():
            average.copy_(weights[name])

    def logprobs(
        self, sequences: Sequence[TokenSequence], weights: Callable[[], Weights], compute: Logprobs
    ) -> list[NDArray[np.float32]]:
        """log pi_ewma of each token. `weights()` are the tensors that learn, as they lie now, and `compute`
        uses whatever is in them (`Trainer.learning`, `Trainer.logprobs`); afterwards they are as before."""
        with self._lent(weights):
            return compute(sequences)

    @contextmanager
    def _lent(self, weights: Callable[[], Weights]) -> Iterator[None]:
        self._exchange(weights())
        try:
            yield
        finally:
            self._exchange(weights())

    @torch.no_grad()
    def _exchange(self, weights: Weights) -> None:
        for name, average in self._average.items():
            tensor = weights[name]
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)


def _copy(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return tensor.detach().to(device=tensor.device if device is None else device, copy=True)
