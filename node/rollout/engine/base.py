"""What a generation engine is: the one interface behind `transformers` here and `vllm` on GPUs.

For: turning prompts into rollouts with per-token log-probabilities and versions, scoring given tokens under
the current weights, and taking new weights in place. All calls block; callers run them on a worker thread. An
engine owns its copy of the weights, so version v generates while the trainer makes v + 1. Not for: prompts,
rewards, or deciding what to generate. Data: `GenerationRequest` in, `protocol.messages.Rollout` out, reward
0.0 until scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.errors import OurFault
from protocol.messages import Rollout, Sampling

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "EngineError", "GenerationRequest", "TokenSequence"]


class EngineError(OurFault):
    """The engine cannot do what was asked: broken weights, a prompt that does not fit, or it is closed."""


@dataclass(frozen=True)
class GenerationRequest:
    """worker -> engine. `n` rollouts of one prompt; rollout i uses row i of the draws that `seed` gives."""

    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    sampling: Sampling


@dataclass(frozen=True)
class TokenSequence:
    """verify -> engine. A prompt and the tokens to be scored after it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float = 1.0


class Engine(ABC):
    """Generates, scores, takes new weights. Safe to call from several threads."""

    name: str
    """Goes into `RolloutGroup.engine`."""
    dtype: str
    """Goes into `RolloutGroup.dtype`."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the weights that produce the next token."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[list[Rollout]]:
        """Per request its `n` rollouts. `greedy` takes the likeliest token, for evaluation. Raises
        EngineError."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Per sequence the log-probability of each of its `token_ids` at its temperature, in nats."""

    @abstractmethod
    def update(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy weights in place between two tokens; running generations go on with them.

        Raises EngineError when they do not fit.
        """

    def reload(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy all weights, believing nothing about those that are there. Raises EngineError."""
        self.update(state, policy_version)

    @abstractmethod
    def pause(self) -> None:
        """Make generation wait before its next token until `resume`. Returns when no pass is running."""

    @abstractmethod
    def resume(self) -> None:
        """Let generation go on."""

    @abstractmethod
    def close(self) -> None:
        """Release the weights; a running generation ends with EngineError. May be called twice."""
