"""The embedded engine: parity with a plain forward pass, shapes, seeds, versions, weights in place."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from node.rollout.engine.base import EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from protocol.messages import FinishReason, Rollout, Sampling
from tests.node.rollout.engine.watching import watched_engine
from tests.node.rollout.rounding import LOGPROB_NATS


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def engine(policy: Policy) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(policy)
    yield engine
    engine.close()


def ask(policy: Policy, question: str, n: int = 4, seed: int = 7, **sampling: float) -> GenerationRequest:
    chosen = Sampling(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(tuple(policy.encode_prompt(question)), n, seed, chosen)


def arrays(rollout: Rollout) -> tuple[list[int], np.ndarray, list[int]]:
    return (
        np.frombuffer(rollout.answer.token_ids, "<u4").tolist(),
        np.frombuffer(rollout.answer.logprobs, "<f4"),
        np.frombuffer(rollout.answer.versions, "<u4").tolist(),
    )


def plain_logprobs(policy: Policy, prompt: tuple[int, ...], ids: list[int], temperature: float) -> np.ndarray:
    """One sequence, no padding, no cache, by transformers alone."""
    model = policy.load_model().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


def test_logprobs_equal_a_plain_forward(policy: Policy, engine: TransformersEngine) -> None:
    requests = [
        ask(policy, "1+1", n=2, seed=1, temperature=0.8),
        ask(policy, "reverse abc", n=2, seed=2),
        ask(policy, "1+1", n=2, seed=3, temperature=1.3, max_new_tokens=5),
    ]
    for request, group in zip(requests, engine.generate(requests), strict=True):
        for rollout in group:
            ids, logprobs, _ = arrays(rollout)
            expected = plain_logprobs(policy, request.prompt_ids, ids, request.sampling.temperature)
            assert np.abs(logprobs - expected).max() < LOGPROB_NATS


def test_scoring_equals_a_plain_forward(policy: Policy, engine: TransformersEngine) -> None:
    sequences = [
        TokenSequence((2, 6, 3), (9, 7, 1), 0.7),
        TokenSequence((2, 6, 42, 7, 8, 3), (20,)),
        TokenSequence((2, 3), tuple(range(5, 30))),
    ]
    scored = engine.logprobs(sequences)
    for sequence, logprobs in zip(sequences, scored, strict=True):
        expected = plain_logprobs(policy, sequence.prompt_ids, list(sequence.token_ids), sequence.temperature)
        assert np.abs(logprobs - expected).max() < LOGPROB_NATS


def test_scoring_does_not_depend_on_the_batch(policy: Policy, engine: TransformersEngine) -> None:
    narrow = TransformersEngine(policy, max_batch_tokens=1)
    sequences = [TokenSequence((2, 6, 3), tuple(range(5, 5 + n))) for n in (4, 1, 9)]
    for one, other in zip(engine.logprobs(sequences), narrow.logprobs(sequences), strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() < LOGPROB_NATS
    assert engine.logprobs([]) == []


def test_shapes_and_end(policy: Policy, engine: TransformersEngine) -> None:
    [group] = engine.generate([ask(policy, "12", n=64, seed=11)])
    finished = 0
    for rollout in group:
        ids, logprobs, versions = arrays(rollout)
        assert len(ids) == len(logprobs) == len(versions) <= 8
        assert policy.eos_token_id not in ids[:-1]
        if ids[-1] == policy.eos_token_id:
            finished += 1
            assert rollout.finish is FinishReason.STOP
        else:
            assert rollout.finish is FinishReason.LENGTH
            assert len(ids) == 8
        assert rollout.text == policy.decode(ids)
        assert rollout.seed == 11
        assert rollout.reward == 0.0
    assert 0 < finished < 64


def test_same_seed_same_tokens_in_any_company(policy: Policy, engine: TransformersEngine) -> None:
    alone = engine.generate([ask(policy, "12", seed=5)])[0]
    accompanied = engine.generate([ask(policy, "longer question", seed=6), ask(policy, "12", seed=5)])[1]
    assert [arrays(r)[0] for r in alone] == [arrays(r)[0] for r in accompanied]
    other = engine.generate([ask(policy, "12", seed=6)])[0]
    assert [arrays(r)[0] for r in alone] != [arrays(r)[0] for r in other]
    split = TransformersEngine(policy, max_rows=3).generate(
        [ask(policy, "12", seed=5), ask(policy, "12", seed=6)]
    )
    assert [arrays(r)[0] for r in split[0]] == [arrays(r)[0] for r in alone]
    assert [arrays(r)[0] for r in split[1]] == [arrays(r)[0] for r in other]


def test_frequencies_follow_the_distribution(policy: Policy, engine: TransformersEngine) -> None:
    request = ask(policy, "7", n=250, seed=3, max_new_tokens=1)
    [group] = engine.generate([request])
    counts = np.bincount([arrays(rollout)[0][0] for rollout in group], minlength=policy.vocab_size)
    every = engine.logprobs(
        [TokenSequence(request.prompt_ids, (token,)) for token in range(policy.vocab_size)]
    )
    probabilities = np.exp(np.concatenate(every))
    assert probabilities.sum() == pytest.approx(1.0, abs=4 * LOGPROB_NATS)
    assert np.abs(counts / 250 - probabilities).max() < 4 * np.sqrt(0.25 / 250)


def test_top_p_renormalises_within_the_nucleus(policy: Policy, engine: TransformersEngine) -> None:
    request = ask(policy, "7", n=100, max_new_tokens=1, top_p=0.5)
    [group] = engine.generate([request])
    drawn = {arrays(rollout)[0][0]: float(arrays(rollout)[1][0]) for rollout in group}
    every = engine.logprobs(
        [TokenSequence(request.prompt_ids, (token,)) for token in range(policy.vocab_size)]
    )
    probabilities = np.exp(np.concatenate(every)).astype(np.float64)
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), 0.5)) + 1
    allowed = set(order[:size].tolist())
    assert set(drawn) <= allowed
    for token, logprob in drawn.items():
        expected = np.log(probabilities[token] / probabilities[order[:size]].sum())
        assert logprob == pytest.approx(expected, abs=4 * LOGPROB_NATS)


def test_greedy_is_the_likeliest_path(policy: Policy, engine: TransformersEngine) -> None:
    request = ask(policy, "12", n=2)
    [group] = engine.generate([request], greedy=True)
    ids, _, _ = arrays(group[0])
    assert ids == arrays(group[1])[0]
    model = policy.load_model().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *ids]])).logits[0]
    assert logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == ids


def test_update_is_in_place_and_versioned(policy: Policy, engine: TransformersEngine) -> None:
    sequence = TokenSequence((2, 6, 3), (9, 7, 1))
    before = engine.logprobs([sequence])[0]
    state = {name: tensor * 0.5 for name, tensor in policy.load_model().state_dict().items()}
    engine.update(state, 3)
    assert engine.policy_version == 3
    assert np.abs(engine.logprobs([sequence])[0] - before).max() > 1e-3
    assert arrays(engine.generate([ask(policy, "12", n=1)])[0][0])[2][0] == 3


def test_update_that_does_not_fit_changes_nothing(policy: Policy, engine: TransformersEngine) -> None:
    sequence = TokenSequence((2, 6, 3), (9, 7, 1))
    before = engine.logprobs([sequence])[0]
    state = policy.load_model().state_dict()
    last = list(state)[-2]
    for broken in (
        {**state, last: torch.zeros(1)},
        {name: tensor for name, tensor in state.items() if name != "model.norm.weight"},
        {**state, "stranger": torch.zeros(1)},
    ):
        with pytest.raises(EngineError, match="do not fit"):
            engine.update(broken, 9)
    assert engine.policy_version == 0
    assert (engine.logprobs([sequence])[0] == before).all()


def test_versions_per_token_when_updated_on_the_way(policy: Policy) -> None:
    """Another thread asks for an update in the third pass of a generation, and gets its turn long before the
    generation has ended."""
    state, calls = policy.load_model().state_dict(), itertools.count(1)
    update = threading.Thread(target=lambda: engine.update(state, 1))
    engine = watched_engine(policy, lambda inputs: update.start() if next(calls) == 3 else None)
    sampling = Sampling(max_new_tokens=60)
    request = GenerationRequest(tuple(policy.encode_prompt("12")), 8, 1, sampling, min_new_tokens=60)
    versions = [arrays(r)[2] for r in engine.generate([request])[0]]
    update.join()
    assert all(each == versions[0] for each in versions)
    assert versions[0] == sorted(versions[0])
    assert versions[0][:3] == [0, 0, 0]
    assert versions[0][-1] == 1


def test_pause_holds_generation_but_not_scoring(policy: Policy, engine: TransformersEngine) -> None:
    engine.pause()
    done = threading.Event()

    def work() -> None:
        engine.generate([ask(policy, "12", n=1)])
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert len(engine.logprobs([TokenSequence((2, 3), (5,))])[0]) == 1
    engine.update(policy.load_model().state_dict(), 1)
    assert not done.is_set()
    engine.resume()
    thread.join(timeout=5)
    assert done.is_set()


def test_closed_engine_says_so(policy: Policy) -> None:
    engine = TransformersEngine(policy)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate([ask(policy, "1")]),
        lambda: engine.logprobs([TokenSequence((2, 3), (5,))]),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_broken_weights_are_named(policy: Policy, engine: TransformersEngine) -> None:
    state = policy.load_model().state_dict()
    engine.update({name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}, 4)
    with pytest.raises(EngineError, match="version 4"):
        engine.generate([ask(policy, "12")])
    with pytest.raises(EngineError, match="version 4"):
        engine.logprobs([TokenSequence((2, 3), (5,))])


@pytest.mark.parametrize(
    ("prompt", "n", "message"),
    [
        ((), 1, "empty"),
        ((2, 46), 1, "46"),
        ((2, -1), 1, "-1"),
        ((2,) * 121, 1, "positions"),
        ((2,), 0, "0 rollouts"),
    ],
)
def test_impossible_requests(
    engine: TransformersEngine, prompt: tuple[int, ...], n: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        engine.generate([GenerationRequest(prompt, n, 0, Sampling(max_new_tokens=8))])
