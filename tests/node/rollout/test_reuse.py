"""Drafts: which tokens are kept, what that does to the distribution, and what the book remembers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from node.rollout.engine.base import Engine, EngineError, GenerationRequest, Prefix, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.rollout.reuse import ReuseBook, accepted_length
from node.verify.coincidence import COPY_NATS, GroupPrint, RolloutPrint, evidence_nats
from protocol.errors import ConfigError
from protocol.messages import FinishReason, Lineage, Rollout, Sampling
from protocol.rollouts import single_turn
from tests.node.rollout.rounding import LOGPROB_NATS

PROMPT = (2, 7, 3)
INFINITE = -math.inf


def log(values: Sequence[float], kind: Any = np.float32) -> NDArray[Any]:
    return np.asarray([math.log(value) if value else INFINITE for value in values], dtype=kind)


def kept(old: Sequence[float], new: Sequence[float], uniforms: Sequence[float], lenience: float = 1.0) -> int:
    return accepted_length(log(old), log(new), log(uniforms, np.float64), lenience)


def finished(token_ids: Sequence[int], logprobs: Sequence[float]) -> Rollout:
    return single_turn(
        text="",
        token_ids=np.asarray(token_ids, "<u4").tobytes(),
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        versions=np.zeros(len(token_ids), "<u4").tobytes(),
        finish=FinishReason.STOP,
        reward=0.0,
        seed=0,
    )


class Scores:
    """An engine that gives every token the same log-probability."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.policy_version = 5
        self.logprob = logprob
        self.asked: list[list[TokenSequence]] = []

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        self.asked.append(list(sequences))
        return [np.full(len(sequence.token_ids), self.logprob, np.float32) for sequence in sequences]


def prefixes(
    book: ReuseBook, engine: Scores | Engine, index: int = 0, *, n: int = 2, seed: int = 1
) -> tuple[Prefix, ...]:
    return book.prefixes(cast("Engine", engine), index, GenerationRequest(PROMPT, n, seed, Sampling(40)))


# --- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "uniforms", "lenience", "length"),
    [
        ((0.5, 0.5, 0.5), (0.5, 0.25, 0.5), (0.9, 0.6, 0.1), 1.0, 1),
        ((0.5, 0.5, 0.5), (0.5, 0.25, 0.5), (0.9, 0.4, 0.1), 1.0, 3),
        ((0.5, 0.5, 0.5), (0.5, 0.25, 0.5), (0.9, 0.6, 0.1), 1.25, 3),
        ((0.5,), (0.25,), (0.2,), 0.3, 0),
        ((0.5, 0.5), (0.5, 0.0), (0.9, 0.0), 100.0, 1),
        ((0.0, 0.0), (0.5, 0.0), (0.9, 0.9), 1.0, 1),
        ((), (), (), 1.0, 0),
    ],
    ids=["rejected", "accepted", "lenient", "strict", "impossible-now", "impossible-before", "empty"],
)
def test_by_hand(
    old: Sequence[float], new: Sequence[float], uniforms: Sequence[float], lenience: float, length: int
) -> None:
    assert kept(old, new, uniforms, lenience) == length


@pytest.mark.parametrize("lenience", [0.0, -1.0, math.nan])
def test_a_lenience_that_is_none(lenience: float) -> None:
    with pytest.raises(ValueError, match=r"lenience is .*; it must be above 0"):
        kept((0.5,), (0.5,), (0.5,), lenience)


LOGPROB = st.one_of(st.just(INFINITE), st.floats(-50, 0, width=32))
LOG_UNIFORM = st.one_of(st.just(INFINITE), st.floats(-40, 0))
DRAFT = st.lists(st.tuples(LOGPROB, LOGPROB, LOG_UNIFORM), max_size=12)


def columns(rows: list[tuple[float, float, float]]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    old, new, uniforms = zip(*rows, strict=True) if rows else ((), (), ())
    return np.asarray(old, np.float32), np.asarray(new, np.float32), np.asarray(uniforms, np.float64)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(-50, 0, width=32), LOG_UNIFORM), max_size=12))
def test_equal_policies_accept_everything(rows: list[tuple[float, float]]) -> None:
    old, new, uniforms = columns([(logprob, logprob, uniform) for logprob, uniform in rows])
    assert accepted_length(old, new, uniforms, 1.0) == len(rows)


@settings(max_examples=40)
@given(DRAFT, st.floats(0.01, 100), st.floats(0.01, 100))
def test_more_lenience_never_keeps_less(rows: list[Any], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert accepted_length(*columns(rows), low) <= accepted_length(*columns(rows), high)


@settings(max_examples=40)
@given(DRAFT, st.floats(0.01, 100))
def test_what_is_kept_is_possible_and_what_follows_was_rejected(rows: list[Any], lenience: float) -> None:
    length = accepted_length(*columns(rows), lenience)
    assert all(new > INFINITE for _, new, _ in rows[:length])
    if length < len(rows):
        old, new, uniform = rows[length]
        assert new == INFINITE or uniform > new - old + math.log(lenience) - 1e-9


# --- what it does to the distribution ----------------------------------------------------------------------

OLD, NEW = (0.5, 0.5), (0.8, 0.2)


def chance_of_answers(places: int, lenience: float) -> dict[tuple[int, ...], float]:
    """Of every answer, exactly: over all drafts, all lengths that `accepted_length` can keep of one, and all
    ends that the new policy samples behind it."""
    chances = dict.fromkeys(itertools.product((0, 1), repeat=places), 0.0)
    for draft in chances:
        old, new = [OLD[token] for token in draft], [NEW[token] for token in draft]
        ratios = [min(1.0, lenience * after / before) for before, after in zip(old, new, strict=True)]
        # One uniform number on each side of every threshold stands for its whole interval.
        for accepts in itertools.product((True, False), repeat=places):
            uniforms = [
                ratio / 2 if accept else (1 + ratio) / 2
                for accept, ratio in zip(accepts, ratios, strict=True)
            ]
            weight = math.prod(
                before * (ratio if accept else 1 - ratio)
                for before, accept, ratio in zip(old, accepts, ratios, strict=True)
            )
            if weight == 0:
                continue
            length = kept(old, new, uniforms, lenience)
            for end in itertools.product((0, 1), repeat=places - length):
                chances[draft[:length] + end] += weight * math.prod(NEW[token] for token in end)
    return chances


def off_policy(chances: dict[tuple[int, ...], float]) -> float:
    """Total variation from the new policy."""
    return (
        sum(abs(chance - math.prod(NEW[token] for token in answer)) for answer, chance in chances.items()) / 2
    )


def test_lenience_1_is_not_exactly_the_new_policy() -> None:
    """The two examples of the module's docstring, computed there by hand."""
    one = chance_of_answers(1, 1.0)
    assert one == pytest.approx({(0,): 0.74, (1,): 0.26})
    assert off_policy(one) == pytest.approx(0.06)
    two = chance_of_answers(2, 1.0)
    assert two == pytest.approx({(0, 0): 0.562, (0, 1): 0.178, (1, 0): 0.196, (1, 1): 0.064})
    assert off_policy(two) == pytest.approx(0.078)


def test_lenience_drifts_towards_the_old_policy() -> None:
    drifts = [off_policy(chance_of_answers(1, lenience)) for lenience in (1.0, 1.65, 2.5)]
    # By hand: of the second token (.2 now, .5 before) .4, .66 and 1 is kept; p = (.74, .26), (.636, .364), q.
    assert drifts == pytest.approx([0.06, 0.164, 0.3])


# --- the book ----------------------------------------------------------------------------------------------


def test_kept_tokens_are_of_the_current_version() -> None:
    book, engine = ReuseBook(1.0), Scores(-1.0)
    book.remember(0, [finished([9, 8, 1], [-2.0, -2.0, -2.0]), finished([7, 1], [-200.0, -200.0])])
    assert prefixes(book, engine) == (
        Prefix((9, 8, 1), (-1.0, -1.0, -1.0), (5, 5, 5)),
        Prefix((7, 1), (-1.0, -1.0), (5, 5)),
    )
    assert [len(sequences) for sequences in engine.asked] == [2]
    assert engine.asked[0][0] == TokenSequence(PROMPT, (9, 8, 1), 1.0)
    assert (book.drafted, book.accepted) == (5, 5)


def test_an_unknown_prompt_costs_nothing() -> None:
    book, engine = ReuseBook(1.0), Scores()
    book.remember(1, [finished([9], [-1.0])])
    assert prefixes(book, engine, 0) == ()
    assert engine.asked == []


def test_rollouts_without_a_draft_begin_anew_and_drafts_too_many_are_left() -> None:
    book, engine = ReuseBook(1.0), Scores()
    book.remember(0, [finished([9], [-1.0]), finished([8], [-1.0])])
    assert [prefix.token_ids for prefix in prefixes(book, engine, n=3)] == [(9,), (8,), ()]
    assert [prefix.token_ids for prefix in prefixes(book, engine, n=1)] == [(9,)]


def test_nothing_kept_is_no_prefix() -> None:
    book, engine = ReuseBook(1.0), Scores(-math.inf)
    book.remember(0, [finished([9, 8], [-1.0, -1.0])])
    assert prefixes(book, engine) == ()
    assert (book.drafted, book.accepted) == (2, 0)


def test_every_group_has_its_own_random_numbers() -> None:
    book, engine = ReuseBook(1.0), Scores(-1.1)
    book.remember(0, [finished(range(5, 45), [-1.0] * 40) for _ in range(4)])
    lengths = [
        [len(prefix.token_ids) for prefix in prefixes(book, engine, n=4, seed=seed)] for seed in (1, 2, 1)
    ]
    assert lengths[0] == lengths[2] != lengths[1]
    assert len(set(lengths[0])) > 1


def test_new_weights_in_between() -> None:
    class Updated(Scores):
        def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
            self.policy_version += 1
            return super().logprobs(sequences)

    book = ReuseBook(1.0)
    book.remember(0, [finished([9], [-1.0])])
    assert prefixes(book, Updated()) == ()
    assert book.drafted == 0


def test_the_newest_group_counts_and_the_book_is_bounded() -> None:
    book, engine = ReuseBook(1.0, max_prompts=2, max_rollouts=1), Scores()
    book.remember(0, [finished([9], [-1.0]), finished([8], [-1.0])])
    book.remember(0, [finished([7], [-1.0]), finished([6], [-1.0])])
    assert [prefix.token_ids for prefix in prefixes(book, engine)] == [(7,), ()]
    book.remember(1, [finished([5], [-1.0])])
    prefixes(book, engine, 0)  # used: prompt 1 is the oldest now
    book.remember(2, [finished([5], [-1.0])])
    assert [bool(prefixes(book, engine, index)) for index in range(3)] == [True, False, True]
    assert len(book) == 2


def test_long_answers_push_out_old_prompts() -> None:
    book, engine = ReuseBook(1.0, max_tokens=10), Scores()
    for index in range(3):
        book.remember(index, [finished(range(4), [-1.0] * 4)])
    assert [bool(prefixes(book, engine, index)) for index in range(3)] == [False, True, True]
    book.remember(2, [finished(range(11), [-1.0] * 11)])  # more than there is room for
    assert [bool(prefixes(book, engine, index)) for index in range(3)] == [False, True, False]
    assert len(book) == 1


def test_a_cut_distribution_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reuse_lenience needs a charter with top_p = 1, not 0.9"):
        ReuseBook(1.65, top_p=0.9)


def test_peers_call_a_group_of_whole_drafts_replayed() -> None:
    """Why reuse is for nodes that train alone."""
    book, engine = ReuseBook(1.0), Scores(-1.1)
    answers = [tuple(range(first, first + 6)) for first in (5, 15, 25, 35)]
    book.remember(0, [finished(answer, [-1.2] * 6) for answer in answers])
    again = prefixes(book, engine, n=4)
    assert [prefix.token_ids for prefix in again] == answers

    def group(slot: int, version: int, logprob: float) -> GroupPrint:
        logprobs_T, versions_T = np.full(6, logprob, np.float32), np.full(6, version, np.uint32)
        rollouts = [
            RolloutPrint(bytes(a), logprobs_T.tobytes(), versions_T.tobytes(), float(logprobs_T.sum()))
            for a in answers
        ]
        return GroupPrint(
            "me",
            Lineage(owner="me", base_model="weights", tokenizer="letters"),
            0,
            slot,
            prompt=0,
            arrived_at=slot,
            rollouts=tuple(rollouts),
        )

    evidence = evidence_nats(group(1, again[0].versions[0], again[0].logprobs[0]), group(0, 4, -1.2))
    assert evidence > COPY_NATS


def test_with_an_engine(tiny_policy_path: Path) -> None:
    """Scored under the weights that sampled them, drafts are kept whole up to the engine's rounding."""
    policy = Policy.open(tiny_policy_path)
    engine = TransformersEngine(policy)
    engine.update(policy.load_model().state_dict(), 3)
    token_ids = (10, 11, 12, 1)
    (scored,) = engine.logprobs([TokenSequence(PROMPT, token_ids)])
    book = ReuseBook(1.0)
    book.remember(0, [finished(token_ids, scored.tolist())])
    whole, new = prefixes(book, engine)
    assert (whole.token_ids, whole.versions, new.token_ids) == (token_ids, (3,) * 4, ())
    assert np.allclose(whole.logprobs, scored, atol=LOGPROB_NATS)
    book.remember(1, [finished([10**6], [-1.0])])
    with pytest.raises(EngineError, match="token id 1000000 is outside"):
        prefixes(book, engine, 1)
