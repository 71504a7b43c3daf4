"""`swarm bench objectives`: what an objective costs beside the model it trains.

Each preset computes its losses and their gradient with respect to log-probabilities of B rollouts of T
tokens, float32, random and far enough apart that clips, masks and statistics have work; and so does the plain
policy gradient with the mean over tokens. They run by turns, and the overhead is the median difference, held
against the trainer's own step on fewer tokens, scaled by their number.

Objectives with statistics over the batch make a second pass of the model, without gradient, when a batch does
not fit into one micro-batch; it is reported by itself (`second_pass_share`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train.objectives import LossInputs, Objective, all_presets, open_objective
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import collate
from node.weight.groups import OWN_SOURCE, TrainingGroup, TrainingRollout
from node.weight.settings import Treatment, WeightSettings
from swarm_cli.bench.measure import Say, envelope, in_turn

__all__ = ["FULL", "QUICK", "Size", "bench_objectives"]

BAR = 0.1
"""Share of a training step that an objective may cost."""
REQUIRED_OPTION = 0.1
"""For options without a default; the value costs nothing."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rows: int
    tokens: int
    rounds: int
    step_rows: int
    step_tokens: int
    steps: int


FULL = Size(rows=64, tokens=1024, rounds=9, step_rows=2, step_tokens=256, steps=3)
QUICK = Size(rows=8, tokens=64, rounds=2, step_rows=2, step_tokens=8, steps=1)


def bench_objectives(policy: Policy | None, size: Size, say: Say) -> dict[str, Any]:
    """The report; without a policy nothing is held against a step."""
    step_s, pass_s = (None, None) if policy is None else _step_seconds(policy, size, say)
    inputs = _inputs(size)
    plain = open_objective("uncorrected")
    found: dict[str, dict[str, Any]] = {}
    plain_ms = []
    for preset in all_presets():
        objective = preset.make(**dict.fromkeys(preset.required, REQUIRED_OPTION))
        ours, theirs = partial(_learn_s, objective, inputs), partial(_learn_s, plain, inputs)
        pairs = in_turn(size.rounds + 1, ours, theirs, lambda _: None)
        ours_s, theirs_s = pairs.ours[1:], pairs.theirs[1:]  # the first warms up
        plain_ms.append(1e3 * median(theirs_s))
        overhead_s = median(our - their for our, their in zip(ours_s, theirs_s, strict=True))
        found[preset.name] = {
            "ms": 1e3 * median(ours_s),
            "overhead_ms": 1e3 * overhead_s,
            "share_of_step": None if step_s is None else overhead_s / step_s,
            "whole_batch": objective.whole_batch,
        }
    shares = {name: row["share_of_step"] for name, row in found.items() if row["share_of_step"] is not None}
    worst = max(found, key=lambda name: found[name]["overhead_ms"])
    results = {
        "rows": size.rows,
        "tokens": size.tokens,
        "model": None if policy is None else str(policy.path),
        "step_s": step_s,
        "second_pass_share": None if step_s is None or pass_s is None else pass_s / step_s,
        "plain_ms": median(plain_ms),
        "worst": worst,
        "bar": BAR,
        "passed": all(share < BAR for share in shares.values()) if shares else None,
        "objectives": found,
    }
    return envelope("objectives", results)


def _learn_s(objective: Objective, inputs: LossInputs, _: int) -> float:
    began_s = time.perf_counter()
    logprobs = inputs.logprobs_BT.detach().requires_grad_()
    result = objective(replace(inputs, logprobs_BT=logprobs))
    torch.autograd.grad(result.loss_BT.sum() / inputs.mask_BT.numel(), logprobs)
    return time.perf_counter() - began_s


def _inputs(size: Size) -> LossInputs:
    draw = torch.Generator().manual_seed(5)
    shape = (size.rows, size.tokens)
    logprobs = -3.0 * torch.rand(shape, generator=draw)

    def other() -> torch.Tensor:
        return logprobs + 0.3 * torch.randn(shape, generator=draw)

    lengths = torch.randint(size.tokens // 2, size.tokens + 1, (size.rows,), generator=draw)
    mask, behaviour = torch.arange(size.tokens) < lengths[:, None], other()
    return LossInputs(
        logprobs_BT=logprobs,
        ingestion_BT=other(),
        behaviour_BT=behaviour,
        behaviour_sum_B=torch.where(mask, behaviour, 0.0).sum(-1),
        mask_BT=mask,
        advantages_B=torch.randn(size.rows, generator=draw),
        uses_B=torch.ones(size.rows),
        own_mean_logprobs_N=-3.0 * torch.rand(size.rows, generator=draw),
        own_tokens_N=lengths.float(),
        rewards_B=torch.rand(size.rows, generator=draw),
        lags_BT=torch.randint(0, 9, shape, generator=draw).float(),
        source_B=torch.randint(0, 3, (size.rows,), generator=draw),
        snapshot_BT=other(),
        ewma_BT=other(),
    )


def _step_seconds(policy: Policy, size: Size, say: Say) -> tuple[float, float]:
    """A training step on as many tokens as the objectives get, and a pass without gradient over them."""
    settings = TrainSettings(
        weight=WeightSettings(max_completion_tokens=size.step_tokens), measure_start_kl=False
    )
    trainer = Trainer(policy, settings)
    group = _group(policy, size)
    batch = collate([group], settings.weight, policy)
    sequences = [TokenSequence(group.prompt_ids, tuple(each.tokens_T.tolist())) for each in group.rollouts]
    scale = size.rows * size.tokens / (size.step_rows * size.step_tokens)
    trainer.step(batch)
    steps, passes = [], []
    for place in range(size.steps):
        steps.append(scale * _seconds(lambda: trainer.step(batch)))
        passes.append(scale * _seconds(lambda: trainer.logprobs(sequences)))
        say(f"step {place + 1} of {size.steps}: {steps[-1]:.1f} s for {size.rows} x {size.tokens} tokens")
    return median(steps), median(passes)


def _group(policy: Policy, size: Size) -> TrainingGroup:
    draw = np.random.default_rng(5)
    rollouts = tuple(
        TrainingRollout(
            draw.integers(0, policy.vocab_size, size.step_tokens),
            -float(size.step_tokens),
            np.full(size.step_tokens, -1.0, np.float32),
        )
        for _ in range(size.step_rows)
    )
    return TrainingGroup(
        source=OWN_SOURCE,
        group="bench",
        prompt_ids=tuple(policy.encode_prompt("Count the letters.")),
        rollouts=rollouts,
        rewards=tuple(float(place % 2) for place in range(size.step_rows)),
        advantages=tuple(float(place % 2) - 0.5 for place in range(size.step_rows)),
        treatment=Treatment.OWN,
    )


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
