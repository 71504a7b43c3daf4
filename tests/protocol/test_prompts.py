"""Prompt derivation, against a second implementation written from its description, and its distribution."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
import pytest

from protocol import prompts
from protocol.errors import CharterError
from protocol.identity import Identity
from protocol.messages import Charter, EnvironmentSpec, TokenizerSpec

SWARM = hashlib.sha256(b"a swarm").hexdigest()
PEER, OTHER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in (1, 2))
CHARTER = Charter(
    name="test",
    protocol_version=2,
    founder=PEER,
    created_at=1_700_000_000_000,
    environments=(EnvironmentSpec("a", weight=3), EnvironmentSpec("b"), EnvironmentSpec("c", weight=2)),
    tokenizers=(TokenizerSpec("chars", "0" * 64, 64, (1,)),),
    window_ms=10_000,
    universe_size=4096,
    pool_size=128,
    slots_per_window=64,
)


def hash_of(purpose: str, *fields: bytes) -> bytes:
    """SHA-256 over each field behind its 8-byte length, after domain, version and purpose."""
    hashed = hashlib.sha256()
    for field in (b"murmuration", b"2", purpose.encode(), *fields):
        hashed.update(len(field).to_bytes(8, "big"))
        hashed.update(field)
    return hashed.digest()


def shuffled(values: list[int], purpose: str, *fields: bytes) -> list[int]:
    """The whole Fisher-Yates shuffle from the front, on a plain list."""
    root = hash_of(purpose, *fields)
    words: list[int] = []
    counter = 0
    for at in range(len(values)):
        span = len(values) - at
        while True:
            if not words:
                block = hashlib.sha256(root + counter.to_bytes(8, "big")).hexdigest()
                words = [int(block[i : i + 16], 16) for i in range(0, 64, 16)]
                counter += 1
            word = words.pop(0)
            if word < (2**64 // span) * span:
                break
        chosen = at + word % span
        values[at], values[chosen] = values[chosen], values[at]
    return values


def test_pool_and_order_equal_a_second_implementation() -> None:
    window = (7).to_bytes(8, "big")
    expected_pool = shuffled(list(range(4096)), "pool", SWARM.encode(), window)[:128]
    assert list(prompts.pool(SWARM, CHARTER, 7)) == expected_pool
    expected_order = shuffled(list(expected_pool), "order", SWARM.encode(), window, PEER.encode())
    assert list(prompts.order(SWARM, CHARTER, 7, PEER)) == expected_order
    assert list(prompts.slots(SWARM, CHARTER, 7, PEER)) == expected_order[:64]


def test_seeds_equal_a_second_implementation() -> None:
    fields = (SWARM.encode(), (5).to_bytes(8, "big"), (2).to_bytes(8, "big"))
    assert prompts.item_seed(SWARM, 5, 2) == int(hash_of("item", *fields)[:8].hex(), 16) // 2
    assert prompts.held_out_seed(SWARM, 5, 2) == int(hash_of("held-out", *fields)[:8].hex(), 16) // 2


def test_golden_values() -> None:
    """Of protocol version 2. A change here is a new protocol version."""
    assert SWARM == "28d6230a0eff91830c136cb5737ebaaad0293cec208d8e028e915ba3e3d734e2"
    assert prompts.pool(SWARM, CHARTER, 7)[:5] == (1593, 2243, 54, 1188, 2383)
    assert prompts.slots(SWARM, CHARTER, 7, PEER)[:5] == (54, 696, 3182, 1845, 240)
    assert prompts.item_seed(SWARM, 5, 2) == 568672141116424282


def test_pool_is_a_selection_and_order_a_permutation_of_it() -> None:
    pool = prompts.pool(SWARM, CHARTER, 3)
    assert len(pool) == len(set(pool)) == 128
    assert all(0 <= index < 4096 for index in pool)
    for peer_id in (PEER, OTHER):
        assert sorted(prompts.order(SWARM, CHARTER, 3, peer_id)) == sorted(pool)
    assert prompts.order(SWARM, CHARTER, 3, PEER) != prompts.order(SWARM, CHARTER, 3, OTHER)
    assert prompts.pool(SWARM, CHARTER, 4) != pool
    assert prompts.pool("f" * 64, CHARTER, 3) != pool


def test_two_peers_share_slots_squared_over_pool_prompts() -> None:
    """64^2 / 128 = 32 on average; the hypergeometric standard deviation is 2.84, of a mean over 40 windows
    0.45."""
    shared = [
        len(set(prompts.slots(SWARM, CHARTER, w, PEER)) & set(prompts.slots(SWARM, CHARTER, w, OTHER)))
        for w in range(40)
    ]
    assert 32 - 4 * 0.45 < sum(shared) / 40 < 32 + 4 * 0.45


def test_every_index_is_equally_likely_at_every_place() -> None:
    """Pools of 3 of 5 over 600 windows: 120 expected at each place, standard deviation sqrt(600 * .2 * .8) =
    9.8."""
    small = msgspec.structs.replace(CHARTER, universe_size=5, pool_size=3, slots_per_window=3)
    pools = [prompts.pool(SWARM, small, window) for window in range(600)]
    for place in range(3):
        counts = Counter(pool[place] for pool in pools)
        assert all(abs(counts[index] - 120) < 5 * 9.8 for index in range(5))


def test_whole_universe_as_pool() -> None:
    whole = msgspec.structs.replace(CHARTER, universe_size=16, pool_size=16, slots_per_window=16)
    assert sorted(prompts.pool(SWARM, whole, 0)) == list(range(16))
    one = msgspec.structs.replace(CHARTER, universe_size=1, pool_size=1, slots_per_window=1)
    assert prompts.slots(SWARM, one, 0, PEER) == (0,)


@pytest.mark.parametrize(
    ("now_ms", "window"),
    [
        (0, 0),
        (1_700_000_000_000, 0),
        (1_700_000_009_999, 0),
        (1_700_000_010_000, 1),
        (1_700_000_123_456, 12),
    ],
)
def test_windows_count_from_the_founding(now_ms: int, window: int) -> None:
    assert prompts.window_of(CHARTER, now_ms) == window


def test_environments_get_their_weight() -> None:
    names = [prompts.environment_of(CHARTER, index).name for index in range(12)]
    assert "".join(names) == "aaabccaaabcc"


def test_seeds_have_63_bits_and_do_not_repeat() -> None:
    seeds = [prompts.item_seed(SWARM, index, attempt) for index in range(50) for attempt in range(4)]
    seeds += [prompts.held_out_seed(SWARM, index, attempt) for index in range(50) for attempt in range(4)]
    assert len(set(seeds)) == 400
    assert 2**62 < max(seeds) < 2**63


def test_held_out_is_decided_by_the_first_byte_of_the_hash() -> None:
    """SHA-256 of "abc" begins with ba, of "" with e3; of the numbers below 2,000, a share of 26/256 = 10.2
    %."""
    assert not prompts.is_held_out("abc")
    assert not prompts.is_held_out("")
    held_out = [text for text in map(str, range(2000)) if prompts.is_held_out(text)]
    assert all(int(hashlib.sha256(text.encode()).hexdigest()[:2], 16) < 26 for text in held_out)
    assert abs(len(held_out) - 203) < 4 * 13.5


def test_training_and_evaluation_never_meet() -> None:
    def derive(seed: int) -> str:
        return f"what is {seed % 500}?"

    training = [prompts.training_question(SWARM, index, derive) for index in range(300)]
    evaluation = [prompts.held_out_question(SWARM, index, derive) for index in range(30)]
    assert {question.text for question in training}.isdisjoint(question.text for question in evaluation)
    assert all(not prompts.is_held_out(question.text) for question in training)
    assert all(prompts.is_held_out(question.text) for question in evaluation)
    assert any(question.attempt > 0 for question in training)
    for index, question in enumerate(training):
        assert question.seed == prompts.item_seed(SWARM, index, question.attempt)
        for attempt in range(question.attempt):
            assert prompts.is_held_out(derive(prompts.item_seed(SWARM, index, attempt)))


def test_environment_with_one_question_is_an_error_not_a_hang() -> None:
    held_out = next(text for text in map(str, range(100)) if prompts.is_held_out(text))
    with pytest.raises(CharterError, match="only held-out questions in 1024 attempts"):
        prompts.training_question(SWARM, 0, lambda _: held_out)
    with pytest.raises(CharterError, match="no held-out question in 1024 attempts"):
        prompts.held_out_question(SWARM, 0, lambda _: "abc")


@pytest.mark.parametrize(
    ("seen", "share"),
    [((), 0.0), ((0,), 0.0), ((0, 1, 2), 0.0), ((1,), 0.5), ((0, 3), 0.5), ((9,), 0.9), ((0, 0, 1), 0.0)],
)
def test_skip_share_counts_gaps_below_the_highest_slot(seen: tuple[int, ...], share: float) -> None:
    assert prompts.skip_share(seen) == pytest.approx(share)
