"""The vLLM engine with a bundled policy on the machine at hand, against the transformers engine. Tests run in
order and share one engine: updates first, damage last."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from node.config import VllmConfig
from node.rollout.engine.base import EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.parity import ParityProbe, parity, probe_sequences
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from node.weights.follow.probe import FollowerProbe
from protocol.messages import FinishReason, Rollout, Sampling

QUESTIONS = ("spell abc backward", "1 + 2", "sort 3 1 2")
TOLERANCE = 1e-4
"""Nats between two float32 implementations; 5e-6 is what is seen."""
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def engine(policy: Policy, notices: list[str]) -> Iterator[VllmEngine]:
    settings = VllmConfig(kv_cache_mib=64, max_concurrent=16, deadline_s=8)
    engine = VllmEngine(policy, settings, notice=lambda level, text: notices.append(f"{level}: {text}"))
    yield engine
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def reference(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy)


@pytest.fixture(scope="module")
def state(policy: Policy) -> State:
    """The weights of the folder; the tied output layer comes as a copy, as the trainer gives it."""
    return {name: tensor.clone() for name, tensor in policy.load_model().state_dict().items()}


def disturbed(state: State, scale: float, share: float = 1.0, seed: int = 0, only: str = "") -> State:
    """Other weights: a `share` of the elements of tensors named like `only` moves."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        chosen = torch.rand(tensor.shape, generator=generator) < share
        return torch.where(chosen, tensor + scale * torch.randn(tensor.shape, generator=generator), tensor)

    other = {name: moved(tensor) if only in name else tensor for name, tensor in state.items()}
    return other | {"lm_head.weight": other["model.embed_tokens.weight"].clone()}


def ask(policy: Policy, n: int = 4, **sampling: float) -> list[GenerationRequest]:
    chosen = Sampling(**{"max_new_tokens": 24, **sampling})  # type: ignore[arg-type]
    return [GenerationRequest(tuple(policy.encode_prompt(question)), n, 7, chosen) for question in QUESTIONS]


def arrays(rollout: Rollout) -> tuple[list[int], np.ndarray, list[int]]:
    return (
        np.frombuffer(rollout.answer.token_ids, "<u4").tolist(),
        np.frombuffer(rollout.answer.logprobs, "<f4"),
        np.frombuffer(rollout.answer.versions, "<u4").tolist(),
    )


def greedy(engine: VllmEngine | TransformersEngine, policy: Policy) -> list[str]:
    return [rollout.text for group in engine.generate(ask(policy, n=1), greedy=True) for rollout in group]


def probe(policy: Policy) -> ParityProbe:
    prompts = [policy.encode_prompt(question) for question in QUESTIONS]
    return ParityProbe(tuple(probe_sequences(prompts, policy.vocab_size)), TOLERANCE)


def agrees(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State, version: int
) -> None:
    """Give both the same weights; same text, same probabilities."""
    engine.update(state, version)
    reference.update(state, version)
    same(engine, reference, policy)


def same(engine: VllmEngine, reference: TransformersEngine, policy: Policy) -> None:
    assert greedy(engine, policy) == greedy(reference, policy)
    sequences = probe(policy).sequences
    assert parity(engine, reference.logprobs(sequences), sequences) < TOLERANCE


def test_listens_on_loopback_only(engine: VllmEngine) -> None:
    assert engine.pids
    for pid in (os.getpid(), *engine.pids):
        for connection in psutil.Process(pid).net_connections():
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


def test_same_greedy_text_and_probabilities(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy
) -> None:
    same(engine, reference, policy)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, temperature: float
) -> None:
    requests = ask(policy, n=8, temperature=temperature)
    groups = engine.generate(requests)
    assert [len(group) for group in groups] == [8, 8, 8]
    sequences, sampled = [], []
    for request, group in zip(requests, groups, strict=True):
        for rollout in group:
            ids, logprobs, versions = arrays(rollout)
            assert len(ids) == len(logprobs) == len(versions) <= 24
            assert set(versions) == {0}
            ended = ids[-1] == policy.eos_token_id
            assert rollout.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert policy.eos_token_id not in ids[:-1]
            assert rollout.text == policy.decode(ids)
            sequences.append(TokenSequence(request.prompt_ids, tuple(ids), temperature))
            sampled.append(logprobs)
    assert len({tuple(sequence.token_ids) for sequence in sequences}) > 3, "it samples"
    for theirs, own, scored in zip(
        reference.logprobs(sequences), sampled, engine.logprobs(sequences), strict=True
    ):
        assert np.abs(theirs - own).max() < TOLERANCE
        assert np.abs(theirs - scored).max() < TOLERANCE


def test_each_sequence_of_a_batch_is_scored_at_its_own_temperature(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy
) -> None:
    """A charter, and so a peer's group, may have any. vLLM is asked for one value a token only: more than its
    default of 20 would be refused."""
    prompt = tuple(policy.encode_prompt(QUESTIONS[0]))
    tokens = tuple(number % policy.vocab_size for number in range(3, 43))
    temperatures = (0.7, 1.0, 1.5, 0.01, 10.0, 0.7, 1.0)
    sequences = [TokenSequence(prompt, tokens, each) for each in temperatures]
    found = engine.logprobs(sequences)
    for temperature, theirs, scored in zip(temperatures, reference.logprobs(sequences), found, strict=True):
        np.testing.assert_allclose(scored, theirs, rtol=1e-5, atol=TOLERANCE / min(temperature, 1.0))
    assert (found[0] == found[5]).all()
    assert (found[1] == found[6]).all()


def test_top_p_renormalises(engine: VllmEngine, reference: TransformersEngine, policy: Policy) -> None:
    requests = ask(policy, n=8, top_p=0.5, max_new_tokens=4)
    for request, group in zip(requests, engine.generate(requests), strict=True):
        for rollout in group:
            ids, logprobs, _ = arrays(rollout)
            (plain,) = reference.logprobs([TokenSequence(request.prompt_ids, tuple(ids))])
            gained = logprobs - plain
            assert (gained > -TOLERANCE).all()
            assert (gained < np.log(2) + TOLERANCE).all(), "at least half of the mass is kept"


def test_whole_then_sparse_updates(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State
) -> None:
    current = disturbed(state, 0.05)
    agrees(engine, reference, policy, current, 1)
    whole_bytes = engine.patch_bytes
    before = greedy(engine, policy)
    for version in (2, 3):
        current = disturbed(current, 0.5, share=0.01, seed=version)
        agrees(engine, reference, policy, current, version)
        assert engine.patch_bytes < whole_bytes / 30
        assert engine.policy_version == version
    assert greedy(engine, policy) != before
    assert engine.update_stall_s < 2
    agrees(engine, reference, policy, current, 4)
    assert engine.patch_bytes == 0, "nothing changed"
    (group, *_) = engine.generate(ask(policy, n=1))
    assert set(arrays(group[0])[2]) == {4}


@pytest.mark.parametrize(
    "only", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "embed_tokens", "norm"]
)
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_every_kind_of_layer_alone(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State, only: str, share: float
) -> None:
    base = disturbed(state, 0.05, seed=11)
    agrees(engine, reference, policy, base, 5)
    agrees(engine, reference, policy, disturbed(base, 0.4, share=share, seed=12, only=only), 6)
    assert engine.patch_bytes > 0


def test_a_followers_probe_finds_weights_that_nobody_meant(
    engine: VllmEngine, policy: Policy, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = FollowerProbe(engine, policy, None, prompt=QUESTIONS[0].format, tolerance=1e-3)
    assert follower.update(disturbed(state, 0.05, seed=11), 20) is False
    assert (follower.not_sharing, engine.policy_version) == ("", 20)

    given, others = engine.update, [disturbed(state, 0.05, seed=13)]

    def wrong_once(weights: State, policy_version: int) -> None:
        given(others.pop() if others else weights, policy_version)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "update", wrong_once)
        follower = FollowerProbe(engine, policy, None, prompt=QUESTIONS[0].format, tolerance=1e-3)
        assert follower.update(disturbed(state, 0.05, seed=12), 21) is True  # loaded anew, as a whole
        assert follower.not_sharing == ""


def test_a_patch_for_another_base_is_refused_and_everything_sent(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State, notices: list[str]
) -> None:
    assert engine.life is not None
    engine.life.update += 5
    agrees(engine, reference, policy, disturbed(state, 0.05, share=0.01, seed=13), 7)
    assert "sent whole" in notices[-1]
    assert "builds upon" in notices[-1]


def test_weights_that_do_not_fit_change_nothing(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State
) -> None:
    name = "model.norm.weight"
    for wrong, words in (
        ({key: value for key, value in state.items() if key != name}, "missing"),
        (state | {name: torch.zeros(3)}, r"\(3,\), not \(128,\)"),
        (state | {"extra": torch.zeros(3)}, "no tensor of the checkpoint"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.update(wrong, 99)
    assert engine.policy_version == 7
    same(engine, reference, policy)


@pytest.mark.parametrize("in_flight", ["continue", "recompute", "recycle"])
def test_versions_of_rollouts_under_way(
    engine: VllmEngine, policy: Policy, state: State, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of weights take turns while rollouts run; each token is checked against the weights that its
    version had."""
    monkeypatch.setattr(engine, "in_flight", in_flight)
    sets = [disturbed(state, 0.05, seed=21), disturbed(state, 0.05, share=0.2, seed=22)]
    oracles = [TransformersEngine(policy), TransformersEngine(policy)]
    for oracle, weights in zip(oracles, sets, strict=True):
        oracle.update(weights, 0)
    engine.update(sets[0], 10)
    requests = ask(policy, n=16, max_new_tokens=300, temperature=2.0)
    groups: list[list[Rollout]] = []
    worker = threading.Thread(target=lambda: groups.extend(engine.generate(requests)))
    worker.start()
    version = 10
    while worker.is_alive():
        version += 1
        engine.update(sets[version % 2], version)
    worker.join()
    assert version > 11
    spanning = 0
    for request, group in zip(requests, groups, strict=True):
        for rollout in group:
            ids, logprobs, versions = arrays(rollout)
            assert versions == sorted(versions)
            assert versions[0] >= 10
            assert versions[-1] <= version
            spanning += len(set(versions)) > 1
            # With a cache of older weights behind them, only the first one's tokens are exact.
            exact = len(ids) if in_flight != "continue" else versions.count(versions[0])
            expected = [
                oracle.logprobs([TokenSequence(request.prompt_ids, tuple(ids), 2.0)])[0] for oracle in oracles
            ]
            for place, token_version in enumerate(versions[:exact]):
                assert abs(expected[token_version % 2][place] - logprobs[place]) < TOLERANCE
    assert spanning > 3


def test_pause_holds_generation(engine: VllmEngine, policy: Policy) -> None:
    done = threading.Event()
    engine.pause()
    worker = threading.Thread(target=lambda: (engine.generate(ask(policy)), done.set()))
    worker.start()
    assert not done.wait(0.5)
    engine.resume()
    assert done.wait(60)
    worker.join()


def test_requests_that_do_not_fit(engine: VllmEngine, policy: Policy) -> None:
    sampling = Sampling(max_new_tokens=8)
    for request, words in (
        (GenerationRequest((), 1, 0, sampling), "empty"),
        (GenerationRequest((policy.vocab_size,), 1, 0, sampling), "outside the vocabulary"),
        (GenerationRequest((5,) * 505, 1, 0, sampling), "exceed the 512 positions"),
        (GenerationRequest((5,), 0, 0, sampling), "at least 1"),
        (GenerationRequest((5,), 1, 0, Sampling(max_new_tokens=8, temperature=2.5)), "2.5 is too high"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.generate([request])


def test_broken_weights_are_named_and_left_behind(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State
) -> None:
    engine.update(state | {"model.norm.weight": torch.full((128,), torch.nan)}, 500)
    with pytest.raises(EngineError, match="version 500 gives logits that are NaN"):
        engine.generate(ask(policy))
    with pytest.raises(EngineError, match="version 500 gives logits that are NaN"):
        engine.logprobs(probe(policy).sequences)
    agrees(engine, reference, policy, state, 501)


def test_a_hanging_process_is_replaced(
    engine: VllmEngine, reference: TransformersEngine, policy: Policy, state: State, notices: list[str]
) -> None:
    current = disturbed(state, 0.05, seed=31)
    agrees(engine, reference, policy, current, 600)
    notices.clear()
    (victim, *_) = engine.pids
    groups: list[list[Rollout]] = []
    requests = ask(policy, n=16, max_new_tokens=300, temperature=2.0)
    worker = threading.Thread(target=lambda: groups.extend(engine.generate(requests)))
    worker.start()
    os.kill(victim, signal.SIGSTOP)
    worker.join()
    assert [len(group) for group in groups] == [16, 16, 16], "they go on in the new process"
    assert any(
        "did not answer for 8 s" in text and "started again with version 600" in text for text in notices
    )
    assert not psutil.pid_exists(victim) or psutil.Process(victim).status() == psutil.STATUS_ZOMBIE
    same(engine, reference, policy)
    agrees(engine, reference, policy, disturbed(current, 0.1, share=0.01, seed=32), 601)


def test_a_process_that_refuses_weights_is_replaced(
    engine: VllmEngine,
    reference: TransformersEngine,
    policy: Policy,
    state: State,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engine.life is not None
    before = engine.pids

    async def refuse(*patches: object, **options: object) -> None:
        raise ValueError("no place for it")

    monkeypatch.setattr(engine.life, "patch", refuse)
    agrees(engine, reference, policy, disturbed(state, 0.1, share=0.01, seed=33), 602)
    assert not engine.lost
    assert not set(engine.pids) & set(before)
    told = "does not take version 602: no place for it; it is started again with version 601"
    assert any(told in text for text in notices)


def test_closed_for_good(engine: VllmEngine, policy: Policy) -> None:
    pids = engine.pids
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(ask(policy))
    assert not any(psutil.pid_exists(pid) for pid in pids)
