"""Which prompts a node answers: derived from public values, so that nobody can pick easy ones (D4).

    universe 0 .. universe_size-1  --(swarm, window)-->  pool  --(peer)-->  order  -->  slots
    index  --(weights)-->  environment        (swarm, index, attempt)  -->  seed  -->  question

The charter fixes the universe; a window selects a pool of it; a peer walks the pool in its own order and its
slots are the first `slots_per_window` of that order. Everybody can compute everybody's slots. Of the
questions that an index can give, the first that is not held out is the one to train on; evaluation has seeds
of its own.

All choices come from SHA-256 in counter mode with rejection, so they are unbiased and the same on every
machine. A pool of 1,024 costs about 2 ms once; results are kept. Not for running environments: the caller
passes `derive`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator

from protocol.codec import framed
from protocol.constants import HELD_OUT_BYTE
from protocol.errors import CharterError
from protocol.messages import Charter, Digest, EnvironmentSpec, PeerId, Record

__all__ = [
    "MAX_ATTEMPTS",
    "Question",
    "environment_of",
    "held_out_question",
    "held_out_seed",
    "is_held_out",
    "item_seed",
    "order",
    "pool",
    "skip_share",
    "slots",
    "training_question",
    "window_of",
]

MAX_ATTEMPTS = 1024
"""Seeds tried for one question. A tenth of all questions is held out, so an environment with many questions
never comes near it: 64 tries fail to train with probability 1e-64, 1,024 to evaluate with 1e-47."""


class Question(Record, frozen=True):
    """A derived question: the `attempt`-th seed of its index was the first that qualified."""

    attempt: int
    seed: int
    text: str


def window_of(charter: Charter, now_ms: int) -> int:
    """Number of the window that `now_ms` lies in, counted from the founding; 0 before it."""
    return max(0, now_ms - charter.created_at) // charter.window_ms


def pool(swarm_id: Digest, charter: Charter, window: int) -> tuple[int, ...]:
    """The window's `pool_size` distinct universe indexes, in an order that means nothing."""
    return _pool(swarm_id, charter.universe_size, charter.pool_size, window)


def order(swarm_id: Digest, charter: Charter, window: int, peer_id: PeerId) -> tuple[int, ...]:
    """The whole pool in the order of this peer. Its first `slots_per_window` are the peer's slots."""
    return _order(swarm_id, charter.universe_size, charter.pool_size, window, peer_id)


def slots(swarm_id: Digest, charter: Charter, window: int, peer_id: PeerId) -> tuple[int, ...]:
    """Universe index of each slot of this peer in this window: `PromptRef.index` must be
    `slots(...)[slot]`."""
    return order(swarm_id, charter, window, peer_id)[: charter.slots_per_window]


def environment_of(charter: Charter, index: int) -> EnvironmentSpec:
    """The environment of a universe index: indexes go round the environments, `weight` of them to each in
    turn."""
    bounds = list(itertools.accumulate(spec.weight for spec in charter.environments))
    return charter.environments[bisect.bisect_right(bounds, index % bounds[-1])]


def item_seed(swarm_id: Digest, index: int, attempt: int) -> int:
    """63-bit seed of one attempt at a training question. Hashed, because neighbouring seeds overlap in
    environments that use `seed + index`."""
    return _seed("item", swarm_id, index, attempt)


def held_out_seed(swarm_id: Digest, index: int, attempt: int) -> int:
    """63-bit seed of one attempt at an evaluation question; never one of the training seeds."""
    return _seed("held-out", swarm_id, index, attempt)


def is_held_out(question: str) -> bool:
    """Whether the question is for evaluation only: its SHA-256 starts with a byte below HELD_OUT_BYTE."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[0] < HELD_OUT_BYTE


def training_question(swarm_id: Digest, index: int, derive: Callable[[int], str | None]) -> Question:
    """The question to train on at `index`: of the seeds of attempts 0, 1, ... the first that has one which is
    not held out. `derive` gives the question of a seed, None where its environment fails. Raises
    `CharterError` when no attempt has one."""
    for attempt in range(MAX_ATTEMPTS):
        seed = item_seed(swarm_id, index, attempt)
        text = derive(seed)
        if text is not None and not is_held_out(text):
            return Question(attempt, seed, text)
    raise CharterError(_too_few("only held-out questions", "universe", index))


def held_out_question(swarm_id: Digest, index: int, derive: Callable[[int], str | None]) -> Question:
    """The evaluation question number `index`: the first that is held out. About ten calls of `derive`. Raises
    `CharterError` when the environment has no held-out question."""
    for attempt in range(MAX_ATTEMPTS):
        seed = held_out_seed(swarm_id, index, attempt)
        text = derive(seed)
        if text is not None and is_held_out(text):
            return Question(attempt, seed, text)
    raise CharterError(_too_few("no held-out question", "evaluation", index))


def skip_share(slots_seen: Collection[int]) -> float:
    """Share of slots that a peer passed over in one window: of the slots up to the highest it answered, how
    many are missing. `slots_seen` are the slots with a receipt. Slots beyond the highest were not reached,
    which is no choice, so a slow peer has a share of 0. Lost receipts count as skips: compare with
    `charter.max_skip_share` only after reconciling, and softly."""
    if not slots_seen:
        return 0.0
    return 1.0 - len(set(slots_seen)) / (max(slots_seen) + 1)


def _too_few(what: str, kind: str, index: int) -> str:
    return (
        f"{kind} index {index} gave {what} in {MAX_ATTEMPTS} attempts: its environment has too few different "
        "questions; found the swarm with wider settings"
    )


@functools.lru_cache(maxsize=32)
def _pool(swarm_id: Digest, universe_size: int, pool_size: int, window: int) -> tuple[int, ...]:
    """Partial Fisher-Yates over 0 .. universe_size-1; only moved entries are stored."""
    draw = _numbers(framed("pool", swarm_id.encode("ascii"), _uint(window)))
    moved: dict[int, int] = {}
    chosen: list[int] = []
    for at in range(pool_size):
        other = at + _below(universe_size - at, draw)
        chosen.append(moved.get(other, other))
        moved[other] = moved.get(at, at)
    return tuple(chosen)


@functools.lru_cache(maxsize=512)
def _order(
    swarm_id: Digest, universe_size: int, pool_size: int, window: int, peer_id: PeerId
) -> tuple[int, ...]:
    """Fisher-Yates over the pool, from the front."""
    draw = _numbers(
        framed("order", swarm_id.encode("ascii"), _uint(window), peer_id.encode("utf-8", "replace"))
    )
    indexes = list(_pool(swarm_id, universe_size, pool_size, window))
    for at in range(len(indexes) - 1):
        other = at + _below(len(indexes) - at, draw)
        indexes[at], indexes[other] = indexes[other], indexes[at]
    return tuple(indexes)


def _seed(purpose: str, swarm_id: Digest, index: int, attempt: int) -> int:
    hashed = hashlib.sha256(framed(purpose, swarm_id.encode("ascii"), _uint(index), _uint(attempt))).digest()
    return int.from_bytes(hashed[:8], "big") >> 1


def _uint(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _numbers(key: bytes) -> Iterator[int]:
    """Endless 64-bit numbers: SHA-256 of `SHA-256(key) || counter`, four big-endian numbers a block."""
    root = hashlib.sha256(hashlib.sha256(key).digest())
    for counter in itertools.count():
        block = root.copy()
        block.update(_uint(counter))
        data = block.digest()
        for at in range(0, 32, 8):
            yield int.from_bytes(data[at : at + 8], "big")


def _below(bound: int, numbers: Iterator[int]) -> int:
    """An unbiased number in 0 .. bound-1: draws above the largest multiple of `bound` are thrown away."""
    limit = 2**64 - 2**64 % bound
    while True:
        number = next(numbers)
        if number < limit:
            return number % bound
