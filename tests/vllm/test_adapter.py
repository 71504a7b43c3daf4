"""A policy that is an adapter: only that goes to vLLM, and rollouts finish with the one they began with.
Tests run in order and share one engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config import VllmConfig
from node.rollout.adapter import AdapterSpec, adapter_state, wrap
from node.rollout.engine._vllm_life import Life
from node.rollout.engine.base import EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.parity import ParityProbe, probe_sequences
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from protocol.messages import Sampling

SPEC = AdapterSpec(rank=4, alpha=8.0)
TOLERANCE = 1e-4
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def states(policy: Policy) -> list[State]:
    """Adapters of three versions; the first changes nothing."""
    start = adapter_state(wrap(policy.load_model(), SPEC))
    generator = torch.Generator().manual_seed(0)
    return [start] + [
        {name: 0.15 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
        for _ in range(2)
    ]


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VllmEngine]:
    settings = VllmConfig(kv_cache_mib=64, max_concurrent=8, deadline_s=60)
    notices: list[str] = []
    engine = VllmEngine(policy, settings, adapter=SPEC, notice=lambda level, text: notices.append(level))
    yield engine
    assert "warning" not in notices, "it lived on"
    engine.close()


@pytest.fixture(scope="module")
def reference(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy, adapter=SPEC)


@pytest.fixture(scope="module")
def probe(policy: Policy) -> ParityProbe:
    prompts = [policy.encode_prompt(question) for question in ("1 + 2", "sort 3 1 2")]
    return ParityProbe(tuple(probe_sequences(prompts, policy.vocab_size)), TOLERANCE)


def folders(engine: VllmEngine) -> list[str]:
    assert engine.folders is not None
    return sorted(path.name for path in engine.folders.root.iterdir())


def test_only_the_adapter_is_sent(
    engine: VllmEngine, reference: TransformersEngine, states: list[State], probe: ParityProbe
) -> None:
    probe.check(engine, reference.logprobs(probe.sequences))
    (base,) = engine.logprobs(probe.sequences[:1])
    for version in (0, 1, 2):
        reference.update(states[version], version)
        expected = reference.logprobs(probe.sequences)
        max_abs, reloaded = probe.update(engine, states[version], version, expected)
        assert max_abs < TOLERANCE
        assert not reloaded
        assert engine.policy_version == version
        assert engine.patch_bytes == sum(tensor.nbytes for tensor in states[version].values())
    assert np.abs(engine.logprobs(probe.sequences[:1])[0] - base).max() > 0.1
    assert folders(engine) == ["3"], "adapters that no request needs are gone"


@pytest.mark.parametrize("in_flight", ["continue", "recycle"])
def test_rollouts_under_way_when_an_adapter_comes(
    engine: VllmEngine,
    policy: Policy,
    states: list[State],
    in_flight: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "in_flight", in_flight)
    oracles = [TransformersEngine(policy, adapter=SPEC) for _ in states]
    for oracle, state in zip(oracles, states, strict=True):
        oracle.update(state, 0)
    engine.update(states[1], 1)
    prompt = tuple(policy.encode_prompt("spell abc backward"))
    short = GenerationRequest(prompt, 1, 7, Sampling(max_new_tokens=1))
    long = GenerationRequest(prompt, 6, 7, Sampling(max_new_tokens=60), min_new_tokens=40)
    generation = engine.open()
    generation.start([short, long])
    generation.wait()
    engine.update(states[2], 2)
    assert len(folders(engine)) == (2 if in_flight == "continue" else 1)
    ((_, group),) = generation.wait()
    spans = set()
    for rollout in group:
        ids = tuple(np.frombuffer(rollout.answer.token_ids, "<u4").tolist())
        logprobs = np.frombuffer(rollout.answer.logprobs, "<f4")
        versions = np.frombuffer(rollout.answer.versions, "<u4")
        spans |= {tuple(sorted(set(versions.tolist())))}
        for version in set(versions.tolist()):
            (plain,) = oracles[version].logprobs([TokenSequence(prompt, ids)])
            ends = oracles[version].logprobs(
                [TokenSequence(prompt + ids[:place], (policy.eos_token_id,)) for place in range(40)]
            )
            gains = np.pad(-np.log1p(-np.exp(np.concatenate(ends))), (0, len(ids) - 40))
            # Where the end token had nearly all of the probability, what is left for others is rounding.
            left = np.pad(-np.expm1(np.concatenate(ends)), (0, len(ids) - 40), constant_values=1.0)
            compared = (versions == version) & (left > 0.1)
            assert compared.any()
            assert np.abs(plain + gains - logprobs)[compared].max() < TOLERANCE
    assert spans == ({(1,)} if in_flight == "continue" else {(1, 2)})
    engine.update(states[2], 2)
    assert len(folders(engine)) == 1


def test_what_is_no_adapter_changes_nothing(engine: VllmEngine, states: list[State]) -> None:
    (name, *_) = sorted(states[1])
    before = folders(engine)
    for wrong, words in (
        ({}, f"{name} is missing"),
        (
            states[1] | {"model.norm.weight": torch.zeros(128)},
            "model.norm.weight is no tensor of the adapter",
        ),
        (states[1] | {name: torch.zeros(3, 128)}, r"\(3, 128\), not \(4, 384\)"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.update(wrong, 9)
    assert engine.policy_version == 2
    assert folders(engine) == before


def test_a_new_process_gets_the_newest_adapter(
    engine: VllmEngine, reference: TransformersEngine, states: list[State], probe: ParityProbe
) -> None:
    assert engine.life is not None
    successor = Life(engine.life.process, 8, 0)
    successor.process.run(engine.settle(successor))
    assert (successor.adapter, successor.version) == (engine.folders.newest, 2)  # type: ignore[union-attr]


def test_nothing_is_left_of_it(engine: VllmEngine) -> None:
    assert engine.folders is not None
    engine.close()
    assert not engine.folders.root.exists()
