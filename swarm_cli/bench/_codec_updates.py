"""Real updates for `swarm bench codec`: the bf16 view of a policy before and after one AdamW step.

For: pairs of weight sets as a trainer makes them - FP32 masters, AdamW as `node.train.settings` has it, the
policy gradient of rollouts that the policy sampled itself, with random advantages (what the codec sees
depends on the size and the noise of gradients, not on which answers are right). The first steps of Adam move
every weight by the whole learning rate, so `STEPS` are made and the last one is measured. Pairs are kept as
safetensors, for they take minutes. Not for: coding them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train.settings import TrainSettings
from node.weights.chain.bf16 import U16, to_bits
from protocol.messages import Sampling
from protocol.rollouts import parse_tokens
from swarm_cli.bench.measure import Say

__all__ = ["Update", "UpdateKind", "make_update", "spread"]

STEPS = 12
"""Adam's steps until the one that is measured, that one included."""
PROMPTS, ANSWERS, TOKENS = 8, 4, 24
"""Rollouts: prompts, answers to each, tokens of each."""
PROMPTS_PER_STEP = 2
SEED = 4


@dataclass(frozen=True)
class UpdateKind:
    """Which update."""

    spread: bool
    """Masters anywhere in their bf16 cells, as deep in a run; else at the centre, as just loaded."""
    learning_rate: float
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"{'late' if self.spread else 'fresh'}-{self.learning_rate:g}-{self.steps}"


@dataclass(frozen=True)
class Update:
    """One optimiser step: bf16 bits by name, tied tensors once."""

    base: dict[str, U16]
    new: dict[str, U16]


def make_update(policy: Policy, kind: UpdateKind, cache: Path, say: Say) -> Update:
    """The update, made once for each policy and kind and then read from `cache`. Minutes."""
    key = hashlib.sha256(json.dumps([policy.base_model, kind.name, 1]).encode()).hexdigest()[:16]
    folder = cache / f"{kind.name}-{key}"
    files = (folder / "base.safetensors", folder / "new.safetensors")
    if not files[1].exists():
        update = _train(policy, kind, say)
        folder.mkdir(parents=True, exist_ok=True)
        for file, bits in zip(files, (update.base, update.new), strict=True):
            part = file.with_suffix(".part")
            save_file(bits, part)
            part.rename(file)
    return Update(*(load_file(file) for file in files))


def _train(policy: Policy, kind: UpdateKind, say: Say) -> Update:
    settings = TrainSettings()
    say(f"{kind.name}: sampling rollouts")
    rollouts = _rollouts(policy)
    torch.manual_seed(SEED)
    model = policy.load_model()
    if kind.spread:
        spread(model)
    parameters = dict(model.named_parameters())
    optimiser = torch.optim.AdamW(
        parameters.values(),
        lr=kind.learning_rate,
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    bits = to_bits(parameters)
    for step in range(kind.steps):
        first = step * PROMPTS_PER_STEP % len(rollouts)
        for group in rollouts[first : first + PROMPTS_PER_STEP]:
            torch.autograd.backward(_loss(model, *group))
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        before, bits = bits, to_bits(parameters)
        changed = sum(int(np.count_nonzero(bits[name] != before[name])) for name in bits)
        density = changed / sum(array.size for array in bits.values())
        say(f"{kind.name}: step {step + 1} of {kind.steps} changed {density:.3%}")
    return Update(before, bits)


def _rollouts(policy: Policy) -> list[tuple[torch.Tensor, int]]:
    """For each prompt its answers, prompt included, and how long the prompt is."""
    engine = TransformersEngine(policy)
    try:
        prompts = [tuple(policy.encode_prompt(f"{place} * {place + 3} + 7")) for place in range(PROMPTS)]
        sampling = Sampling(max_new_tokens=TOKENS)
        requests = [
            GenerationRequest(prompt, ANSWERS, SEED + place, sampling, min_new_tokens=TOKENS)
            for place, prompt in enumerate(prompts)
        ]
        groups = engine.generate(requests)
        answers = [[parse_tokens(answer).token_ids_T.tolist() for answer in group] for group in groups]
        return [
            (torch.tensor([[*prompt, *ids] for ids in group]), len(prompt))
            for prompt, group in zip(prompts, answers, strict=True)
        ]
    finally:
        engine.close()


def _loss(model: torch.nn.Module, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """The policy gradient's loss of a group's rows of ids; advantages are drawn anew at every step."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
    advantages = torch.randn(len(ids))
    advantages = (advantages - advantages.mean()) / advantages.std()
    return -(advantages[:, None] * logprobs).mean()


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Masters to anywhere in their bf16 cells: the lower 16 bits, which were zero, become any that round
    back."""
    for parameter in model.parameters():
        bits = parameter.view(torch.int32)
        lower = torch.randint(-0x7FFF, 0x8000, bits.shape, dtype=torch.int32)
        bits += torch.where(bits & 0x7FFFFFFF == 0, lower.abs(), lower)  # below zero would be another sign
