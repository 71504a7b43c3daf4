"""Rollouts in flight on vLLM: token budgets, weights that change under them, prefixes, several generations at
a time, and a process that dies. Tests run in order and share one engine; damage comes last."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config import VllmConfig
from node.rollout.engine._vllm_generation import VllmGeneration
from node.rollout.engine._vllm_life import Life
from node.rollout.engine.base import EngineError, Generation, GenerationRequest, Prefix, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Rollout, Sampling

QUESTIONS = ("spell abc backward", "1 + 2", "sort 3 1 2")
TOLERANCE = 1e-4
"""Nats between two float32 implementations."""
SLOTS = 8
SLACK = SLOTS * 32
"""Tokens that may go beyond a budget: what each slot hands over at a time, and is computing meanwhile."""
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def engine(policy: Policy, states: list[State], notices: list[str]) -> Iterator[VllmEngine]:
    settings = VllmConfig(kv_cache_mib=64, max_concurrent=SLOTS, deadline_s=60)
    engine = VllmEngine(
        policy,
        settings,
        in_flight="recycle",
        sleeps=True,
        notice=lambda level, text: notices.append(f"{level}: {text}"),
    )
    engine.update(states[0], 0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def states(policy: Policy) -> list[State]:
    """Three sets of weights for versions 0, 1 and 2: so unsure that rollouts get long, and far apart in what
    they make likely."""
    base = {name: tensor.clone() for name, tensor in policy.load_model().state_dict().items()}
    base["model.norm.weight"] *= 0.08
    generator = torch.Generator().manual_seed(3)

    def moved() -> State:
        other = {
            name: tensor + 0.03 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }
        return other | {"lm_head.weight": other["model.embed_tokens.weight"].clone()}

    return [moved(), moved(), moved()]


@pytest.fixture(scope="module")
def oracles(policy: Policy, states: list[State]) -> list[TransformersEngine]:
    """For each version an engine that scores under it."""
    oracles = [TransformersEngine(policy) for _ in states]
    for oracle, state in zip(oracles, states, strict=True):
        oracle.update(state, 0)
    return oracles


def ask(policy: Policy, n: int = 8, max_new_tokens: int = 200) -> list[GenerationRequest]:
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0)
    return [
        GenerationRequest(tuple(policy.encode_prompt(question)), n, 7, sampling) for question in QUESTIONS
    ]


def arrays(rollout: Rollout) -> tuple[list[int], np.ndarray, list[int]]:
    return (
        np.frombuffer(rollout.answer.token_ids, "<u4").tolist(),
        np.frombuffer(rollout.answer.logprobs, "<f4"),
        np.frombuffer(rollout.answer.versions, "<u4").tolist(),
    )


def drain(generation: Generation, done: dict[int, list[Rollout]]) -> list[list[Rollout]]:
    """All groups in the order of their tickets: those that are `done` and those that are in flight."""
    while groups := generation.wait():
        done.update(groups)
    assert generation.in_flight == 0
    return [done[ticket] for ticket in sorted(done)]


def check(
    policy: Policy,
    oracles: Sequence[TransformersEngine],
    requests: Sequence[GenerationRequest],
    groups: Sequence[list[Rollout]],
) -> list[list[int]]:
    """Every token's log-probability is that of its own version. Returns the versions of each rollout."""
    assert [len(group) for group in groups] == [request.n for request in requests]
    pairs = [(request, rollout) for request, group in zip(requests, groups, strict=True) for rollout in group]
    sequences = [
        TokenSequence(request.prompt_ids, tuple(arrays(rollout)[0]), request.sampling.temperature)
        for request, rollout in pairs
    ]
    expected = [oracle.logprobs(sequences) for oracle in oracles]
    for place, (request, rollout) in enumerate(pairs):
        ids, logprobs, versions = arrays(rollout)
        assert len(ids) == len(logprobs) == len(versions) <= request.sampling.max_new_tokens
        assert versions == sorted(versions)
        assert policy.eos_token_id not in ids[:-1]
        ended = ids[-1] == policy.eos_token_id
        assert rollout.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert rollout.text == policy.decode(ids)
        right = [expected[version % 3][place][token] for token, version in enumerate(versions)]
        assert np.abs(right - logprobs).max() < TOLERANCE
    return [arrays(rollout)[2] for _, rollout in pairs]


def test_a_spent_budget_holds_generation(
    engine: VllmEngine, policy: Policy, oracles: list[TransformersEngine]
) -> None:
    requests = ask(policy)
    generation = engine.open()
    assert generation.wait() == []
    tickets = generation.start(requests)
    assert tickets == sorted(tickets)
    assert generation.in_flight == 24
    done: dict[int, list[Rollout]] = {}
    for _ in range(2):
        before = generation.sampled
        while generation.in_flight and generation.sampled < before + 200:
            done.update(generation.wait(tokens=before + 200 - generation.sampled))
        assert generation.in_flight, "the budget is spent first"
        assert generation.sampled < before + 200 + SLACK
        held = generation.sampled
        engine.logprobs([TokenSequence(requests[0].prompt_ids, (5,))])
        assert engine.life is not None
        assert not engine.life.legs
        assert generation.sampled == held, "nothing is sampled between the calls"
    versions = check(policy, oracles, requests, drain(generation, done))
    assert {version for one in versions for version in one} == {0}
    assert generation.sampled == sum(map(len, versions)), "nothing was sampled twice"
    generation.close()
    generation.close()
    with pytest.raises(EngineError, match="closed"):
        generation.start(requests)


def test_held_rollouts_go_on_under_new_weights(
    engine: VllmEngine, policy: Policy, states: list[State], oracles: list[TransformersEngine]
) -> None:
    requests = ask(policy)
    generation = engine.open()
    generation.start(requests)
    done: dict[int, list[Rollout]] = {}
    for version in (1, 2):
        done.update(generation.wait(tokens=150))
        engine.update(states[version], version)
    versions = check(policy, oracles, requests, drain(generation, done))
    assert sum(len(set(one)) > 1 for one in versions) >= 4
    assert generation.sampled == sum(map(len, versions))


def test_an_update_recycles_what_runs(
    engine: VllmEngine, policy: Policy, states: list[State], oracles: list[TransformersEngine]
) -> None:
    short, *long = ask(policy, n=2, max_new_tokens=1)[:1] + ask(policy, n=3)[1:]
    generation = engine.open()
    (first, *_) = generation.start([short, *long])
    done = dict(generation.wait())
    assert set(done) == {first}, "the short group is handed over, the rest runs on"
    engine.update(states[0], 3)
    versions = check(policy, oracles, [short, *long], drain(generation, done))
    assert sum(set(one) == {2, 3} for one in versions) >= 3
    assert generation.sampled == sum(map(len, versions))


def test_generation_goes_on_behind_prefixes(
    engine: VllmEngine, policy: Policy, oracles: list[TransformersEngine]
) -> None:
    (request,) = ask(policy, n=1, max_new_tokens=24)[:1]
    ((whole,),) = engine.generate([request])
    ids, logprobs, versions = arrays(whole)

    def prefix(tokens: int) -> Prefix:
        return Prefix(tuple(ids[:tokens]), tuple(logprobs[:tokens].tolist()), tuple(versions[:tokens]))

    given = (prefix(0), prefix(2), prefix(len(ids) - 1), prefix(len(ids)))
    again = GenerationRequest(request.prompt_ids, 4, 7, request.sampling, prefixes=given)
    generation = engine.open()
    generation.start([again])
    ((_, group),) = generation.wait()
    lengths = [len(one) for one in check(policy, oracles, [again], [group])]
    for one, rollout in zip(given, group, strict=True):
        assert arrays(rollout)[0][: len(one.token_ids)] == list(one.token_ids)
    assert group[3] == whole, "a complete one comes back as it is"
    assert generation.sampled == sum(lengths) - sum(len(one.token_ids) for one in given)
    for prefixes, words in (
        ((prefix(1),), "1 prefixes for 4 rollouts"),
        ((Prefix((5,), (), ()),) * 4, "1 tokens, 0 log-probabilities"),
        ((Prefix((5,) * 25, (0.0,) * 25, (0,) * 25),) * 4, "at most 24"),
        ((Prefix((-1,), (0.0,), (0,)),) * 4, "outside the vocabulary"),
    ):
        with pytest.raises(EngineError, match=words):
            generation.start(
                [GenerationRequest(request.prompt_ids, 4, 7, request.sampling, prefixes=prefixes)]
            )
    assert generation.in_flight == 0


def test_the_end_token_is_impossible_before_the_least_length(
    engine: VllmEngine, policy: Policy, oracles: list[TransformersEngine]
) -> None:
    prompt = tuple(policy.encode_prompt(QUESTIONS[1]))
    request = GenerationRequest(prompt, 8, 7, Sampling(max_new_tokens=10), min_new_tokens=8)
    oracle = oracles[0]
    for rollout in engine.generate([request])[0]:
        ids, logprobs, _ = arrays(rollout)
        assert 8 <= len(ids) <= 10
        (plain,) = oracle.logprobs([TokenSequence(prompt, tuple(ids))])
        ends = oracle.logprobs(
            [TokenSequence(prompt + tuple(ids[:place]), (policy.eos_token_id,)) for place in range(8)]
        )
        # The distribution that is sampled from has no end token, and the others share what it had.
        gains = -np.log1p(-np.exp(np.concatenate(ends)))
        gains = np.pad(gains, (0, len(ids) - 8))
        assert np.abs(plain + gains - logprobs).max() < TOLERANCE


def test_two_generations_at_a_time(
    engine: VllmEngine, policy: Policy, oracles: list[TransformersEngine]
) -> None:
    requests = ask(policy)
    rollouts, evaluation = engine.open(), engine.open(greedy=True)
    rollouts.start(requests)
    sure = [GenerationRequest(request.prompt_ids, 1, 0, Sampling(max_new_tokens=24)) for request in requests]
    evaluation.start(sure)
    greedy = [group[0].text for group in drain(evaluation, {})]
    assert greedy == [group[0].text for group in oracles[0].generate(sure, greedy=True)]
    dropped = engine.open()
    dropped.start(requests)
    dropped.close()
    check(policy, oracles, requests, drain(rollouts, {}))


@pytest.mark.parametrize("paused", [False, True])
def test_closing_ends_a_wait_on_another_thread(
    engine: VllmEngine,
    policy: Policy,
    oracles: list[TransformersEngine],
    monkeypatch: pytest.MonkeyPatch,
    paused: bool,
) -> None:
    requests = ask(policy, n=3 * SLOTS)
    generation, under_way = engine.open(), threading.Event()
    assert isinstance(generation, VllmGeneration)
    launch = generation.launch

    def watched(life: Life) -> None:
        launch(life)
        under_way.set()

    if paused:
        engine.pause()
    with monkeypatch.context() as patched:
        # The first call is from `start`; the one that is waited for is from `wait`.
        generation.start(requests)
        engine.logprobs([TokenSequence(requests[0].prompt_ids, (5,))])
        patched.setattr(generation, "launch", watched)
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(generation.wait()))
        thread.start()
        assert under_way.wait(5)
        generation.close()
        thread.join(5)
    assert results == [[]]
    assert (generation.in_flight, generation.wait()) == (0, [])
    if paused:
        engine.resume()
    again = engine.open()
    again.start(ask(policy, n=1))
    check(policy, oracles, ask(policy, n=1), drain(again, {}))  # slots are free
    assert engine.life is not None
    assert not engine.life.legs


def test_scoring_goes_on_in_a_pause_and_waits_in_sleep(
    engine: VllmEngine, policy: Policy, states: list[State], oracles: list[TransformersEngine]
) -> None:
    requests = ask(policy)
    generation = engine.open()
    generation.start(requests)
    done = dict(generation.wait(tokens=50))
    sequence = TokenSequence(requests[0].prompt_ids, (5, 6, 7))
    engine.pause()
    (expected,) = oracles[0].logprobs([sequence])
    assert np.abs(engine.logprobs([sequence])[0] - expected).max() < TOLERANCE
    engine.resume()
    done.update(generation.wait(tokens=50))

    engine.sleep()
    scored: list[np.ndarray] = []
    scorer = threading.Thread(target=lambda: scored.extend(engine.logprobs([sequence])))
    scorer.start()
    engine.update(states[1], 4)
    assert scored == []
    engine.wake()
    scorer.join(60)
    (expected,) = oracles[1].logprobs([sequence])
    assert np.abs(scored[0] - expected).max() < TOLERANCE
    versions = check(policy, oracles, requests, drain(generation, done))
    assert any(set(one) == {3, 4} for one in versions), "rollouts in flight kept their tokens"


def test_a_full_context_is_scored(
    engine: VllmEngine, policy: Policy, oracles: list[TransformersEngine]
) -> None:
    tokens = tuple(int(token) for token in np.random.default_rng(0).integers(5, 100, policy.max_positions))
    sequence = TokenSequence(tokens[:10], tokens[10:])
    (expected,) = oracles[1].logprobs([sequence])
    assert np.abs(engine.logprobs([sequence])[0] - expected).max() < TOLERANCE
    with pytest.raises(EngineError, match="exceed the 512 positions"):
        engine.logprobs([TokenSequence(tokens, (5,))])


def test_a_killed_process_loses_no_rollout(
    engine: VllmEngine,
    policy: Policy,
    states: list[State],
    oracles: list[TransformersEngine],
    notices: list[str],
) -> None:
    short, *long = ask(policy, n=2, max_new_tokens=1)[:1] + ask(policy, n=3)[1:]
    first, second = engine.open(), engine.open()
    first.start([short, *long])
    second.start(long)
    done = dict(first.wait())
    engine.update(states[2], 5)
    others = dict(second.wait(tokens=20 * SLOTS))
    (victim, *_) = engine.pids
    os.kill(victim, signal.SIGKILL)
    versions = check(policy, oracles, [short, *long], drain(first, done))
    check(policy, oracles, long, drain(second, others))
    assert any(4 in one and 5 in one for one in versions), "what was there before is kept"
    assert any("was ended by SIGKILL" in text and "started again with version 5" in text for text in notices)
