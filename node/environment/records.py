"""What goes into an environment and comes out of it, and what an environment is.

Plain records and a protocol. Environments themselves live in the sandbox's worker only (`tasks.py`); the rest
of the node sees them through `host.py`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import msgspec

__all__ = ["Completion", "Environment", "Prompt", "Score", "item_seed"]


class Prompt(msgspec.Struct, frozen=True):
    """environment -> engine. Derived from `(environment, seed, index)`. `entry` is the environment's own, and
    empty outside the process that it runs in."""

    environment: str
    text: str
    seed: int
    index: int
    entry: dict[str, Any] = {}


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """engine -> environment. `finished`: ended by the policy itself, not cut at the token limit."""

    text: str
    finished: bool


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """environment -> verify, train. Only `reward` is learnt from; `components` are for people to read."""

    reward: float
    components: tuple[tuple[str, float], ...]


class Environment(Protocol):
    """What the rest of the node asks of a task. Same arguments, same result, on every machine."""

    @property
    def name(self) -> str:
        """The id under which the charter lists it, e.g. `reasoning_gym/spell_backward`."""
        ...

    @property
    def evaluates_answers(self) -> bool:
        """Scoring may execute the answer's text as code. When in doubt, True."""
        ...

    @property
    def reproducible(self) -> bool:
        """Whether every machine derives the same prompts, whatever its hash seed."""
        ...

    def prompt(self, seed: int, index: int) -> Prompt:
        """The prompt of this seed and index, both in [0, 2**63)."""
        ...

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Reward of one completion. Any text is a valid input, and a scorer's own failure on it is a zero."""
        ...


def item_seed(seed: int, index: int) -> int:
    """One 63-bit number for both, to draw an item by; those of neighbours have nothing in common."""
    digest = hashlib.sha256(b"murmuration/item" + seed.to_bytes(8, "big") + index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
