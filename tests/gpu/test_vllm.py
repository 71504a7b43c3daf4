"""The vLLM engine on a GPU against the transformers engine on the CPU, as tests/vllm has it for CPUs. Tests
run in order and share one engine for each type; damage comes last."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config import VllmConfig
from node.rollout.adapter import AdapterSpec, adapter_state, wrap
from node.rollout.engine.base import Generation, GenerationRequest, TokenSequence
from node.rollout.engine.parity import ParityProbe, probe_sequences
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from protocol.errors import ConfigError
from protocol.messages import Rollout, Sampling

QUESTIONS = ("spell abc backward", "1 + 2", "sort 3 1 2")
MEAN_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats, on average over tokens, from float32 on the CPU."""
State = dict[str, Tensor]


@dataclass
class World:
    """An engine on the GPU, two sets of weights in its type, and for each a reference that scores with it."""

    engine: VllmEngine
    states: list[State]
    oracles: list[TransformersEngine]
    tolerance: float
    notices: list[str] = field(default_factory=list)

    def give(self, version: int) -> None:
        self.engine.update(self.states[version % 2], version)

    def gap(self, sequences: Sequence[TokenSequence], version: int) -> float:
        """Mean distance in nats of the engine from the reference of this version."""
        pairs = zip(
            self.engine.logprobs(sequences), self.oracles[version % 2].logprobs(sequences), strict=True
        )
        return float(np.mean(np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])))


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def world(request: pytest.FixtureRequest, policy: Policy) -> Iterator[World]:
    dtype = getattr(torch, request.param)
    base = {name: tensor.clone() for name, tensor in policy.load_model().state_dict().items()}
    generator = torch.Generator().manual_seed(1)

    def moved() -> State:
        state = {
            name: (tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator))
            .to(dtype)
            .float()
            for name, tensor in base.items()
        }
        tied = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
        return state | (tied if "lm_head.weight" in base and policy_is_tied(base) else {})

    states = [moved(), moved()]
    oracles = [TransformersEngine(policy), TransformersEngine(policy)]
    for oracle, state in zip(oracles, states, strict=True):
        oracle.update(state, 0)
    notices: list[str] = []
    engine = VllmEngine(
        policy,
        VllmConfig(dtype=request.param, max_concurrent=16, max_context=512, gpu_memory_share=0.3),
        in_flight="recycle",
        sleeps=True,
        notice=lambda level, text: notices.append(f"{level}: {text}"),
    )
    yield World(engine, states, oracles, MEAN_TOLERANCE[request.param], notices)
    engine.close()


def policy_is_tied(state: State) -> bool:
    return torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


@pytest.fixture(scope="module")
def probe(policy: Policy) -> list[TokenSequence]:
    return probe_sequences([policy.encode_prompt(question) for question in QUESTIONS], policy.vocab_size)


def ask(policy: Policy, n: int = 8, max_new_tokens: int = 200) -> list[GenerationRequest]:
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return [
        GenerationRequest(tuple(policy.encode_prompt(question)), n, 7, sampling) for question in QUESTIONS
    ]


def drain(generation: Generation, done: dict[int, list[Rollout]]) -> list[list[Rollout]]:
    while groups := generation.wait():
        done.update(groups)
    return [done[ticket] for ticket in sorted(done)]


def check(
    world: World, requests: Sequence[GenerationRequest], groups: Sequence[list[Rollout]]
) -> list[set[int]]:
    """Every token's log-probability is that of its own version. Returns the versions of each rollout."""
    gaps: list[np.ndarray] = []
    spans = []
    for request, group in zip(requests, groups, strict=True):
        assert len(group) == request.n
        for rollout in group:
            ids = np.frombuffer(rollout.answer.token_ids, "<u4")
            logprobs = np.frombuffer(rollout.answer.logprobs, "<f4")
            versions = np.frombuffer(rollout.answer.versions, "<u4")
            assert len(ids) == len(logprobs) == len(versions) <= request.sampling.max_new_tokens
            sequence = TokenSequence(request.prompt_ids, tuple(ids.tolist()))
            both = [oracle.logprobs([sequence])[0] for oracle in world.oracles]
            gaps.append(np.abs(np.where(versions % 2 == 0, *both) - logprobs))
            spans.append(set(versions.tolist()))
    assert np.concatenate(gaps).mean() < world.tolerance
    return spans


def test_sparse_updates_reach_the_running_engine(
    world: World, policy: Policy, probe: list[TokenSequence]
) -> None:
    for version in (0, 1, 2):
        world.give(version)
        assert world.gap(probe, version) < world.tolerance < world.gap(probe, version + 1)
    sparse = dict(world.states[0])
    sparse["model.norm.weight"] = sparse["model.norm.weight"] * 2
    whole = world.engine.patch_bytes
    world.engine.update(sparse, 4)
    assert 0 < world.engine.patch_bytes < whole / 30
    reference = TransformersEngine(policy)
    reference.update(sparse, 4)
    ParityProbe(tuple(probe), 20 * world.tolerance).check(world.engine, reference.logprobs(probe))
    world.give(0)


def test_generates_with_the_probabilities_it_reports(world: World, policy: Policy) -> None:
    requests = ask(policy, max_new_tokens=40)
    assert set().union(*check(world, requests, world.engine.generate(requests))) == {0}


def test_partial_rollouts_over_an_update(world: World, policy: Policy) -> None:
    requests = ask(policy)
    generation = world.engine.open()
    generation.start(requests)
    done = dict(generation.wait(tokens=100))
    held = generation.sampled
    world.give(1)
    assert generation.sampled == held
    spans = check(world, requests, drain(generation, done))
    assert any(span == {0, 1} for span in spans)
    assert generation.sampled == sum(
        len(rollout.answer.token_ids) // 4 for group in done.values() for rollout in group
    )


def test_sleep_gives_memory_away_and_keeps_rollouts(
    world: World, policy: Policy, probe: list[TokenSequence]
) -> None:
    requests = ask(policy)
    generation = world.engine.open()
    generation.start(requests)
    done = dict(generation.wait(tokens=100))
    free_before, _ = torch.cuda.mem_get_info()
    world.engine.sleep()
    free_asleep, total = torch.cuda.mem_get_info()
    assert free_asleep - free_before > 0.1 * total, "most of its share of 0.3 comes back"
    scored: list[np.ndarray] = []
    scorer = threading.Thread(target=lambda: scored.extend(world.engine.logprobs(probe)))
    scorer.start()
    world.give(2)
    assert torch.cuda.mem_get_info()[0] - free_before > 0.1 * total, "weights alone are back"
    assert scored == []
    world.engine.wake()
    scorer.join(60)
    assert len(scored) == len(probe)
    assert world.gap(probe, 2) < world.tolerance
    check(world, requests, drain(generation, done))


def test_a_killed_process_is_replaced(world: World, policy: Policy, probe: list[TokenSequence]) -> None:
    requests = ask(policy)
    generation = world.engine.open()
    generation.start(requests)
    done = dict(generation.wait(tokens=100))
    os.kill(world.engine.pids[0], signal.SIGKILL)
    check(world, requests, drain(generation, done))
    assert any("started again with version 2" in text for text in world.notices)
    assert world.gap(probe, 2) < world.tolerance


def test_an_adapter_alone_is_sent(policy: Policy, probe: list[TokenSequence]) -> None:
    spec = AdapterSpec(rank=8, alpha=16.0)
    start = adapter_state(wrap(policy.load_model(), spec))
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    reference = TransformersEngine(policy, adapter=spec)
    engine = VllmEngine(
        policy,
        VllmConfig(dtype="bfloat16", max_concurrent=16, max_context=512, gpu_memory_share=0.3),
        adapter=spec,
    )
    try:
        before = engine.logprobs(probe)
        engine.update(state, 1)
        reference.update(state, 1)
        ours, theirs = (np.concatenate(scorer.logprobs(probe)) for scorer in (engine, reference))
        changed = np.abs(np.concatenate(before) - theirs).mean()
        assert np.abs(ours - theirs).mean() < min(MEAN_TOLERANCE["bfloat16"], changed / 2)
        ((rollout, *_), *_) = engine.generate(ask(policy, n=2, max_new_tokens=16))
        assert set(np.frombuffer(rollout.answer.versions, "<u4").tolist()) == {1}
    finally:
        engine.close()


def test_an_adapter_needs_sixteen_bits(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="computes adapters on a GPU in 16 bits only"):
        VllmEngine(policy, VllmConfig(dtype="float32"), adapter=AdapterSpec(rank=8, alpha=16.0))
