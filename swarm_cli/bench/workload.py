"""What is generated in the rollout benches: prompts, lengths with a long tail, and groups of rollouts.

For: workloads that are the same for both sides of a comparison and in every run: all of it is drawn from
seeds. Lengths are given, not left to the model: a request's smallest and largest number of tokens are equal.
Rollouts of one group have lengths of their own, so each is a request with n = 1. Not for: running them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from node.rollout.engine.base import GenerationRequest
from node.rollout.policy import Policy
from protocol.messages import Sampling

__all__ = ["Group", "LongTail", "groups", "prompt", "rollout"]


@dataclass(frozen=True)
class LongTail:
    """Log-normal lengths in tokens."""

    median: int
    sigma: float = 1.0
    cap: int = 8
    """The longest, as a multiple of the median."""

    def draw(self, count: int, seed: int) -> list[int]:
        """`count` lengths between 1 and `cap` medians."""
        normal = np.random.default_rng(seed).standard_normal(count)
        lengths = np.rint(self.median * np.exp(self.sigma * normal))
        return [int(length) for length in lengths.clip(1, self.cap * self.median)]


@dataclass(frozen=True)
class Group:
    """Rollouts of one prompt."""

    prompt_ids: tuple[int, ...]
    lengths: tuple[int, ...]

    def requests(self) -> list[GenerationRequest]:
        return [rollout(self.prompt_ids, length) for length in self.lengths]


def rollout(prompt_ids: tuple[int, ...], length: int, *, n: int = 1) -> GenerationRequest:
    """`n` rollouts of exactly so many tokens."""
    return GenerationRequest(prompt_ids, n, 0, Sampling(max_new_tokens=length), min_new_tokens=length)


def prompt(policy: Policy, place: int) -> tuple[int, ...]:
    """The `place`-th prompt; unlike all others, so that no cache knows it."""
    return tuple(policy.encode_prompt(f"{place} + {place % 7 + 1}"))


def groups(policy: Policy, lengths: LongTail, size: int, first: int) -> Iterator[Group]:
    """Endless; `first` numbers the first prompt and seeds the lengths."""
    while True:
        yield Group(prompt(policy, first), tuple(lengths.draw(size, first)))
        first += 1
