"""What a generation engine is: the one interface behind `transformers` here and `vllm` on GPUs.

For: turning prompts into rollouts with per-token log-probabilities and versions, scoring given tokens under
the current weights, and taking new weights in place. A `Generation` holds groups in flight; `generate` is one
that is waited out. Calls block; callers run them on a worker thread. An engine owns its copy of the weights,
so version v generates while the trainer makes v + 1. Not for: prompts, rewards, or deciding what to generate.
Data: `GenerationRequest` in, `protocol.messages.Rollout` out, reward 0.0 until scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.errors import OurFault
from protocol.messages import FinishReason, Rollout, Sampling
from protocol.rollouts import single_turn

if TYPE_CHECKING:
    import torch

    from node.rollout.policy import Policy

__all__ = [
    "BrokenWeightsError",
    "Engine",
    "EngineError",
    "Generation",
    "GenerationRequest",
    "Prefix",
    "TokenSequence",
    "check_request",
    "check_sequences",
    "check_tokens",
    "finished_rollout",
]


class EngineError(OurFault):
    """The engine cannot do what was asked: broken weights, a prompt that does not fit, or it is closed."""


class BrokenWeightsError(EngineError):
    """Weights whose logits are no numbers, though they may be finite themselves."""

    def __init__(self, policy_version: int) -> None:
        super().__init__(
            f"version {policy_version} gives logits that are NaN or infinite; load an earlier checkpoint"
        )


@dataclass(frozen=True)
class Prefix:
    """What a rollout already has; one entry per token in each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, of the distribution that each token was sampled from."""
    versions: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """worker -> engine. `n` rollouts of one prompt; rollout i uses row i of the draws that `seed` gives."""

    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    sampling: Sampling
    prefixes: tuple[Prefix, ...] = ()
    """None, or one for each rollout, which goes on behind it. Its tokens belong to the rollout and count
    towards `max_new_tokens`; one that has its end token, or is full, is complete at once."""
    min_new_tokens: int = 0
    """The end token is impossible before so many tokens; for workloads of given lengths."""


@dataclass(frozen=True)
class TokenSequence:
    """verify -> engine. A prompt and the tokens to be scored after it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float = 1.0


class Generation(ABC):
    """Groups in flight on one engine, made by `Engine.open`. One thread at a time calls it; an engine may go
    on between calls."""

    sampled: int
    """Tokens sampled so far, prefixes not counted."""

    @abstractmethod
    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Put groups in flight and return their tickets, ascending. Does not wait: what exceeds the engine's
        room queues inside. Raises EngineError for a request that cannot fit, and then has started none."""

    @abstractmethod
    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        """Until at least one group is complete; all complete ones, in the order of their tickets.

        With `tokens`, returns (perhaps nothing) also once about that many more were sampled, and nothing is
        sampled until the next call. With nothing in flight returns at once. Raises EngineError.
        """

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rollouts that are not complete."""

    @abstractmethod
    def close(self) -> None:
        """Drop what is in flight. May be called twice, and while another thread waits: that `wait` ends
        soon, with what is complete."""


class Engine(ABC):
    """Generates, scores, takes new weights. Safe to call from several threads."""

    name: str
    """Goes into `RolloutGroup.engine`."""
    dtype: str
    """Goes into `RolloutGroup.dtype`."""
    probe_each: bool = False
    """Weights lie in another process, packed: whether they are the trainer's is probed after each update."""
    context: int = 2**31 - 1
    """Tokens of prompt and answer together that it takes; more are an EngineError."""
    policy_version: int
    """Version of the weights that produce the next token."""

    @abstractmethod
    def open(self, *, greedy: bool = False) -> Generation:
        """A new, empty generation. `greedy` takes the likeliest token, for evaluation."""

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[list[Rollout]]:
        """Per request its `n` rollouts, when all are complete. Raises EngineError."""
        generation = self.open(greedy=greedy)
        try:
            tickets = generation.start(requests)
            done: dict[int, list[Rollout]] = {}
            while generation.in_flight or len(done) < len(tickets):
                done.update(generation.wait())
            return [done[ticket] for ticket in tickets]
        finally:
            generation.close()

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

    def sleep(self) -> None:
        """Give the device's memory to others until `wake`. Rollouts in flight keep their tokens."""
        self.pause()

    def wake(self) -> None:
        """Take the memory back and go on."""
        self.resume()

    @abstractmethod
    def close(self) -> None:
        """Release the weights; a running generation ends with EngineError. May be called twice."""


def finished_rollout(
    policy: Policy, seed: int, token_ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike
) -> Rollout:
    """The record of at least one token, with its log-probability and version each; it ended by itself if the
    last one is an end token."""
    ids_T = np.asarray(token_ids, "<u4")
    return single_turn(
        policy.decode(ids_T.tolist()),
        token_ids=ids_T.tobytes(),
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        versions=np.asarray(versions, "<u4").tobytes(),
        finish=FinishReason.STOP if ids_T[-1] in policy.end_token_ids else FinishReason.LENGTH,
        seed=seed,
    )


def check_request(request: GenerationRequest, vocab_size: int, context: int) -> None:
    """Raise EngineError for a request that no engine with such a policy and context can do."""
    limit, prefixes = request.sampling.max_new_tokens, request.prefixes
    check_tokens(request.prompt_ids, limit, vocab_size, context)
    if request.n < 1:
        raise EngineError(f"a generation request asks for {request.n} rollouts; ask for at least 1")
    if prefixes and len(prefixes) != request.n:
        raise EngineError(f"{len(prefixes)} prefixes for {request.n} rollouts; give none or one for each")
    for prefix in prefixes:
        length = len(prefix.token_ids)
        if not length == len(prefix.logprobs) == len(prefix.versions) <= limit:
            raise EngineError(
                f"a prefix has {length} tokens, {len(prefix.logprobs)} log-probabilities and "
                f"{len(prefix.versions)} versions; it needs as many of each, and at most {limit}"
            )
        check_tokens(request.prompt_ids + prefix.token_ids, 0, vocab_size, context)


def check_sequences(sequences: Sequence[TokenSequence], vocab_size: int, context: int) -> None:
    """Raise EngineError when an engine with such a policy and context cannot score one of them."""
    for sequence in sequences:
        check_tokens(sequence.prompt_ids, 0, vocab_size, context)
        check_tokens(sequence.prompt_ids + sequence.token_ids, 0, vocab_size, context)


def check_tokens(token_ids: tuple[int, ...], more: int, vocab_size: int, context: int) -> None:
    """Raise EngineError when an engine cannot take these tokens and `more` new ones."""
    if not token_ids:
        raise EngineError("a prompt is empty; a policy needs at least one token to begin with")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise EngineError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    if len(token_ids) + more > context:
        raise EngineError(
            f"{len(token_ids)} tokens plus {more} new ones exceed the {context} positions of this engine; "
            "lower max_new_tokens"
        )
