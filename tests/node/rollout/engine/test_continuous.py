"""Continuous batching: company, prefixes, lengths, budgets and new weights on the way."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.rollout.engine.base import EngineError, Generation, GenerationRequest, Prefix
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Rollout, Sampling
from tests.node.rollout.engine.watching import watched_engine
from tests.node.rollout.rounding import LOGPROB_NATS


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    torch.set_num_threads(1)
    return Policy.open(tiny_policy_path)


@pytest.fixture
def engine(policy: Policy) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(policy)
    yield engine
    engine.close()


def ragged(policy: Policy, count: int, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of 4 to 30 tokens, answers of at least 1 to 40, all settings mixed."""
    draw = random.Random(seed)
    return [
        GenerationRequest(
            tuple(policy.encode_prompt("7" * draw.randint(1, 27))),
            n=draw.randint(1, 3),
            seed=draw.randrange(2**40),
            sampling=Sampling(
                draw.randint(1, 40), draw.choice([0.7, 1.0, 1.3]), draw.choice([1.0, 1.0, 0.8])
            ),
        )
        for _ in range(count)
    ]


def lengthy(policy: Policy, lengths: Sequence[int], n: int = 1) -> list[GenerationRequest]:
    """Rollouts of exactly these lengths."""
    return [
        GenerationRequest(
            tuple(policy.encode_prompt(f"{number}")),
            n=n,
            seed=number,
            sampling=Sampling(length),
            min_new_tokens=length,
        )
        for number, length in enumerate(lengths)
    ]


def tokens(rollout: Rollout) -> list[int]:
    return np.frombuffer(rollout.answer.token_ids, "<u4").tolist()


def logprobs(rollout: Rollout) -> np.ndarray:
    return np.frombuffer(rollout.answer.logprobs, "<f4")


def versions(rollout: Rollout) -> list[int]:
    return np.frombuffer(rollout.answer.versions, "<u4").tolist()


def drain(generation: Generation) -> dict[int, list[Rollout]]:
    done: dict[int, list[Rollout]] = {}
    while generation.in_flight:
        done.update(generation.wait())
    return done


def changed(policy: Policy, seed: int) -> dict[str, Tensor]:
    """Weights that lie somewhat off the policy's."""
    torch.manual_seed(seed)
    parameters = dict(policy.load_model().named_parameters())  # tied ones come once
    return {name: tensor.detach() + 0.05 * torch.randn_like(tensor) for name, tensor in parameters.items()}


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> None:
    assert [tokens(rollout) for rollout in one] == [tokens(rollout) for rollout in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.finish == theirs.finish
        assert np.abs(logprobs(ours) - logprobs(theirs)).max() < LOGPROB_NATS


# --- company -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [1, 3, 8, 256])
def test_each_rollout_is_what_it_is_alone(policy: Policy, engine: TransformersEngine, max_rows: int) -> None:
    requests = ragged(policy, 12)
    alone = [engine.generate([request])[0] for request in requests]
    together = TransformersEngine(policy, max_rows=max_rows, max_batch_tokens=64).generate(requests)
    for one, other in zip(alone, together, strict=True):
        same(one, other)


def test_a_group_that_joins_on_the_way_changes_nothing(policy: Policy, engine: TransformersEngine) -> None:
    first, *later = ragged(policy, 5, seed=3)
    generation = engine.open()
    tickets = generation.start([first])
    for request in later:
        done = generation.wait(tokens=2)
        assert [ticket for ticket, _ in done] == sorted(ticket for ticket, _ in done)
        tickets += generation.start([request])
        for ticket, rollouts in done:
            same(rollouts, engine.generate([[first, *later][ticket]])[0])
    assert tickets == [0, 1, 2, 3, 4]
    for ticket, rollouts in drain(generation).items():
        same(rollouts, engine.generate([[first, *later][ticket]])[0])


def test_columns_of_rows_that_left_are_cut_off(policy: Policy) -> None:
    passes: list[tuple[int, bool]] = []

    def watch(inputs: Mapping[str, Any]) -> None:
        passes.append((inputs["past_key_values"].get_seq_length(), inputs["attention_mask"] is not None))

    engine = watched_engine(policy, watch)
    long = GenerationRequest(tuple(policy.encode_prompt("7" * 90)), 1, 0, Sampling(2), min_new_tokens=2)
    short = GenerationRequest(tuple(policy.encode_prompt("7")), 1, 0, Sampling(20), min_new_tokens=20)
    generation = engine.open()
    generation.start([long, short])
    generation.wait()
    del passes[:]
    [(_, rollouts)] = generation.wait()
    assert passes[0] == (len(short.prompt_ids) + 1, False)
    same(rollouts, engine.generate([short])[0])


def test_groups_come_as_they_are_complete_and_rows_refill(policy: Policy) -> None:
    generation = TransformersEngine(policy, max_rows=4).open()
    generation.start(lengthy(policy, [20, 3, 9, 3, 3, 1]))
    assert generation.in_flight == 6
    order, at = [], []
    while generation.in_flight:
        order += [ticket for ticket, _ in generation.wait()]
        at.append(generation.sampled)
    assert order == [1, 3, 5, 4, 2, 0]  # 5 and 4 began when two of the four were done
    assert generation.sampled == 20 + 3 + 9 + 3 + 3 + 1
    assert at[0] == 12


def test_the_same_prompt_is_computed_once(policy: Policy) -> None:
    shapes: list[tuple[int, ...]] = []
    engine = watched_engine(policy, lambda inputs: shapes.append(tuple(inputs["input_ids"].shape)))
    prompt = tuple(policy.encode_prompt("12"))
    engine.generate([GenerationRequest(prompt, 5, seed, Sampling(2), (), 2) for seed in range(3)])
    assert shapes == [(1, len(prompt)), (15, 1)]


# --- budget, prefixes, lengths -----------------------------------------------------------------------------


def test_a_wait_ends_after_so_many_tokens_and_nothing_is_sampled_until_the_next(
    policy: Policy, engine: TransformersEngine
) -> None:
    generation = engine.open()
    assert generation.wait() == []
    generation.start(lengthy(policy, [12, 12], n=2))
    assert generation.wait(tokens=10) == []
    assert generation.sampled == 12  # four rows: whole steps
    assert generation.wait(tokens=0) == []
    assert generation.sampled == 12
    assert len(generation.wait()) == 2
    assert (generation.sampled, generation.in_flight) == (48, 0)


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "recycle"])
def test_behind_a_prefix_a_rollout_goes_on_as_if_it_had_never_stopped(policy: Policy, in_flight: str) -> None:
    engine = TransformersEngine(policy, in_flight=in_flight)
    engine.update(policy.load_model().state_dict(), 3)
    request = lengthy(policy, [24], n=4)[0]
    whole = engine.generate([request])[0]
    cuts = (0, 1, 17, 24)
    prefixes = tuple(
        Prefix(tuple(tokens(each)[:cut]), tuple(logprobs(each)[:cut].tolist()), (1,) * cut)
        for cut, each in zip(cuts, whole, strict=True)
    )
    again = GenerationRequest(request.prompt_ids, 4, request.seed, request.sampling, prefixes, 24)
    generation = engine.open()
    generation.start([again])
    assert generation.in_flight == 3
    rollouts = drain(generation)[0]
    same(whole, rollouts)
    assert [versions(each) for each in rollouts] == [[1] * cut + [3] * (24 - cut) for cut in cuts]
    assert generation.sampled == 4 * 24 - sum(cuts)


def test_a_prefix_with_its_end_is_complete_at_once(policy: Policy, engine: TransformersEngine) -> None:
    ended = Prefix((5, policy.eos_token_id), (-1.0, -2.0), (0, 0))
    request = GenerationRequest((2, 6, 3), 2, 0, Sampling(8), (ended, ended))
    generation = engine.open()
    generation.start([request])
    assert generation.in_flight == 0
    [(ticket, rollouts)] = generation.wait()
    assert ticket == 0
    assert [tokens(each) for each in rollouts] == [[5, policy.eos_token_id]] * 2
    assert rollouts[0].finish is FinishReason.STOP
    assert generation.sampled == 0
    assert len(engine.generate([request])[0]) == 2


def test_no_end_before_the_minimum_and_its_probability_is_shared_out(
    policy: Policy, engine: TransformersEngine
) -> None:
    prompt = tuple(policy.encode_prompt("12"))
    [group] = engine.generate([GenerationRequest(prompt, 64, 1, Sampling(8), min_new_tokens=3)])
    lengths = [len(tokens(rollout)) for rollout in group]
    assert min(lengths) >= 4
    assert policy.eos_token_id in [tokens(rollout)[-1] for rollout in group]
    [each] = engine.generate([GenerationRequest(prompt, 1, 1, Sampling(1), min_new_tokens=1)])[0]
    with torch.no_grad():
        logits = policy.load_model()(input_ids=torch.tensor([prompt])).logits[0, -1]
    logits[policy.eos_token_id] = -torch.inf
    expected = torch.log_softmax(logits, -1)[tokens(each)[0]]
    assert logprobs(each)[0] == pytest.approx(float(expected), abs=LOGPROB_NATS)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ((Prefix((5,), (-1.0,), (0,)),), "1 prefixes for 2 rollouts"),
        ((Prefix((5,), (-1.0,), ()), Prefix((), (), ())), "1 tokens, 1 log-probabilities and 0 versions"),
        ((Prefix((5,) * 9, (-1.0,) * 9, (0,) * 9), Prefix((), (), ())), "at most 8"),
        ((Prefix((99,), (-1.0,), (0,)), Prefix((), (), ())), "token id 99"),
    ],
)
def test_impossible_prefixes_start_nothing(
    engine: TransformersEngine, prefixes: tuple[Prefix, ...], message: str
) -> None:
    generation = engine.open()
    good = GenerationRequest((2, 3), 1, 0, Sampling(8))
    with pytest.raises(EngineError, match=message):
        generation.start([good, GenerationRequest((2, 3), 2, 0, Sampling(8), prefixes)])
    assert generation.in_flight == 0
    assert generation.wait() == []


# --- new weights -------------------------------------------------------------------------------------------


def updated_twice(policy: Policy, in_flight: str) -> list[tuple[GenerationRequest, Rollout]]:
    """Ragged rollouts of 12 tokens, with new weights after 4 and after 8 of them."""
    engine = TransformersEngine(policy, in_flight=in_flight)
    requests = [
        GenerationRequest(
            tuple(policy.encode_prompt("7" * width)), 2, width, Sampling(12, 0.9), min_new_tokens=12
        )
        for width in (1, 4, 9)
    ]
    generation = engine.open()
    generation.start(requests)
    for version in (1, 2):
        generation.wait(tokens=4 * 6)
        engine.update(changed(policy, version), version)
    done = drain(generation)
    return [(request, each) for ticket, request in enumerate(requests) for each in done[ticket]]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", "recycle"])
def test_with_caches_computed_anew_each_token_is_exact_for_its_version(
    policy: Policy, in_flight: str
) -> None:
    models = {version: policy.load_model() for version in range(3)}
    for version in (1, 2):
        models[version].load_state_dict(changed(policy, version), strict=False)
    for request, rollout in updated_twice(policy, in_flight):
        ids, prompt = tokens(rollout), request.prompt_ids
        assert versions(rollout) == [0] * 4 + [1] * 4 + [2] * 4
        for place in range(12):
            with torch.no_grad():
                whole = torch.tensor([[*prompt, *ids[:place]]])
                logits = models[versions(rollout)[place]](input_ids=whole).logits[0, -1] / 0.9
            logits[policy.eos_token_id] = -torch.inf
            expected = float(torch.log_softmax(logits, -1)[ids[place]])
            assert logprobs(rollout)[place] == pytest.approx(expected, abs=4 * LOGPROB_NATS)


@pytest.mark.slow
def test_with_the_cache_kept_versions_are_right_and_the_first_version_is_exact(policy: Policy) -> None:
    exact = updated_twice(policy, "recompute")
    kept = updated_twice(policy, "continue")
    for (_, one), (_, other) in zip(exact, kept, strict=True):
        assert versions(other) == [0] * 4 + [1] * 4 + [2] * 4
        assert tokens(one)[:4] == tokens(other)[:4]
        assert np.abs(logprobs(one)[:4] - logprobs(other)[:4]).max() < LOGPROB_NATS
    gaps = [
        np.abs(logprobs(one)[4] - logprobs(other)[4])
        for (_, one), (_, other) in zip(exact, kept, strict=True)
    ]
    assert max(gaps) > 1e-3  # keys and values are of the old weights


def test_two_generations_share_an_engine(policy: Policy, engine: TransformersEngine) -> None:
    one, other = engine.open(), engine.open(greedy=True)
    requests = ragged(policy, 3, seed=8)
    one.start(requests)
    other.start(requests)
    one.wait(tokens=3)
    greedy = drain(other)
    for ticket, rollouts in enumerate(engine.generate(requests, greedy=True)):
        same(rollouts, greedy[ticket])
    assert not one.in_flight or drain(one)


# --- the end -----------------------------------------------------------------------------------------------


def test_a_closed_generation_drops_what_is_in_flight(policy: Policy, engine: TransformersEngine) -> None:
    generation = engine.open()
    generation.start(lengthy(policy, [5]))
    generation.close()
    generation.close()
    assert generation.in_flight == 0
    assert generation.wait() == []
    with pytest.raises(EngineError, match="closed"):
        generation.start(lengthy(policy, [5]))


def test_closing_ends_a_wait_on_another_thread(policy: Policy) -> None:
    under_way = threading.Event()
    generation = watched_engine(policy, lambda inputs: under_way.set()).open()
    generation.start(lengthy(policy, [100] * 64))
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(generation.wait()))
    thread.start()
    assert under_way.wait(5)
    generation.close()
    thread.join(5)
    assert results == [[]]
    assert generation.sampled < 6400
